"""Does training get on? Finds the worker that holds the others up, pure: the time is passed in.

A rank that waits for the others is a victim, a rank that is still computing while others wait is a suspect. The limit
follows the step time that was seen: a job with 20 ms steps is checked within about a second, and one whose steps take
minutes is not accused.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

STARVED_FACTOR = 6.0  # so many times as long may take what waits for a CPU


class Standing(StrEnum):
    """What a worker's training thread is doing, as far as stalls go."""

    COMPUTING = "computing"
    WAITING = "waiting for the other ranks"
    OUTSIDE = "between two steps"
    RECOVERING = "waiting for the next generation"
    DONE = "done with all its steps"
    IDLE = "idle"


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """One worker, as last seen."""

    who: tuple[str, int]  # node and local rank
    generation: int
    standing: Standing
    since: float
    step: int = 0  # committed
    starved: bool = False  # it is ready to run and gets no CPU

    def blame(self, now: float, limit_s: float, outside_s: float) -> str:
        """Where it holds the others up and how long that may take, in words."""
        if self.standing == Standing.OUTSIDE:
            where = f"between step {self.step} and {self.step + 1}, in the train function's own code"
            limit = f"the others wait for it, and may have to for {max(limit_s, outside_s):.1f} s (outside_limit_s)"
        else:
            where, limit = f"{self.standing} step {self.step + 1}", f"a step may take {limit_s:.1f} s"
        return f"{where} for {now - self.since:.1f} s: {limit}"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a worker may take."""

    floor_s: float
    factor: float
    first_step_s: float


@dataclass
class StepClock:
    """The typical time of a step, learned from the steps that were committed."""

    limits: Limits
    _last: float | None = None
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=50))

    def tick(self, at: float) -> None:
        """A step was committed by all ranks."""
        if self._last is not None and at > self._last:
            self._times.append(at - self._last)
        self._last = at

    def pause(self) -> None:
        """The time up to the next step is no step time (a recovery lies in it)."""
        self._last = None

    def typical(self) -> float:
        """The median step time; 0 while it is not known."""
        return statistics.median(self._times) if len(self._times) >= 3 else 0.0

    def limit(self) -> float:
        """How long a step may take now."""
        known = self.typical()
        return max(self.limits.floor_s, self.limits.factor * known) if known else self.limits.first_step_s


def find_stalled(workers: Iterable[Sighting], now: float, limit_s: float, outside_s: float) -> list[Sighting]:
    """The workers that hold the others up; empty while nobody waits for anybody, however long they take."""
    seen, stalled = list(workers), []
    if not any(worker.standing in (Standing.WAITING, Standing.RECOVERING) for worker in seen):
        return []  # all are busy with something of their own: a long evaluation is no stall
    for worker in seen:
        allowed = {Standing.COMPUTING: limit_s, Standing.OUTSIDE: max(limit_s, outside_s)}.get(worker.standing)
        patience = STARVED_FACTOR if worker.starved else 1.0  # a busy machine's fault, not the worker's
        if allowed is not None and now - worker.since > patience * allowed:
            stalled.append(worker)
    return stalled


def holders(workers: Iterable[Sighting], step: int) -> set[tuple[str, int]]:
    """The workers that hold the state of a committed step, or a newer one."""
    return {worker.who for worker in workers if worker.generation > 0 and worker.step >= step}


def all_waiting(workers: Iterable[Sighting], generation: int, now: float, limit_s: float) -> bool:
    """Whether the workers wait for one another, or for one that is done, for longer than a step may take: the group
    itself is broken, or its ranks have lost step."""
    going = [worker for worker in workers if worker.standing != Standing.DONE]
    return bool(going) and all(
        worker.standing == Standing.WAITING and worker.generation == generation and now - worker.since > limit_s
        for worker in going)
