"""Where a cluster job's state comes from when nobody lives who holds it: the newest good checkpoint, and no silence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ftlab.checkpoint.manager import CheckpointManager
from ftlab.checkpoint.state import TrainingState
from ftlab.checkpoint.vault import COMMIT, DAMAGED, MANIFEST
from ftlab.config import CheckpointConfig
from ftlab.errors import CheckpointDamaged, NoCheckpoint, StateLost
from ftlab.train.ladder import Ladder


def make_state(step: int = 0) -> TrainingState:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, float(step))
    return TrainingState.of({"model": model}, step)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints, of steps 10, 20 and 30."""
    with CheckpointManager(str(tmp_path), keep_last_n=9) as manager:
        for step in (10, 20, 30):
            manager.save(make_state(step), step, wait=True)
    return tmp_path


def checkpoint(folder: Path, step: int) -> Path:
    return next(folder.glob(f"step-{step:010d}-*"))


def cut(path: Path) -> None:
    shard = next(path.glob("shard-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-7])


def flip(path: Path) -> None:
    shard = next(path.glob("shard-*.bin"))
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)


def load(folder: Path, **options: object) -> tuple[TrainingState, list]:
    state = make_state()
    ladder = Ladder(CheckpointConfig(directory=str(folder)), "job", [], [])
    return state, ladder.load("storage", state, trained=True, **options)


@pytest.mark.parametrize("damage", [cut, flip, lambda path: next(path.glob("shard-*.bin")).unlink(),
                                    lambda path: (path / MANIFEST).write_text("{"),
                                    lambda path: (path / MANIFEST).unlink(),
                                    lambda path: (path / COMMIT).write_text("another digest")],
                         ids=["cut", "flipped", "no shard", "bad manifest", "no manifest", "bad marker"])
def test_a_damaged_newest_checkpoint_is_told_of_and_set_aside_however_it_is_damaged(folder, damage: Callable):
    damage(checkpoint(folder, 30))
    state, notes = load(folder)
    assert (state.step, float(state.parts["model"].weight[0, 0])) == (20, 20.0)
    assert [(event, step) for event, step, _ in notes] == [("checkpoint.damaged", 30), ("checkpoint.loaded", 20)]
    assert notes[0][2]["marked"] and notes[0][2]["reason"] in (checkpoint(folder, 30) / DAMAGED).read_text()


def test_going_back_takes_the_newest_good_one_up_to_a_step_and_else_the_oldest(folder):
    assert load(folder, at_most=25)[0].step == 20
    flip(checkpoint(folder, 20))
    state, notes = load(folder, at_most=25)
    assert state.step == 10 and [event for event, *_ in notes] == ["checkpoint.damaged", "checkpoint.loaded"]
    assert load(folder, at_most=5)[0].step == 10


def choosing(folder: Path, step: int, job: str = "job") -> Ladder:
    return Ladder(CheckpointConfig(directory=str(folder), resume=step), job, [], [])


@pytest.mark.parametrize("damage", [flip, cut, lambda path: (path / DAMAGED).write_text("seen before"),
                                    lambda path: (path / COMMIT).unlink()],
                         ids=["found by reading", "found by looking", "set aside", "incomplete"])
def test_a_chosen_checkpoint_that_cannot_be_used_is_an_error_and_no_fresh_start(folder, damage: Callable):
    damage(checkpoint(folder, 20))
    state = make_state()
    with pytest.raises(CheckpointDamaged, match="checkpoint 20 cannot be used"):
        choosing(folder, 20).load("storage", state, trained=False)
    assert state.step == 0


def test_a_job_that_has_checkpoints_of_its_own_does_not_need_the_chosen_one_any_more(folder):
    """Retention has removed what the job once began from."""
    own = CheckpointManager(str(folder), keep_last_n=9)
    own._tag = "abcg1"
    own.save(make_state(40), 40, wait=True)
    own.close()
    shutil.rmtree(checkpoint(folder, 20))
    state = make_state()
    choosing(folder, 20, job="abc").load("storage", state, trained=True)
    assert state.step == 40
    with pytest.raises(NoCheckpoint, match="there is no checkpoint 20"):
        choosing(folder, 20).load("storage", state, trained=False)


def test_when_all_are_damaged_the_error_names_each_reason(folder):
    for step in (10, 20, 30):
        cut(checkpoint(folder, step))
    with pytest.raises(StateLost) as caught:
        load(folder)
    assert caught.value.seen.count("bytes") >= 3
