"""Checkpoints of process groups: one writer under DDP, one shard per rank under FSDP2, and what if a rank dies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ftlab.checkpoint import tree
from ftlab.checkpoint.manager import CheckpointManager
from ftlab.checkpoint.storage import LocalStorage
from ftlab.checkpoint.vault import Vault
from ftlab.errors import CheckpointError, CheckpointMismatch, StorageError, WaitTimeout
from tests import groups

TIMEOUT_S = 2.0


def errors(outcomes: list[groups.Outcome | None]) -> list[BaseException | None]:
    return [outcome.error if outcome is not None else None for outcome in outcomes]


def same(left: Any, right: Any) -> bool:
    return tree.digest(left) == tree.digest(right)


# ---- DDP


def test_under_ddp_one_rank_writes_all_return_and_all_load_the_same(tmp_path):
    saved = groups.values(groups.run(3, groups.ddp_saves, tmp_path))
    digests, names, events = zip(*saved, strict=True)
    assert len(set(digests)) == len(set(names)) == 1
    assert [kinds[:-1] for kinds in events] == [["checkpoint.snapshot", "checkpoint.committed"],
                                                ["checkpoint.snapshot"], ["checkpoint.snapshot"]]
    assert sorted(os.listdir(tmp_path / "run")) == [names[0]], "one checkpoint, and no probe is left"
    files = {path.name: path.stat().st_size for path in (tmp_path / "run" / names[0]).glob("shard-*.bin")}
    with CheckpointManager(str(tmp_path / "run")) as manager:
        held = [set(tree.unpack(manager.vault.read_shard(names[0], shard))["parts"])
                for shard in manager.entries()[0].manifest.shards]
    assert len(files) == 3 and held[1:] == [{"generators"}] * 2 and "model" in held[0], "one rank writes the state"
    loaded = groups.values(groups.run(3, groups.ddp_loads, tmp_path))
    assert [found[:2] for found in loaded] == [(4, digests[0])] * 3
    assert len({found[2] for found in loaded}) == 1, "and they go on together"


def test_a_ddp_run_goes_on_with_the_same_bits_and_its_checkpoint_loads_in_another_world(tmp_path):
    """Two ranks: with three, the order of a sum depends on how DDP has arranged its buckets so far."""
    digest, _, (*_, end) = groups.values(groups.run(2, groups.ddp_saves, tmp_path))[0]
    assert groups.values(groups.run(2, groups.ddp_loads, tmp_path)) == [(4, digest, end)] * 2
    assert {loaded[1] for loaded in groups.values(groups.run(3, groups.ddp_loads, tmp_path))} == {digest}
    assert {loaded[1] for loaded in groups.values(groups.run(1, groups.ddp_loads, tmp_path))} == {digest}


def test_what_one_rank_cannot_read_is_loaded_by_none_and_set_aside(tmp_path):
    """Of a state that all hold, a rank reads the first shard and its own: only rank 2 can see this damage."""
    older, _ = groups.values(groups.run(3, groups.ddp_saves_twice, tmp_path))[0]
    flip(next((tmp_path / "run").glob("step-0000000004-*/shard-00002.bin")))
    resumed = groups.values(groups.run(3, groups.ddp_resumes, tmp_path))
    assert [found[:3] for found in resumed] == [(2, True, older)] * 3
    assert [found[3] for found in resumed] == [["checkpoint.damaged", "checkpoint.loaded"], ["checkpoint.loaded"],
                                               ["checkpoint.loaded"]]
    flip(next((tmp_path / "run").glob("step-0000000002-*/shard-00002.bin")))
    resumed = groups.values(groups.run(3, groups.ddp_resumes, tmp_path))
    assert [found[:2] for found in resumed] == [(None, False)] * 3, "and none of them has a part of it"
    assert len(list((tmp_path / "run").glob("*/DAMAGED"))) == 2


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[10] ^= 1
    file.write_bytes(raw)


def test_ranks_that_are_slow_to_look_are_not_fooled_by_the_retention(tmp_path):
    names = groups.values(groups.run(3, groups.ddp_saves_often, tmp_path, 25))
    assert names[0] == names[1] == names[2]


def test_a_folder_that_is_not_shared_is_told_on_all_ranks_when_the_manager_is_made(tmp_path):
    for error in errors(groups.run(3, groups.own_folder, tmp_path)):
        assert isinstance(error, StorageError), error
        assert "cannot be used by all 3 ranks as one storage" in error.message
        assert "rank 1" in error.seen and "rank 2" in error.seen and "rank 0 on" not in error.seen
        assert "every node mounts" in error.hint
    assert [os.listdir(tmp_path / f"run-{rank}") for rank in range(3)] == [[], [], []], "no probe is left"


def test_a_folder_that_one_rank_cannot_open_is_told_on_all_ranks(tmp_path):
    for error in errors(groups.run(3, groups.one_cannot_open, tmp_path, group_s=5)):
        assert isinstance(error, StorageError), error
        assert "rank 1" in str(error) or "file/run" in str(error)


def test_a_folder_that_rank_0_cannot_read_is_told_on_all_ranks(tmp_path):
    for error in errors(groups.run(3, groups.one_cannot_find, tmp_path, group_s=5)):
        assert isinstance(error, StorageError), error


def test_a_checkpoint_of_another_model_is_told_on_all_ranks(tmp_path):
    for error in errors(groups.run(3, groups.other_model, tmp_path, group_s=5)):
        assert isinstance(error, CheckpointMismatch), error
        assert "model.weight: (2, 2) float32 here, (3, 3) float32 there" in error.seen


def test_when_the_writer_dies_in_mid_save_the_others_raise_after_the_timeout(tmp_path):
    outcomes = groups.run(3, groups.writer_dies, tmp_path, TIMEOUT_S)
    assert outcomes[0] is None, "the fault fired: rank 0 is dead"
    for outcome in outcomes[1:]:
        assert outcome is not None and isinstance(outcome.error, StorageError), outcome and outcome.error
        assert f"after {TIMEOUT_S:g} s" in outcome.error.message
        assert "the writer may also have failed" in outcome.error.hint
        assert TIMEOUT_S <= outcome.seconds < 10 * TIMEOUT_S
    vault = Vault(LocalStorage(str(tmp_path / "run")))
    assert [(entry.step, entry.status) for entry in vault.entries()] == [(1, "good"), (2, "incomplete")]


# ---- FSDP2


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint that two ranks saved, and all that was in it, put together."""
    folder = tmp_path_factory.mktemp("fsdp")
    left, right = groups.values(groups.run(2, groups.fsdp_saves, folder))
    assert same(left, right)
    return folder, left


@pytest.fixture(scope="module")
def alone(two_ranks: tuple[Path, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same checkpoint in one plain process without a group."""
    return groups.load_and_go_on(groups.Shards(sharded=False, seed=9), two_ranks[0])


def test_under_fsdp_every_rank_writes_its_own_shard(two_ranks):
    [entry] = Vault(LocalStorage(str(two_ranks[0] / "run"))).entries()
    assert entry.manifest.world == 2 and [shard.rank for shard in entry.manifest.shards] == [0, 1]


def test_shards_of_two_ranks_load_in_one_process_without_a_group(two_ranks, alone):
    loaded, after = alone
    assert same(loaded, two_ranks[1]) and not same(after, loaded)
    assert all(grad is not None and grad.abs().sum() > 0 for grad in loaded["grads"][-2:]), "gradients came along"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shards_of_two_ranks_load_in_any_world_and_training_goes_on(two_ranks, alone, world):
    """With the same data on all ranks, the mean of their gradients is the gradient of one."""
    for loaded, after in groups.values(groups.run(world, groups.fsdp_loads, two_ranks[0])):
        assert same(loaded, two_ranks[1])
        for mine, theirs in zip(after["weights"], alone[1]["weights"], strict=True):
            assert mine.allclose(theirs, atol=1e-6)
        assert not same(after, loaded)


def test_each_rank_of_the_same_world_goes_on_with_its_own_random_numbers_and_parts(tmp_path):
    expected = groups.values(groups.run(2, groups.fsdp_goes_on, tmp_path, None))
    resumed = groups.values(groups.run(2, groups.fsdp_goes_on, tmp_path, 3))
    assert [extras for _, extras in resumed] == [extras for _, extras in expected], "each rank's own parts"
    assert same(resumed[0][0]["weights"], expected[0][0]["weights"]), "the same bits as without a stop"


def test_when_a_rank_dies_before_its_shard_is_written_the_others_raise_and_the_old_one_stays(tmp_path):
    outcomes = groups.run(3, groups.fsdp_rank_dies, tmp_path, TIMEOUT_S)
    assert outcomes[1] is None, "the fault fired: rank 1 is dead"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome is not None
        assert isinstance(outcome.error, CheckpointError | WaitTimeout), outcome.error
        assert outcome.seconds < 10 * TIMEOUT_S
    vault = Vault(LocalStorage(str(tmp_path / "run")))
    assert [entry.step for entry in vault.entries() if entry.good] == [1]


def test_one_shard_of_two_with_a_flipped_bit_damages_the_checkpoint(tmp_path):
    groups.values(groups.run(2, groups.fsdp_saves, tmp_path))
    shard = next((tmp_path / "run").glob("*/shard-00001.bin"))
    raw = bytearray(shard.read_bytes())
    raw[10] ^= 1
    shard.write_bytes(raw)
    events: list[str] = []
    with CheckpointManager(str(tmp_path / "run"), on_event=lambda kind, facts: events.append(kind)) as manager:
        assert manager.load_latest(groups.Shards(sharded=False, seed=9).state) is None
    assert events == ["checkpoint.damaged"]
