"""Training that mends itself: a plain `train_epoch`, called again from the right place whenever something fails.

    def train_epoch(model, loader, optimizer):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"loss": loss.item()}

    outcome = train_with_auto_recovery(train_epoch, model, optimizer, loader, 10, "checkpoints")

A failure is bad numbers, memory that ran out, or any other exception. The step it hit is undone, the policy is asked
what to do, and training goes on: at the same batch, behind it, in smaller pieces, or from a checkpoint. Called again
after it was interrupted, it resumes. Random numbers are a function of (seed, epoch, step, rank), so a run that was
mended ends in the same bits as one that never failed, as long as no batch had to be skipped or cut.

In a process group all ranks call it together, with a plain model or one under DDP; they fail, decide and load together.
Where it stops: a rank that dies ends the others too (a Cluster heals that); sharded models (FSDP) are refused; an epoch
whose last batch is skipped ends there, without what `train_epoch` does after its loop; and metrics are those of the
last call, which after a failure has seen only the rest of the epoch.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftlab.checkpoint.distributed import DistributedCheckpointManager
from ftlab.checkpoint.manager import CheckpointManager
from ftlab.checkpoint.state import TrainingState
from ftlab.config import HealthConfig
from ftlab.errors import (
    BadPolicy,
    ConfigError,
    FtlabError,
    JobError,
    OutOfMemory,
    RecoveryExhausted,
    StorageError,
    TrainingFailed,
)
from ftlab.health.monitor import HealthMonitor
from ftlab.health.numbers import NumberWatch
from ftlab.policy import (
    FEW_STEPS,
    Abort,
    Action,
    Failure,
    LowerRate,
    Policy,
    Rollback,
    Skip,
    Snapshot,
    Split,
    Wait,
    decide,
    decide_step,
)
from ftlab.train.clustered import ClusterLoop
from ftlab.train.context import TrainContext
from ftlab.train.feed import Feed
from ftlab.train.guard import Book, Guard, StepLost
from ftlab.train.host import find_host
from ftlab.train.rates import lower_rate
from ftlab.train.trail import Trail
from ftlab.train.trouble import Budgets, Report, Trouble, add_up

log = logging.getLogger(__name__)
TrainEpoch = Callable[[Any, Any, Any], Mapping[str, Any] | None]
Checkpoints = str | Path | CheckpointManager | DistributedCheckpointManager
_RECOVERY = "recovery"  # the part of a checkpoint that holds the book


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One failure and what was done about it."""

    cause: str  # "numbers", "oom" or "crash"
    step: int
    action: str
    reason: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a training that came to its end got there."""

    metrics: list[dict[str, Any]]  # of each epoch: what the last call of train_epoch returned
    steps: int
    skipped: list[tuple[int, int]] = field(default_factory=list)  # (epoch, batch)
    recoveries: list[Recovery] = field(default_factory=list)  # of this call
    pieces: int = 1  # into which batches were cut at the end


def train_with_auto_recovery(train_epoch: TrainEpoch, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any,
                             epochs: int, checkpoints: Checkpoints | None = None,
                             monitor: HealthMonitor | None = None, policy: Policy = decide, *, seed: int = 0,
                             every: int | None = None, budgets: Mapping[str, int] | None = None,
                             parts: Mapping[str, Any] | None = None, ctx: TrainContext | None = None) -> Outcome:
    """Train up to `epochs` epochs, mending what fails; see the module for what `train_epoch` looks like.

    Saves at the beginning, after each epoch and, with `every`, each so many steps; `parts` are saved beside model and
    optimizer (scheduler, scaler). When nothing can be done any more, the model is left at the last committed step and
    an error raised: the exception of `train_epoch` itself (on ranks that did not raise: TrainingFailed),
    RecoveryExhausted for bad numbers, OutOfMemory, or BadPolicy.

    Without `checkpoints` they go to CHECKPOINT_DIR. In a cluster job give it the train context as `ctx`: then the job's
    own checkpoints, health settings, budgets and policy hold, and losing nodes is survived as well.
    """
    if ctx is not None:
        loop = ClusterLoop(ctx, model, optimizer, loader, seed, parts or {})
        return _train_in_cluster(ctx, loop, train_epoch, epochs)
    if every is not None and every < 1:
        raise ConfigError(f"every must be at least 1 step (got {every})")
    with contextlib.ExitStack() as stack:
        manager = checkpoints if isinstance(checkpoints, CheckpointManager) else \
            checkpoints.manager if isinstance(checkpoints, DistributedCheckpointManager) else \
            stack.enter_context(_opened(str(checkpoints)))
        run = _Run(train_epoch, model, optimizer, loader, manager, monitor, policy, seed, every, budgets, parts)
        if monitor is not None:
            stack.enter_context(monitor.watching())
        return run.run(epochs)


@contextlib.contextmanager
def _opened(url: str) -> Iterator[CheckpointManager]:
    """A manager of our own; that it cannot write its last snapshot must not hide why training ended."""
    manager = CheckpointManager(url)
    try:
        yield manager
    finally:
        try:
            manager.close()
        except FtlabError as error:
            log.warning("the last checkpoint is missing: %s", error)


def _train_in_cluster(ctx: TrainContext, loop: ClusterLoop, train_epoch: TrainEpoch, epochs: int) -> Outcome:
    metrics = loop.run(train_epoch, epochs)
    return Outcome(metrics=metrics, steps=ctx.committed, pieces=ctx.pieces,
                   skipped=[divmod(step, loop.feed.batches) for step in ctx.passed_over])


class _Run:
    """One call of `train_with_auto_recovery`."""

    def __init__(self, train_epoch: TrainEpoch, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any,
                 manager: CheckpointManager, monitor: HealthMonitor | None, policy: Policy, seed: int,
                 every: int | None, budgets: Mapping[str, int] | None, parts: Mapping[str, Any] | None) -> None:
        self.train_epoch, self.model, self.optimizer, self.policy = train_epoch, model, optimizer, policy
        self.monitor, self.parts = monitor, dict(parts or {})
        self.host, self.budgets = find_host(), Budgets(budgets or {})
        feed = Feed(loader, seed, self.host.rank)
        watch = NumberWatch(monitor.config if monitor else HealthConfig())
        self.book = Book(feed.batches, [watch, *([monitor.numbers] if monitor else [])])
        if taken := {"model", "optimizer", _RECOVERY} & set(self.parts):
            raise ConfigError(f"parts cannot be called {sorted(taken)}: these names are used")
        self.state = TrainingState.of({"model": model, "optimizer": optimizer, **self.parts, _RECOVERY: self.book}, 0)
        if self.state.sharded and self.host.world > 1:
            raise ConfigError("a sharded model cannot be guarded: its passes wait for all ranks",
                              hint="run it in a Cluster, with ctx.sharded")
        self.trail = Trail(manager, self.host, self.state, self.book, every)
        self.guard = Guard(self.state, self.book, feed, optimizer, self.host, seed=seed, monitor=monitor,
                           between=lambda: self.trail.save_if_due(self.guard.epoch_end))
        self.recoveries: list[Recovery] = []
        self.tries: Counter[int] = Counter()  # failures of each step

    # ---- the epochs ----------------------------------------------------------------------------------------

    def run(self, epochs: int) -> Outcome:
        """All of them that are not done yet."""
        self.trail.resume()
        try:
            with self.host.running(self.model):
                while len(self.book.metrics) < epochs:
                    self._run_epoch()
        finally:
            self.guard.undo()  # a KeyboardInterrupt may come in mid-step
        self.trail.settle()
        return Outcome(metrics=list(self.book.metrics), steps=self.state.step, recoveries=self.recoveries,
                       skipped=[divmod(step, self.book.batches) for step in sorted(self.book.skipped)],
                       pieces=self.book.pieces)

    def _run_epoch(self) -> None:
        """Call train_epoch for what is left of the epoch, and recover if it fails."""
        self.guard.begin()
        begun = self.state.step
        if begun == self.guard.epoch_end:  # its last batch was skipped
            self._end_epoch({})
            return
        metrics: Mapping[str, Any] | None = None
        problem: Exception | None = None
        lost: StepLost | None = None
        try:
            metrics = self.train_epoch(self.model, self.guard.loader, self.guard.optimizer)
            self.guard.close_batch()
            if self.state.step == begun:
                raise ConfigError("train_epoch returned without having taken a batch from its loader")
            if self.state.step == self.guard.epoch_end:
                self.guard.end_epoch(_judge(metrics))
        except StepLost as raised:
            lost = raised
        except Exception as raised:
            if self.host.broken:
                raise
            problem = raised
        if problem is not None:
            lost = StepLost(self.guard.report(problem), f"{type(problem).__name__}: {problem}")
        if lost is not None:
            with self.monitor.paused() if self.monitor else contextlib.nullcontext():
                self._recover(lost, problem, metrics)
        elif self.state.step == self.guard.epoch_end:
            self._end_epoch(metrics)

    def _end_epoch(self, metrics: Mapping[str, Any] | None) -> None:
        self.book.metrics.append(_plain(metrics))
        self.trail.save()

    # ---- recovery ------------------------------------------------------------------------------------------

    def _recover(self, lost: StepLost, problem: Exception | None, metrics: Mapping[str, Any] | None) -> None:
        begin = time.monotonic()
        whole = self.guard.undo()
        trouble = add_up(self.host.gather(
            Report(lost.code, lost.detail, self.state.step, whole, self.guard.rows)))
        left = self.budgets.left(trouble.step)
        action = self._decide(trouble, left)
        if isinstance(action, Abort):
            self._give_up(action, trouble, problem)
        if problem is not None:  # its traceback holds the tensors of the failed step
            traceback.clear_frames(problem.__traceback__)
        self.budgets.spend(trouble.cause, trouble.step)
        self.tries[trouble.step] += 1
        self._act(action, trouble, metrics)
        done = Recovery(cause=trouble.cause, step=trouble.step, action=repr(action), reason=trouble.detail,
                        seconds=round(time.monotonic() - begin, 4))
        self.recoveries.append(done)
        log.warning("[rank=%d step=%d] %s (%s): %s", self.host.rank, done.step, done.cause, done.reason, done.action)

    def _decide(self, trouble: Trouble, left: Mapping[str, int]) -> Action:
        """Rank 0 asks the policy, for all: somebody's own policy need not give the same answer twice."""
        action: Action = Wait()
        problem = ""
        if self.host.rank == 0:
            asked, problem = decide_step(self.policy, self._look(trouble), left)
            action = Wait() if problem else asked
        action, problem = self.host.agree((action, problem))
        if problem:
            raise BadPolicy(problem, seen=f"{trouble.cause} at step {trouble.step}: {trouble.detail}")
        if left[trouble.cause] < 1 and not isinstance(action, Abort):
            return Abort(error="RecoveryExhausted", cause=trouble.cause,
                         reason=f"no recovery from '{trouble.cause}' is left; last: {trouble.detail}")
        return action

    def _look(self, trouble: Trouble) -> Snapshot:
        """What the policy may look at. Only rank 0 looks into the storage."""
        loaded = self.trail.loaded
        since = None if loaded is None else max(0, trouble.step - loaded.step)
        try:
            usable = self.trail.good()
        except StorageError as error:
            log.warning("[step=%d] checkpoints cannot be looked at: %s", trouble.step, error)
            usable = []
        if trouble.cause == "numbers" and since is not None and since <= FEW_STEPS:
            usable = [entry for entry in usable if loaded is None or entry.name != loaded.name]
        members = ("self",) if self.host.world == 1 else tuple(f"rank-{rank}" for rank in range(self.host.world))
        return Snapshot(failures=(Failure(cause=trouble.cause, detail=trouble.detail),), members=members, spares=(),
                        wanted=len(members), minimum=len(members), can_start=False, step=trouble.step,
                        holders=len(members), saved=usable[0].step if usable else None,
                        tries=self.tries[trouble.step], skipped=self.book.skips_before(trouble.step),
                        since_load=since, can_split=trouble.pieces > self.book.pieces)

    def _act(self, action: Action, trouble: Trouble, metrics: Mapping[str, Any] | None) -> None:
        ended = trouble.step == self.guard.epoch_end  # what failed came after the last batch
        passing = isinstance(action, Skip | LowerRate)
        if isinstance(action, Rollback):
            self._roll_back(action, trouble)
        elif not trouble.whole or (ended and not passing):
            self.trail.go_back(trouble.step)
        if isinstance(action, LowerRate):
            lower_rate({"optimizer": self.optimizer, **self.parts}, action.factor)
        if isinstance(action, Split):
            self.book.cut()
        if passing and ended:
            self._end_epoch(metrics)
        elif passing or (isinstance(action, Rollback) and action.skip and not ended):
            self.book.skipped.append(trouble.step)
        if trouble.cause == "oom":
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _roll_back(self, action: Rollback, trouble: Trouble) -> None:
        skipped, pieces, limit = self.book.skipped, self.book.pieces, trouble.step - action.steps
        if action.condemn and self.trail.loaded is not None:
            limit = min(limit, self.trail.loaded.step)
            self.trail.condemn(f"training failed right after it: {trouble.detail}")
            self.tries.clear()  # it was not the step's fault
        self.trail.go_back(limit)
        while self.book.pieces < pieces:  # the memory did not grow meanwhile
            self.book.cut()
        if trouble.cause != "numbers":  # else it was the state that was bad, and the batches get a new chance
            self.book.skipped = sorted({*self.book.skipped, *skipped})

    def _give_up(self, action: Abort, trouble: Trouble, problem: Exception | None) -> None:
        """Raise what tells best why training ended."""
        tried = f"{len(self.recoveries)} recoveries were tried before"
        told: dict[str, Any] = {"cause": trouble.cause, "step": trouble.step, "history": self._history()}
        if trouble.cause == "crash" and self.host.rank in trouble.ranks and problem is not None:
            problem.add_note(f"ftlab: in step {trouble.step}; {tried}; {action.reason}")
            raise problem
        if trouble.cause == "crash":
            raise TrainingFailed(f"rank {trouble.ranks[0]} raised in step {trouble.step}: {trouble.detail}", seen=tried,
                                 ranks=list(trouble.ranks), **told)
        kind: type[JobError] = OutOfMemory if trouble.cause == "oom" else RecoveryExhausted
        raise kind(f"step {trouble.step}: {action.reason}", seen=tried, **told) from problem

    def _history(self) -> list[str]:
        return [f"step {each.step}: {each.cause} ({each.reason}): {each.action}" for each in self.recoveries]


def _judge(metrics: Mapping[str, Any] | None) -> str:
    """What is wrong with the loss of an epoch; "" if nothing is, or none is told."""
    loss = (metrics or {}).get("loss")
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        loss = loss.item()
    return f"the epoch's loss is {loss}" if isinstance(loss, float) and not math.isfinite(loss) else ""


def _plain(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """What can be saved of the metrics: numbers and words."""
    found = {str(name): value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
             for name, value in (metrics or {}).items()}
    return {name: value for name, value in found.items() if isinstance(value, bool | int | float | str | None)}
