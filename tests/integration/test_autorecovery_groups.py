"""`train_with_auto_recovery` in real process groups: what fails on one rank is mended on all, to the same end."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ftlab.checkpoint import tree
from ftlab.checkpoint.manager import CheckpointManager
from ftlab.errors import TrainingFailed
from ftlab.train.autorecovery import Outcome, train_with_auto_recovery
from tests import groups

EPOCHS, BATCHES, ROWS = 3, 4, 6
STEPS = EPOCHS * BATCHES
FAULTS = {"none": 0, "nan": 7, "exception": 7, "always": 7, "late": BATCHES, "optimizer": 7, "dies": 7, "memory": 0}


class Work:
    """A model on one rank, with its share of the data, and a fault on rank 1 alone."""

    def __init__(self, rank: int, fault: str, ddp: bool) -> None:
        torch.manual_seed(rank + 1 if not ddp else 1)  # without DDP the ranks even begin with different weights
        mixing = nn.LayerNorm(8) if fault.startswith("memory") else nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.3))
        net = nn.Sequential(nn.Linear(4, 8), mixing, nn.ReLU(), nn.Linear(8, 2))
        self.model = DistributedDataParallel(net) if ddp else net
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        numbers = torch.Generator().manual_seed(5)
        data = TensorDataset(*(torch.randn(2 * BATCHES * ROWS, size, generator=numbers) for size in (4, 2)))
        self.loader = DataLoader(data, batch_size=ROWS, sampler=DistributedSampler(data))
        self.fault, self.rank, self.calls = fault if rank == 1 else "none", rank, 0
        if self.fault == "optimizer":
            self.real = self.optimizer.step
            self.optimizer.step = self._step_badly

    def _step_badly(self, *args: Any) -> Any:
        if self.calls == FAULTS["optimizer"]:
            raise OSError("half of the step is done")
        return self.real(*args)

    def train_epoch(self, model: nn.Module, loader: Any, optimizer: Any) -> dict[str, float]:
        total = 0.0
        for x, y in loader:
            self.calls += 1
            loss = nn.functional.mse_loss(model(self._disturb(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if self.fault == "late" and self.calls == FAULTS["late"]:
            self.calls += 1
            raise OSError("after the last batch")
        return {"loss": total / len(loader)}

    def _disturb(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "memory" and len(x) > 3:
            raise MemoryError(f"{len(x)} rows do not fit")
        if self.fault == "nan" and self.calls == FAULTS["nan"]:
            return x * math.nan
        if (self.fault == "exception" and self.calls == FAULTS["exception"]) or (
                self.fault == "always" and self.calls >= FAULTS["always"]):
            raise ValueError("a wire is loose")
        if self.fault == "dies" and self.calls == FAULTS["dies"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    def state(self) -> list[Any]:
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        return [model.state_dict(), self.optimizer.state_dict()]


def train(rank: int, folder: Path, fault: str, ddp: bool) -> tuple[Outcome, str, list[Any]]:
    """On one rank; the outcome, and the digest of the end."""
    work = Work(rank, fault, ddp)
    manager = CheckpointManager(groups.folder_of(folder), timeout_s=5.0)  # for a shard that never comes
    outcome = train_with_auto_recovery(work.train_epoch, work.model, work.optimizer, work.loader, EPOCHS, manager,
                                       seed=3, every=3)
    manager.close()  # not after an error, which it would hide behind its own: the dead rank's shard is missing
    return outcome, tree.digest(work.state()), [parameter.detach() for parameter in work.model.parameters()]


def train_with_plain_ddp(rank: int, folder: Path) -> list[torch.Tensor]:
    """The loop under DDP with nothing around it; without what needs random numbers."""
    work = Work(rank, "memory-plain", ddp=True)
    for epoch in range(EPOCHS):
        work.loader.sampler.set_epoch(epoch)
        work.train_epoch(work.model, work.loader, work.optimizer)
    return [parameter.detach() for parameter in work.model.parameters()]


def run(folder: Path, fault: str, ddp: bool) -> list[tuple[Outcome, str, list[Any]]]:
    folder.mkdir()
    return groups.values(groups.run(2, train, folder, fault, ddp))


@pytest.fixture(scope="module", params=[True, False], ids=["ddp", "plain model"])
def calm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, str]:
    """With DDP or without, and how an undisturbed run ends."""
    (left, digest, _), (_, other, _) = run(tmp_path_factory.mktemp("calm") / "it", "none", request.param)
    assert left.recoveries == [] and left.steps == STEPS
    assert digest == other, "all ranks hold the same state, BatchNorm's statistics included"
    return request.param, digest


@pytest.mark.parametrize(("fault", "cause", "action", "step"), [
    ("nan", "numbers", "Retry", 6), ("exception", "crash", "Rollback", 6), ("late", "crash", "Rollback", BATCHES),
    ("optimizer", "crash", "Rollback", 6)])
def test_what_fails_on_one_rank_is_mended_on_both_and_leaves_no_trace(tmp_path, calm, fault, cause, action, step):
    ddp, undisturbed = calm
    for outcome, digest, _ in run(tmp_path / "it", fault, ddp):
        assert [(each.cause, each.step, each.action.split("(")[0]) for each in outcome.recoveries] == [
            (cause, step, action)], "the fault fired, and both ranks did the same about it"
        assert digest == undisturbed
        if fault == "exception":
            assert "rank 1: ValueError: a wire is loose" in outcome.recoveries[0].reason


def test_memory_that_ends_on_one_rank_has_both_cut_their_batches(tmp_path):
    ends = []
    for fault in ("memory", "memory-not"):
        (left, digest, weights), (right, other, _) = run(tmp_path / fault, fault, True)
        assert digest == other
        assert left.pieces == right.pieces == (2 if fault == "memory" else 1)
        ends.append(weights)
    assert [each.action.split("(")[0] for each in run(tmp_path / "again", "memory", True)[0][0].recoveries] == ["Split"]
    for cut, whole in zip(*ends, strict=True):
        assert torch.allclose(cut, whole, atol=1e-5)


def test_an_undisturbed_group_computes_what_ddp_computes(tmp_path):
    plain = groups.values(groups.run(2, train_with_plain_ddp, tmp_path))[0]
    guarded = run(tmp_path / "it", "memory-not", True)[0][2]
    for left, right in zip(plain, guarded, strict=True):
        assert torch.allclose(left, right, atol=1e-5)


def test_an_exception_that_always_comes_is_raised_where_it_came_and_named_on_the_other_rank(tmp_path):
    first, second = groups.run(2, train, tmp_path, "always", True)
    assert isinstance(first.error, TrainingFailed) and first.error.ranks == [1]
    assert "rank 1 raised in step 6" in first.error.message and "a wire is loose" in first.error.message
    assert "ValueError: a wire is loose" in str(second.error) and "3 recoveries were tried" in str(second.error)


def test_a_rank_that_dies_is_told_by_the_other_and_the_next_group_resumes_to_the_same_end(tmp_path, calm):
    ddp, undisturbed = calm
    first, second = groups.run(2, train, tmp_path, "dies", ddp)
    assert second is None, "the fault fired: rank 1 is dead"
    assert isinstance(first.error, TrainingFailed) and "cannot reach the other ranks" in first.error.message
    for outcome, digest, _ in groups.values(groups.run(2, train, tmp_path, "none", ddp)):
        assert outcome.recoveries == [] and digest == undisturbed
    assert not dist.is_initialized()
