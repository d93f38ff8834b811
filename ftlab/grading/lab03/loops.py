"""A training that goes wrong as planned, for students' `my_train_with_auto_recovery`. Runs in a child.

Epochs are deterministic, so a loop that recovers well ends in the same bits as one that never failed. What is told
beside that comes from the train function and the checkpoint manager that the loop is given, not from the loop itself.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ftlab.checkpoint.distributed import DistributedCheckpointManager, Loaded
from ftlab.cluster.forks import die_with
from ftlab.grading.stage.canonical import digest
from ftlab.health.monitor import HealthMonitor

EPOCHS = 6
MAX_CALLS = 40  # of train_epoch; a loop that goes on beyond it would go on for ever
_GROUP_S = 30.0
Recover = Callable[..., Any]


class Endless(BaseException):
    """The loop goes on for ever; no `except Exception` catches this."""


class Training:
    """A model, its data, and a `train_epoch` to which things happen: by the number of the call, what."""

    def __init__(self, trouble: Mapping[str, str]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(11)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        x = torch.randn(48, 6)
        y = x.square().sum(1, keepdim=True)
        self.loader = [(x[first:first + 8], y[first:first + 8]) for first in range(0, 48, 8)]
        self.trouble, self.calls = dict(trouble), 0

    def train_epoch(self, model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """One epoch, or what is planned for this call."""
        number, self.calls = self.calls, self.calls + 1
        what = self.trouble.get(str(number), self.trouble.get("always from", ""))
        if what.isdigit():
            what = "bug" if number >= int(what) else ""
        if self.calls > MAX_CALLS:
            raise Endless
        loss = torch.zeros(())
        for batch, (x, y) in enumerate(loader):
            if batch == len(loader) // 2:
                _break(what)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            _average(model)
            optimizer.step()
        if what == "nan":
            with torch.no_grad():
                next(model.parameters()).fill_(math.nan)
        return {"loss": math.nan if what in ("nan", "nan loss") else loss.item()}

    def digest(self) -> str:
        """Of model and optimizer."""
        return digest({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


class WatchedManager:
    """A checkpoint manager that notes what is saved."""

    def __init__(self, folder: str) -> None:
        self.manager = DistributedCheckpointManager(folder, timeout_s=_GROUP_S)
        self.saved: list[dict[str, Any]] = []

    def save_checkpoint(self, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int,
                        metrics: Mapping[str, float] | None = None) -> str:
        """As the lab's manager."""
        well = all(bool(torch.isfinite(each).all()) for each in model.parameters())
        self.saved.append({"epoch": epoch, "well": well})
        return self.manager.save_checkpoint(model, optimizer, epoch, metrics)

    def load_checkpoint(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None,
                        checkpoint_path: str | Path | None = None) -> Loaded | None:
        """As the lab's manager."""
        return self.manager.load_checkpoint(model, optimizer, checkpoint_path)

    def cleanup_old_checkpoints(self) -> list[str]:
        """As the lab's manager."""
        return self.manager.cleanup_old_checkpoints()


def undisturbed() -> str:
    """The digest of a plain loop, in which nobody's code but ours runs."""
    training = Training({})
    for _ in range(EPOCHS):
        training.train_epoch(training.model, training.loader, training.optimizer)
    return training.digest()


def drive(recover: Recover, folder: str, trouble: dict[str, str], max_failures: int = 3) -> dict[str, Any]:
    """Run the student's loop through trouble; what came of it."""
    training, manager, raised, returned = Training(trouble), WatchedManager(folder), "", None
    try:
        returned = recover(training.train_epoch, training.model, training.optimizer, training.loader, EPOCHS, manager,
                           HealthMonitor(), max_failures=max_failures)
    except BaseException as error:
        raised = f"{type(error).__name__}: {error}"[:300]
    return {"digest": training.digest(), "calls": training.calls, "saved": manager.saved, "raised": raised,
            "returned": returned if isinstance(returned, int | None) else repr(returned)[:100]}


def drive_twice(recover: Recover, folder: str, dies_in: int) -> dict[str, Any]:
    """The process that runs the loop is killed in some epoch; then another process begins anew in the same folder."""
    parent, child = os.getpid(), os.fork()
    if child == 0:
        die_with(parent)
        with contextlib.suppress(BaseException):
            drive(recover, folder, {str(dies_in): "kill"})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return {**drive(recover, folder, {}), "killed": os.WIFSIGNALED(status)}


def drive_group(recover: Recover, folder: str, trouble: dict[str, str]) -> list[dict[str, Any]]:
    """Two ranks run the loop together, and something happens to rank 1 only; what came of each."""
    children = []
    for rank in range(2):
        parent, child = os.getpid(), os.fork()
        if child == 0:
            die_with(parent)
            with contextlib.suppress(BaseException):
                _member(recover, Path(folder), rank, trouble if rank == 1 else {})
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return [json.loads(file.read_text()) if (file := Path(folder) / f"rank-{rank}.json").exists() else {}
            for rank in range(2)]


def _member(recover: Recover, folder: Path, rank: int, trouble: dict[str, str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=_GROUP_S))
    found = drive(recover, str(folder / "run"), trouble)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def _average(model: nn.Module) -> None:
    if dist.is_initialized():
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def _break(what: str) -> None:
    """In mid-epoch."""
    if what == "raise":
        raise OSError("a disk hiccup")
    if what == "bug":
        raise ZeroDivisionError("a bug in the train function")
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
