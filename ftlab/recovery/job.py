"""One job as the controller sees it: its seats, its failures, its budgets, its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ftlab.config import JobConfig
from ftlab.errors import FtlabError, from_dict
from ftlab.health.straggler import StepTimes
from ftlab.membership import RankTable
from ftlab.policy import Abort, Action, Failure, Policy, decide
from ftlab.recovery.ledger import Ledger
from ftlab.recovery.record import RecoveryRecord

STARTING, RUNNING, RECOVERING, RESTORING = "starting", "running", "recovering", "restoring"
FINISHED, FAILED = "finished", "failed"


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
    plan: list[str] = field(default_factory=list)  # nodes that are to sit, in rank order
    table: RankTable | None = None
    tables: dict[int, RankTable] = field(default_factory=dict)
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
    moved: set[int] = field(default_factory=set)  # ranks that have committed or finished in this generation
    finished: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: FtlabError | None = None
    repeats: dict[str, int] = field(default_factory=dict)
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
            self.repeats[failure.node] = self.repeats.get(failure.node, 0) + 1

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

    def error_of(self, action: Abort) -> FtlabError:
        """The error that ends it: a worker's own if no retry could mend it, else what the policy says."""
        if self.fatal is not None:
            return self.fatal
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
