"""Checkpoints in a storage: complete or absent, at whatever moment the process that writes them ends."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ftlab.checkpoint import tree
from ftlab.checkpoint.arena import Slot
from ftlab.checkpoint.manager import CheckpointManager
from ftlab.checkpoint.saving import SaveOrder, persist, retire
from ftlab.checkpoint.storage import LocalStorage
from ftlab.checkpoint.vault import COMMIT, DAMAGED, MANIFEST, Vault, digest
from ftlab.errors import CheckpointDamaged, NoCheckpoint, StorageError
from tests import groups
from tests.limits import SOON_S

KILLS = 12
SEED = random.Random().randrange(10**6)


def save(vault: Vault, step: int, tag: str = "", *, keep: int = 99, rank: int = 0, world: int = 1) -> str:
    """One checkpoint, whose tensors all hold its step; the folder's name."""
    slot = Slot()
    try:
        filled = slot.fill(tree.pack({"step": step, "weight": torch.full((300,), float(step))}))
        order = SaveOrder(step=step, tag=tag or f"t{step}", bytes=filled.bytes, header_bytes=filled.header_bytes,
                          rank=rank, world=world)
        persist(vault, order, slot.view(filled.bytes), timeout_s=5)
        if order.rank == 0:
            retire(vault, keep)
        return order.name
    finally:
        slot.close()


def load(vault: Vault, name: str) -> Any:
    manifest = vault.look(name).manifest
    assert manifest is not None
    [saved] = [tree.unpack(vault.read_shard(name, shard)) for shard in manifest.shards]
    assert saved["weight"].eq(saved["step"]).all()
    return saved["step"]


@pytest.fixture
def vault(tmp_path) -> Vault:
    return Vault(LocalStorage(str(tmp_path)))


def good(vault: Vault) -> list[int]:
    return [entry.step for entry in vault.entries() if vault.verify(entry.name).good]


# ---- complete or absent


def test_a_checkpoint_is_shards_a_manifest_with_their_digests_and_a_marker_with_its_own(vault, tmp_path):
    name = save(vault, 7)
    assert sorted(os.listdir(tmp_path / name)) == [COMMIT, MANIFEST, "shard-00000.bin"]
    raw = (tmp_path / name / MANIFEST).read_bytes()
    manifest = json.loads(raw)
    assert (tmp_path / name / COMMIT).read_text() == digest(raw)
    [shard] = manifest["shards"]
    assert shard["digest"] == digest((tmp_path / name / "shard-00000.bin").read_bytes())
    assert manifest["step"] == 7 and manifest["world"] == 1 and load(vault, name) == 7


class Recorder(LocalStorage):
    """Says in which order things were asked of it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.asked: list[str] = []

    def write(self, folder: str, name: str, pieces: Any) -> None:
        super().write(folder, name, pieces)
        self.asked.append(f"write {name}")

    def create(self, folder: str, name: str, data: bytes) -> bool:
        created = super().create(folder, name, data)
        self.asked.append(f"create {name}: {created}")
        return created

    def sync(self, folder: str) -> None:
        super().sync(folder)
        self.asked.append("sync")

    def remove(self, folder: str, first: str) -> None:
        self.asked.append(f"remove {folder}")
        super().remove(folder, first)


def test_the_marker_comes_last_after_everything_else_is_durable_and_old_ones_go_after_it(tmp_path):
    vault = Vault(Recorder(str(tmp_path)))
    old = save(vault, 1)
    vault.storage.asked.clear()
    save(vault, 2, keep=1)
    asked = vault.storage.asked
    assert asked[:5] == ["write shard-00000.bin", f"write {MANIFEST}", "sync", f"create {COMMIT}: True", "sync"]
    assert asked[5] == f"remove {old}"


class Killed(BaseException):
    """The process ended here."""


class Fuse:
    """Ends the process at the n-th change to the disk; a large write that it hits is half done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 10**9
        for name in ("open", "write", "fsync", "link", "unlink", "rmdir", "mkdir"):
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0 and name == "write" and len(args[1]) > 512:
                call(args[0], args[1][:len(args[1]) // 2])
            if self.left <= 0:
                raise Killed
            return call(*args, **kwargs)
        return counted


def every_moment(run: Callable[[], None], fuse: Fuse, fresh: Callable[[], None]) -> Iterator[int]:
    """Run again and again, each time killed one moment later, until it gets through."""
    for moment in range(1, 500):
        fuse.left = 10**9
        fresh()
        fuse.left = moment
        try:
            run()
        except Killed:
            fuse.left = 10**9
            yield moment
        else:
            fuse.left = 10**9
            assert moment > 20, "the fuse saw less than a save does"
            return
    pytest.fail("the save never got through")


def test_killed_at_any_moment_of_a_save_there_is_the_old_state_or_the_new_and_the_next_save_clears_up(
        tmp_path, monkeypatch):
    fuse = Fuse(monkeypatch)
    root = tmp_path / "run"

    def fresh() -> None:
        shutil.rmtree(root, ignore_errors=True)
        for step in (1, 2):
            save(Vault(LocalStorage(str(root))), step)

    seen = set()
    for moment in every_moment(lambda: save(Vault(LocalStorage(str(root))), 3, keep=2), fuse, fresh):
        vault = Vault(LocalStorage(str(root)))
        states = good(vault)
        seen.add(tuple(states))
        assert states in ([2, 1], [3, 2, 1], [3, 2]), f"at moment {moment}"
        assert [load(vault, vault.find(step).name) for step in states] == states
        assert {entry.status for entry in vault.entries()} <= {"good", "incomplete"}, \
            f"at moment {moment}: a save that was not finished is no damaged checkpoint"
        save(vault, 4, keep=2)
        assert [entry.step for entry in vault.entries()][:2] == [4, states[0]] and len(vault.entries()) == 2, \
            f"at moment {moment}: the next save clears up"
    assert seen == {(2, 1), (3, 2, 1), (3, 2)}, "before the marker, after it, and after the retention"


def test_an_empty_marker_is_a_save_that_was_killed_not_a_damaged_checkpoint(vault, tmp_path):
    save(vault, 1)
    name = save(vault, 2)
    (tmp_path / name / COMMIT).write_bytes(b"")
    assert vault.look(name).status == "incomplete"
    save(vault, 3)
    assert [entry.step for entry in vault.entries()] == [3, 1]


def test_kill_9_at_random_moments_leaves_the_old_state_or_the_new(tmp_path):
    print(f"FTLAB_SEED={SEED}")  # moments are random anyway: this only gives the same delays
    dice = random.Random(SEED)
    vault, newest, torn = Vault(LocalStorage(str(tmp_path))), 0, 0
    for _ in range(KILLS):
        child = groups.start(groups.save_for_ever, str(tmp_path))
        before = newest
        deadline = time.monotonic() + SOON_S
        while not any(entry.good and entry.step > before for entry in looked(vault)):
            assert time.monotonic() < deadline and child.is_alive(), f"no new checkpoint; exit code {child.exitcode}"
            child.join(0.001)
        child.join(dice.random() * 0.02)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        entries = vault.entries()
        torn += sum(entry.status == "incomplete" for entry in entries)
        states = [entry.step for entry in entries if vault.verify(entry.name).good]
        assert len(states) >= 1 and states[0] > before, "what was committed is still there"
        assert {entry.status for entry in entries} <= {"good", "incomplete"}
        newest = states[0]
        notes: dict[str, Any] = {}
        manager = CheckpointManager(str(tmp_path))
        found = manager.load_latest({"notes": notes})
        manager.close()
        assert found is not None and found.step == notes["step"] == newest
        assert notes["weight"].eq(newest).all(), "one state, not parts of two"
    assert torn, "at least one of the kills must have hit a save: else this test shows nothing"
    save(vault, newest + 9, keep=1)
    assert [entry.step for entry in vault.entries()] == [newest + 9], "the next save clears up"


def looked(vault: Vault) -> list[Any]:
    """The entries; while another process removes old ones, a look may come too late."""
    try:
        return vault.entries()
    except StorageError:
        return []


# ---- shards of several ranks


def test_the_last_shard_makes_the_checkpoint_and_not_the_first(vault):
    name = save(vault, 5, "t", rank=1, world=2)
    assert vault.look(name).status == "incomplete"
    save(vault, 5, "t", rank=0, world=2)
    entry = vault.verify(name)
    assert entry.good and entry.manifest is not None
    assert [shard.rank for shard in entry.manifest.shards] == [0, 1]


def test_two_shards_that_changed_places_are_noticed(vault, tmp_path):
    save(vault, 5, "t", rank=1, world=2)
    name = save(vault, 5, "t", rank=0, world=2)
    a, b = tmp_path / name / "shard-00000.bin", tmp_path / name / "shard-00001.bin"
    assert a.stat().st_size == b.stat().st_size
    b.write_bytes(b.read_bytes()[:-1] + bytes([b.read_bytes()[-1] ^ 1]))  # else they would be equal
    assert vault.verify(name).status == "damaged"


# ---- damage


def test_every_single_flipped_bit_is_noticed(vault, tmp_path):
    """Of the marker and the manifest all; of the shard a sample, for time."""
    name = save(vault, 1)
    dice = random.Random(SEED)
    for file in (COMMIT, MANIFEST, "shard-00000.bin"):
        path = tmp_path / name / file
        raw = path.read_bytes()
        bits = range(len(raw) * 8)
        for bit in bits if file == COMMIT else dice.sample(bits, 150):
            flipped = bytearray(raw)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            assert not vault.verify(name).good, f"{file}, bit {bit}, seed {SEED}"
        path.write_bytes(raw)
    assert vault.verify(name).good


def test_every_truncation_of_every_file_is_noticed(vault, tmp_path):
    name = save(vault, 1)
    for file in (COMMIT, MANIFEST, "shard-00000.bin"):
        path = tmp_path / name / file
        raw = path.read_bytes()
        for size in {0, 1, len(raw) // 2, len(raw) - 1}:
            path.write_bytes(raw[:size])
            assert not vault.verify(name).good, f"{file} cut to {size}"
        path.write_bytes(raw)
    assert vault.verify(name).good


def test_a_damaged_shard_is_not_read(vault, tmp_path):
    name = save(vault, 1)
    manifest = vault.look(name).manifest
    shard = tmp_path / name / "shard-00000.bin"
    shard.write_bytes(b"\xff" + shard.read_bytes()[1:])
    with pytest.raises(CheckpointDamaged, match="does not match its digest"):
        vault.read_shard(name, manifest.shards[0])


def test_what_is_set_aside_says_why_and_is_neither_used_nor_counted_nor_deleted(vault, tmp_path):
    names = [save(vault, step) for step in (1, 2, 3)]
    assert vault.set_aside(names[2], "it rained in")
    assert (tmp_path / names[2] / DAMAGED).read_text() == "it rained in"
    assert not vault.look(names[2]).good and vault.look(names[2]).reason == "it rained in"
    assert good(vault) == [2, 1]
    assert vault.retain(2) == [], "the damaged one is not one of the two"
    assert vault.retain(1) == [names[0]]
    assert (tmp_path / names[2] / "shard-00000.bin").exists()


# ---- retention


def test_retention_keeps_the_newest_and_never_the_last_good_one_goes(vault):
    names = [save(vault, step) for step in range(1, 6)]
    assert sorted(vault.retain(2)) == sorted(names[:3])
    assert good(vault) == [5, 4]
    vault.set_aside(names[4], "damaged")
    assert vault.retain(1) == [] and good(vault) == [4]
    vault.set_aside(names[3], "damaged")
    assert vault.retain(1) == [] and len(vault.entries()) == 2


def test_retention_clears_up_old_unfinished_saves_and_leaves_the_one_being_written(vault):
    vault.storage.write("step-0000000001-old", "shard-00000.bin", [b"half"])
    vault.storage.write("step-0000000009-now", "shard-00001.bin", [b"half"])
    save(vault, 5)
    assert [(entry.step, entry.status) for entry in vault.entries()] == [(5, "good"), (9, "incomplete")]


def test_retention_without_any_good_checkpoint_removes_nothing(vault):
    vault.storage.write("step-0000000001-old", "shard-00000.bin", [b"half"])
    assert vault.retain(1) == [] and len(vault.entries()) == 1


def test_a_save_after_going_back_to_an_earlier_step_is_the_newest_and_stays(vault):
    for step in (10, 20, 30):
        save(vault, step, keep=3)
    save(vault, 15, keep=2)
    assert good(vault) == [15, 30]
    save(vault, 16, keep=2)
    assert good(vault) == [16, 15]


def test_a_clock_that_went_back_does_not_make_the_newest_old(vault, monkeypatch):
    save(vault, 1)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    save(vault, 2, keep=1)
    assert good(vault) == [2]


def test_of_two_saves_of_one_step_the_later_counts(vault):
    save(vault, 5, "zzz")
    second = save(vault, 5, "aaa")
    assert vault.entries()[0].name == second and vault.find(5).name == second


def test_folders_that_are_no_checkpoints_are_left_alone(vault, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-12-mine").mkdir()
    (tmp_path / "checkpoint_epoch_3.pt").write_bytes(b"x")
    for step in (1, 2, 3):
        save(vault, step, keep=1)
    assert {"notes", "step-12-mine", "checkpoint_epoch_3.pt"} <= set(os.listdir(tmp_path))


# ---- finding


def test_a_checkpoint_is_found_by_step_by_name_and_by_path(vault, tmp_path):
    name = save(vault, 120)
    for which in (120, "120", name, f"{tmp_path}/{name}", f"{tmp_path}/{name}/"):
        assert vault.find(which).name == name


def test_of_two_with_one_step_the_good_one_is_found(vault):
    whole = save(vault, 3, "a")
    vault.set_aside(save(vault, 3, "b"), "damaged")
    assert vault.find(3).name == whole


def test_looking_for_one_that_is_not_there_lists_those_that_are(vault):
    with pytest.raises(NoCheckpoint, match="no checkpoint 7") as caught:
        vault.find(7)
    assert "none" in caught.value.seen
    save(vault, 3)
    with pytest.raises(NoCheckpoint) as caught:
        vault.find(7)
    assert "3" in caught.value.seen


def test_a_manifest_with_other_numbers_and_a_fitting_marker_is_still_checked_against_the_files(vault, tmp_path):
    name = save(vault, 1)
    manifest = vault.look(name).manifest
    for change in ({"bytes": 10}, {"file": "../../etc/passwd"}, {"file": "gone"}):
        raw = replace(manifest, shards=(replace(manifest.shards[0], **change),)).to_json()
        (tmp_path / name / MANIFEST).write_bytes(raw)
        (tmp_path / name / COMMIT).write_text(digest(raw))
        assert vault.look(name).status == "damaged", change


def test_a_card_that_is_just_being_written_is_waited_for(vault):
    name = save(vault, 3, "t", rank=1, world=2)
    written = vault.storage.read(name, "shard-00001.json")
    vault.storage.write(name, "shard-00001.json", [written[:9]])  # as far as the other rank has come
    slot = Slot()
    filled = slot.fill(tree.pack({"step": 3, "weight": torch.full((300,), 3.0)}))
    order = SaveOrder(step=3, tag="t", bytes=filled.bytes, header_bytes=filled.header_bytes, rank=0, world=2)

    def comes_on() -> bool:
        vault.storage.write(name, "shard-00001.json", [written])
        return False

    persist(vault, order, slot.view(filled.bytes), timeout_s=5, over=comes_on)
    slot.close()
    assert vault.verify(name).good and len(vault.look(name).manifest.shards) == 2
