"""One job as the controller sees it: its seats, its failures, its budgets, its results."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ftlab.config import JobConfig
from ftlab.errors import FtlabError, RanksDiverged, StateLost, from_dict
from ftlab.health.straggler import StepTimes
from ftlab.membership import RankTable
from ftlab.policy import Abort, Action, Failure, Policy, decide
from ftlab.recovery.ledger import Ledger
from ftlab.recovery.record import RecoveryRecord
from ftlab.recovery.start_plan import Muster

STARTING, RUNNING, RECOVERING, RESTORING = "starting", "running", "recovering", "restoring"
FINISHED, FAILED = "finished", "failed"
_KNOWN_TABLES = 100  # generations back from which a step may still be told


@dataclass
class Job:
    """A job and where it stands.

    starting → (all parked) → restoring → (first step on all ranks) → running → finished;
    a failure leads from anywhere to recovering, and from there over restoring back to running, or to failed.
    """

    id: str
    name: str
    config: JobConfig
    wanted: int  # nodes
    path: list[str]
    policy: Policy = decide
    status: str = STARTING
    reattaching: bool = False  # the controller was restarted and waits for its nodes
    submitted: float = 0.0
    enough_since: float | None = None  # when as many nodes were ready as it needs at least
    plan: list[str] = field(default_factory=list)  # nodes that are to sit, in rank order
    table: RankTable | None = None
    tables: dict[int, RankTable] = field(default_factory=dict)
    invitation: dict[str, Any] = field(default_factory=dict)  # the Join of its present seats, as it was sent
    ledger: Ledger = field(default_factory=Ledger)
    saved: int | None = None  # the step of the newest checkpoint in storage
    kept: dict[str, int] = field(default_factory=dict)  # node → step of the newest snapshot in its memory
    failures: list[Failure] = field(default_factory=list)  # not yet decided on
    history: list[dict[str, Any]] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    fatal: FtlabError | None = None
    recovery: RecoveryRecord | None = None
    last_action: Action | None = None
    stopped: set[str] = field(default_factory=set)  # nodes that have stopped training in this generation
    halted: set[int] = field(default_factory=set)  # ranks that have stopped training in this generation
    goes_back: str = ""  # why one of them did by decision, as all ranks will: they go back to a checkpoint
    moved: set[int] = field(default_factory=set)  # ranks that have committed or finished in this generation
    finished: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: FtlabError | None = None
    broken: deque[tuple[str, str, int, int]] = field(  # workers that failed: node, cause, generation, step
        default_factory=lambda: deque(maxlen=1000))
    retries: dict[str, int] = field(default_factory=dict)  # of workers on nodes without a seat
    spent: dict[str, list[int]] = field(default_factory=dict)  # cause → steps at which it was recovered from
    slow_since: float | None = None  # one rank holds the others up since then, and is not yet told of
    split: bool = False  # a worker was killed for memory: the next generation cuts its batches smaller

    def __post_init__(self) -> None:
        self.times = StepTimes(self.config.health)  # of each rank, in this generation

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.status in (FINISHED, FAILED)

    @property
    def training(self) -> bool:
        """Whether its seats are taken."""
        return self.status in (RUNNING, RESTORING)

    @property
    def generation(self) -> int:
        """The generation of its present seats."""
        return self.table.generation if self.table else 0

    @property
    def minimum(self) -> int:
        """The fewest nodes it accepts."""
        return self.config.min_nodes or self.wanted

    def muster(self, ready: tuple[str, ...], coming: int, now: float) -> Muster:
        """The nodes it may start on, and how long they have been enough."""
        if len(ready) < self.minimum:
            self.enough_since = None
        elif self.enough_since is None:
            self.enough_since = now
        waited = now - self.enough_since if self.enough_since is not None else 0.0
        return Muster(wanted=self.wanted, minimum=self.minimum, ready=ready, coming=coming, enough_for_s=waited)

    def new_generation(self) -> None:
        """New seats: what its ranks did on the old ones is over."""
        self.moved, self.stopped, self.halted, self.goes_back, self.finished = set(), set(), set(), "", {}
        self.times.clear()
        for old in [number for number in self.tables if number <= self.generation - _KNOWN_TABLES]:
            del self.tables[old]

    def newest_saved(self, alive: Sequence[str]) -> int | None:
        """The newest step that storage, or the memory of a node that lives, can give back."""
        kept = [step for node, step in self.kept.items() if node in alive]
        return max([*kept, *([self.saved] if self.saved is not None else [])], default=None)

    def note(self, failure: Failure) -> None:
        """Keep a failure: to be decided on, and for the history."""
        self.failures.append(failure)
        self.history.append({"cause": failure.cause, "node": failure.node, "detail": failure.detail,
                             "step": self.ledger.step, "generation": self.generation})
        if failure.local_rank is not None:
            self.broken.append((failure.node, failure.cause, self.generation, self.ledger.step))

    def repeats(self, failures: Sequence[Failure]) -> dict[str, int]:
        """In how many generations before this one, lately, each node's workers failed from the cause they failed from
        now: a worker that was killed once and got stuck once is no sign of a bad node."""
        lately = self.ledger.step - self.config.refill_steps
        return {failure.node: len({generation for node, cause, generation, step in self.broken
                                   if (node, cause) == (failure.node, failure.cause) and step > lately
                                   and generation < self.generation})
                for failure in failures if failure.local_rank is not None}

    def budgets(self) -> dict[str, int]:
        """Recoveries left per cause; a cause that has stayed away for long enough has its full budget again."""
        left = {}
        for cause, budget in self.config.all_budgets().items():
            steps = self.spent.get(cause, [])
            if steps and self.ledger.step - steps[-1] >= self.config.refill_steps:
                steps.clear()
            left[cause] = budget - len(steps)
        return left

    def spend(self, cause: str) -> None:
        """Count one recovery."""
        self.spent.setdefault(cause, []).append(self.ledger.step)

    def diverged(self) -> RanksDiverged | None:
        """The error of a job whose ranks ended in different states; None if they agree."""
        digests = {rank: str(row["digest"]) for rank, row in sorted(self.finished.items())}
        if len(set(digests.values())) <= 1:
            return None
        return RanksDiverged(f"the ranks ended in different states, at step {self.ledger.step}",
                             seen=", ".join(f"rank {rank}: {digest[:8]}" for rank, digest in digests.items()),
                             hint="average gradients with ctx.backward(loss); protect what is the same on every rank",
                             step=self.ledger.step, tensors=[])

    def fatal_error(self) -> FtlabError:
        """The error that no retry can mend. State that was lost because the ranks which held it raised is their error:
        a user looks for the line in the train function, not for the last rank that found nothing left."""
        assert self.fatal is not None
        if not isinstance(self.fatal, StateLost) or not self.tracebacks:
            return self.fatal
        told = self.fatal.to_dict()
        return from_dict({**told, "message": f"{told['message']}; before that, ranks which held it raised\n\n"
                                             f"{self.tracebacks[-1]}",
                          "facts": {**told["facts"], "traceback": self.tracebacks[-1], "history": self.history}})

    def error_of(self, action: Abort) -> FtlabError:
        """The error that ends it: a worker's own if no retry could mend it, else what the policy says."""
        if self.fatal is not None:
            return self.fatal_error()
        trace = self.tracebacks[-1] if self.tracebacks and action.cause == "crash" else ""
        return from_dict({"error": action.error, "message": action.reason + (f"\n\n{trace}" if trace else ""),
                          "hint": "", "seen": f"{len(self.history)} failures, {self.ledger.step} steps committed",
                          "facts": {"cause": action.cause, "history": self.history, "traceback": trace}})

    def spec(self) -> dict[str, Any]:
        """What nodes need to run it."""
        return {"job": self.id, "config": self.config.to_dict(), "path": self.path}

    def to_dict(self) -> dict[str, Any]:
        """For clients."""
        return {"job": self.id, "name": self.name, "status": self.status, "step": self.ledger.step,
                "generation": self.generation, "world": self.table.world if self.table else 0,
                "checkpoints": self.config.checkpoint.directory if self.config.checkpoint else None,
                "saved": self.saved,
                "error": self.error.to_dict() if self.error else None,
                "results": {str(rank): row for rank, row in sorted(self.finished.items())} if self.over else {}}
