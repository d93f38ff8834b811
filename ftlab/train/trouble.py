"""A failure in a training loop, as all ranks see it together, and how many more of its cause are borne."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftlab.config import DEFAULT_BUDGETS
from ftlab.errors import ConfigError
from ftlab.train.guard import Code

REFILL_STEPS = 100  # a cause that stays away for so long has its whole budget again
CAUSES = {Code.BAD: "numbers", Code.MEMORY: "oom", Code.RAISED: "crash"}


@dataclass(frozen=True)
class Report:
    """What one rank tells the others about a failure."""

    code: Code
    detail: str
    step: int
    whole: bool  # the step in flight could be undone
    rows: int


@dataclass(frozen=True)
class Trouble:
    """A failure, as the ranks see it together."""

    cause: str
    detail: str
    step: int
    ranks: tuple[int, ...]  # those that failed
    whole: bool  # all ranks stand at the same committed step
    pieces: int  # into which the batch can be cut on every rank


def add_up(reports: Sequence[Report]) -> Trouble:
    """What happened, from all ranks' reports; the worst counts."""
    worst = max(report.code for report in reports)
    ranks = tuple(rank for rank, report in enumerate(reports) if report.code == worst)
    who = f"rank {ranks[0]}: " if 0 < len(ranks) < len(reports) else ""
    steps = {report.step for report in reports}
    return Trouble(cause=CAUSES[worst], detail=who + reports[ranks[0]].detail, step=min(steps), ranks=ranks,
                    whole=len(steps) == 1 and all(report.whole for report in reports),
                    pieces=min(report.rows for report in reports))


class Budgets:
    """How many recoveries each cause has left."""

    def __init__(self, given: Mapping[str, int]) -> None:
        unknown = sorted(set(given) - set(DEFAULT_BUDGETS))
        if unknown:
            raise ConfigError(f"unknown budget {unknown}: causes are {sorted(DEFAULT_BUDGETS)}")
        self._full = {**DEFAULT_BUDGETS, **given}
        self._spent: Counter[str] = Counter()
        self._last: dict[str, int] = {}

    def left(self, step: int) -> dict[str, int]:
        """By cause, at a step."""
        for cause, last in self._last.items():
            if step - last >= REFILL_STEPS:  # by step number: steps that are only repeated earn nothing
                self._spent[cause] = 0
        return {cause: full - self._spent[cause] for cause, full in self._full.items()}

    def spend(self, cause: str, step: int) -> None:
        """One recovery."""
        self._spent[cause] += 1
        self._last[cause] = max(step, self._last.get(cause, 0))
