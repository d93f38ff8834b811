"""Damage to checkpoints: it hits the newest, is really there, and is what the receipt says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftlab.checkpoint.manager import CheckpointManager
from ftlab.errors import FaultError
from ftlab.faults.corruption import WAYS, damage_newest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with CheckpointManager(str(tmp_path), keep_last_n=5) as manager:
        for step in (1, 2, 3):
            manager.save({"model": torch.nn.Linear(4, step + 3)}, step, wait=True)
    return tmp_path


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(5))
def test_damage_makes_the_newest_unusable_and_leaves_an_older_one(folder, way, seed):
    receipt = damage_newest(str(folder), way, seed)
    with CheckpointManager(str(folder)) as manager:
        verified = {entry.step: manager.vault.verify(entry.name).status for entry in manager.entries()}
    assert receipt["checkpoint"].startswith("step-0000000003-") and receipt["status"]
    assert verified[3] == "damaged" and verified[1] == "good"
    assert verified[2] == ("damaged" if way == "swap" else "good")


def test_what_cannot_be_damaged_is_said(tmp_path, folder):
    with pytest.raises(FaultError, match="ways are flip, truncate, swap"):
        damage_newest(str(folder), "meteor")
    with pytest.raises(FaultError, match="only checkpoints in a folder"):
        damage_newest("s3://bucket/run", "flip")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FaultError, match="too few to damage"):
        damage_newest(str(tmp_path / "empty"), "flip")
