"""The reference managers survive every crash that the harness can think of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftlab.checkpoint.distributed import DistributedCheckpointManager
from ftlab.checkpoint.manager import CheckpointManager
from ftlab.grading.crash.check import check_crashes
from ftlab.grading.stage import Stage


@pytest.fixture(scope="module")
def stage():
    with Stage(preload=("torch", "pytest", "ftlab.checkpoint.distributed")) as stage:
        yield stage


def _model(added: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.add_(added)
    return model


@pytest.mark.parametrize("keep", [1, 3])
def test_the_general_manager_survives_every_crash(stage, keep):
    def save(folder: Path, step: int) -> None:
        with CheckpointManager(str(folder), keep_last_n=keep) as manager:
            manager.save({"model": _model(step)}, step, wait=True)

    def load(folder: Path) -> tuple[int, Any]:
        model = _model()
        with CheckpointManager(str(folder), keep_last_n=keep) as manager:
            found = manager.load_latest({"model": model})
        assert found is not None
        return found.step, model.state_dict()

    result = check_crashes(lambda folder: save(folder, 1), lambda folder: save(folder, 2), load, stage=stage)
    assert result.ok and result.images >= 15, str(result)


@pytest.mark.parametrize("old_form", [False, True])
def test_the_labs_manager_survives_every_crash(stage, old_form):
    def save(folder: Path, epoch: int) -> None:
        model = _model(epoch)
        manager = DistributedCheckpointManager(folder, keep_last_n=1, old_form=old_form)
        manager.save_checkpoint(model, torch.optim.SGD(model.parameters(), lr=0.1), epoch, {"loss": 0.5})

    def load(folder: Path) -> tuple[int, Any]:
        model = _model()
        found = DistributedCheckpointManager(folder, old_form=old_form).load_checkpoint(model)
        assert found is not None
        return found.epoch, model.state_dict()

    result = check_crashes(lambda folder: save(folder, 1), lambda folder: save(folder, 2), load, stage=stage)
    assert result.ok and result.images >= 8, str(result)
