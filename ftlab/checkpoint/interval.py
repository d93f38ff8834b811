"""How often to checkpoint: the cost of a run as a formula, fitted to its events and checked by simulation.

A checkpoint makes the loop wait k0 seconds and is saved behind its back in k1 more. A failure costs s0 seconds of
recovery, and s1 seconds of work are done again. Frequent checkpoints waste time when nothing fails, rare ones when
something does; in between lies the best interval. An interval is the training time between two checkpoints.

    lost(t) ≈ k0/t + (s0 + t/2)/MTBF        smallest at t = sqrt(2 · k0 · MTBF)      (Young, 1974)

Everything here is pure: no clock, no files. The formula holds for failures that come independently and at one rate,
and for intervals well below the MTBF: its error is at most (x+y)²/2, with x = period/MTBF and y = (s0+k1)/MTBF, and
always to the pessimistic side. Intervals near the MTBF lose less than it says; failures in bursts it does not know.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ftlab.detection import read_failures
from ftlab.errors import ConfigError
from ftlab.events import Event

DEFAULT_STEPS = 10  # the interval while nothing is measured
PRIOR_MTBF_S = 3600.0  # a teaching cluster that saw no failure yet is taken to have one an hour
PRIOR_RECOVERY_S = 1.0  # s0 while no recovery was seen; it moves the curve up and down, not the best interval
PRIOR_STEP_S = 1.0  # the step time while fewer than two steps were seen
WINDOW = 16  # AutoInterval looks at the medians of so many measurements


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """What checkpoints and failures cost a run, in seconds; raises ConfigError for numbers that cannot be."""

    k0: float  # the loop waits so long per checkpoint
    k1: float = 0.0  # then the save goes on behind its back for so long
    slowdown: float = 0.0  # the share of k1 that training loses to the save
    s0: float  # from a failure until training goes on: detection and restore
    mtbf: float  # mean time between failures: the run's length / its failures; may be infinite
    step_s: float  # one training step
    detection_s: float = 0.0  # the part of s0 before anybody knows of the failure
    longest_s: float = 600.0  # no interval is longer, however rare failures are

    def __post_init__(self) -> None:
        for name in ("k0", "k1", "s0", "detection_s"):
            value = getattr(self, name)
            _require(_is_time(value), f"{name} must be a time in seconds, 0 or more (got {value})")
        for name in ("step_s", "longest_s"):
            value = getattr(self, name)
            _require(0 < value < math.inf, f"{name} must be positive and finite: it bounds the interval (got {value})")
        _require(0 <= self.slowdown <= 1, f"slowdown must be between 0 and 1: it is a share of k1 "
                                          f"(got {self.slowdown})")
        _require(self.detection_s <= self.s0, f"detection_s must not exceed s0: recovery begins with the detection "
                                              f"(got {self.detection_s} and {self.s0})")
        _require_mtbf(self.mtbf)

    @property
    def cost(self) -> float:
        """Seconds of training that one checkpoint takes away: k0, and what the save behind its back slows down."""
        return self.k0 + self.slowdown * self.k1

    def shortest(self) -> float:
        """The lower bound of the interval: one step, the time to finish a save, and the detection latency.

        A save must be durable before the next begins, or saves pile up. A checkpoint taken between a fault and its
        detection is no help against that fault.
        """
        return max(self.step_s, self.k0 + self.k1, self.detection_s)

    def overhead(self, interval_s: float) -> float:
        """The share of the run that is expected to be lost, between 0 and 1.

        Per MTBF, s0 + s1 seconds go to a failure; of the others, `interval_s` of each period are training.
        """
        period = self.period(interval_s)
        kept = max(0.0, 1 - (self.s0 + self.redone(interval_s)) / self.mtbf)
        return 1 - kept * interval_s / period

    def period(self, interval_s: float) -> float:
        """Seconds from one checkpoint to the next; a save that is not finished by then makes the loop wait for it."""
        _require(0 < interval_s < math.inf, f"interval_s must be positive and finite (got {interval_s})")
        return max(interval_s + self.cost, self.k0 + self.k1)

    def redone(self, interval_s: float) -> float:
        """s1: half a period, and k1, for a save that is still under way when the failure strikes is lost."""
        return self.period(interval_s) / 2 + self.k1

    def best(self) -> float:
        """The best interval in seconds by Young's formula, within its bounds."""
        return self._bounded(math.sqrt(2 * self.cost * self.mtbf) if self.mtbf < math.inf else math.inf)

    def best_daly(self) -> float:
        """The best interval in seconds by Daly's higher-order formula (2006), within its bounds.

        Better than Young's where a checkpoint is not cheap against the MTBF; the same where it is.
        """
        if self.mtbf == math.inf:
            return self._bounded(math.inf)
        if self.cost >= 2 * self.mtbf:
            return self._bounded(self.mtbf)
        ratio = math.sqrt(self.cost / (2 * self.mtbf))
        return self._bounded(2 * self.mtbf * ratio * (1 + ratio / 3 + ratio**2 / 9) - self.cost)

    def best_steps(self) -> int:
        """Young's interval in whole steps, at least 1; rounded, but never below the lower bound."""
        return self._whole(self.best())

    def best_steps_daly(self) -> int:
        """Daly's interval in whole steps, rounded like `best_steps`."""
        return self._whole(self.best_daly())

    def _bounded(self, interval_s: float) -> float:
        return max(self.shortest(), min(interval_s, self.longest_s))

    def _whole(self, interval_s: float) -> int:
        at_least = math.ceil(self.shortest() / self.step_s - 1e-9)  # 0.3 / 0.1 is a little more than 3
        return max(1, at_least, round(interval_s / self.step_s))


def simulate(model: CostModel, interval_s: float, duration_s: float, seed: int) -> float:
    """The share lost in one run of `duration_s` with random failures; the same seed gives the same run.

    Failures come at any time, also during a recovery, which then begins again. Only what was durable is kept, except
    in the last stretch: what no failure took away counts as kept.
    """
    _require(0 < duration_s < math.inf, f"duration_s must be positive and finite (got {duration_s})")
    chance, period = random.Random(seed), model.period(interval_s)
    kept = now = recovery = 0.0
    while now < duration_s:
        gap = chance.expovariate(1.0) * model.mtbf
        ran = max(0.0, min(gap, duration_s - now) - recovery)
        if now + gap < duration_s:
            kept += interval_s * max(0, math.floor((ran - model.k1) / period))
        else:
            kept += interval_s * ran / period
        now, recovery = now + gap, model.s0
    return 1 - kept / duration_s


def fit(events: Iterable[Event], *, mtbf: float = PRIOR_MTBF_S) -> CostModel:
    """The cost model of one job, from the medians of its events.

    `mtbf` is used while the job saw no failure and was shorter than that. What was not measured takes the priors
    above; an unmeasured k0 is the one for which `DEFAULT_STEPS` steps are best. What a detection is says
    `ftlab.detection`. A planned growth is no failure.
    """
    known = sorted(events, key=lambda event: event.at)
    recoveries = _recoveries(known)
    quiet, saving, mixed = _step_times(known)
    step_s = _median(quiet or saving or mixed, PRIOR_STEP_S)
    mtbf = _mtbf(known[-1].at - known[0].at if known else 0.0, len(recoveries), mtbf)
    return CostModel(
        k0=_median(_per_checkpoint(known, "checkpoint.snapshot", "blocking_s"), _default_k0(step_s, mtbf)),
        k1=_median(_per_checkpoint(known, "checkpoint.committed", "seconds"), 0.0),
        slowdown=max(0.0, 1 - step_s / _median(saving, step_s)),
        s0=_median([seconds for seconds, _ in recoveries], PRIOR_RECOVERY_S),
        mtbf=mtbf, step_s=step_s,
        detection_s=_median([detection for _, detection in recoveries], 0.0),
    )


class AutoInterval:
    """Chooses the interval of `every="auto"` from what the loop measures as it goes.

    It says `DEFAULT_STEPS` until a step and a checkpoint were measured, and then moves with each checkpoint towards
    the model's best, by at most a factor of two. Measurements that cannot be (negative, not a number, a step of no
    time) are left out. Ranks measure different times: one of them has to decide for all. Not thread-safe.
    """

    def __init__(self, *, mtbf: float = PRIOR_MTBF_S, longest_s: float = 600.0) -> None:
        self._prior_mtbf, self._longest_s = mtbf, longest_s
        self._blocking, self._commits, self._steps, self._recoveries = (_Recent() for _ in range(4))
        self._elapsed = 0.0
        self._failures = 0
        self._interval = DEFAULT_STEPS
        self.model()  # settings that cannot work are refused now, not at the first checkpoint

    def observe_step(self, step_s: float) -> None:
        """A training step took so long, without the wait for a checkpoint."""
        if step_s > 0:
            self._elapsed += self._steps.add(step_s)

    def observe_snapshot(self, blocking_s: float) -> None:
        """A checkpoint made the loop wait so long; the interval moves now."""
        self._elapsed += self._blocking.add(blocking_s)
        if self._blocking.values and self._steps.values:
            wanted = self.model().best_steps()
            self._interval = min(max(wanted, (self._interval + 1) // 2), self._interval * 2)

    def observe_commit(self, seconds: float) -> None:
        """A checkpoint became durable so long after its snapshot."""
        self._commits.add(seconds)

    def observe_failure(self, recovery_s: float) -> None:
        """Training went on so long after a failure."""
        self._elapsed += self._recoveries.add(recovery_s)
        self._failures += 1

    def steps(self) -> int:
        """The interval to use now, in steps."""
        return self._interval

    def model(self) -> CostModel:
        """The cost model as measured so far."""
        step_s = _median(self._steps.values, PRIOR_STEP_S)
        mtbf = _mtbf(self._elapsed, self._failures, self._prior_mtbf)
        return CostModel(
            k0=_median(self._blocking.values, _default_k0(step_s, mtbf)), k1=_median(self._commits.values, 0.0),
            s0=_median(self._recoveries.values, PRIOR_RECOVERY_S), mtbf=mtbf, step_s=step_s,
            longest_s=self._longest_s,
        )


class _Recent:
    """The last measurements of one kind."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=WINDOW)

    def add(self, seconds: float) -> float:
        """Remember it; returns the seconds that passed, 0 for a measurement that cannot be."""
        if not _is_time(seconds):
            return 0.0
        self.values.append(seconds)
        return seconds


def _mtbf(elapsed: float, failures: int, prior: float) -> float:
    """Seconds per failure; without failures the prior, or the run's length once that has outlived it."""
    _require_mtbf(prior)
    return elapsed / failures if failures and elapsed > 0 else max(prior, elapsed)


def _default_k0(step_s: float, mtbf: float) -> float:
    """Young's formula read backwards from `DEFAULT_STEPS`."""
    return (DEFAULT_STEPS * step_s) ** 2 / (2 * mtbf)


def _recoveries(events: Sequence[Event]) -> list[tuple[float, float]]:
    """(seconds until training went on, those of them before the verdict) of each failure that was survived.

    A failure during a recovery belongs to it: both end with the recovery that came through.
    """
    found, first = [], None
    for recovery in read_failures(events).recoveries:
        first = first or recovery
        if recovery.end is not None and not recovery.abandoned:
            if not recovery.planned:
                found.append((recovery.end - first.began, first.detection_s))
            first = None
    return found


def _step_times(events: Sequence[Event]) -> tuple[list[float], list[float], list[float]]:
    """Times between steps of one generation: with no save under way, wholly beside a save, and mixed ones.

    In a mixed one a save begins or ends: it holds the wait for the snapshot as well, and is the last resort.
    """
    snapshots = [event.at for event in events if event.kind == "checkpoint.snapshot"]
    ends = [event.at for event in events if event.kind == "checkpoint.committed"]
    begins = sorted(event.at - (_seconds(event.data.get("seconds")) or 0.0) for event in events
                    if event.kind == "checkpoint.committed")
    edges = sorted(snapshots + begins + ends)
    found: tuple[list[float], list[float], list[float]] = [], [], []
    for sooner, later in pairwise(event for event in events if event.kind == "step.committed"):
        if sooner.generation == later.generation and sooner.at < later.at:
            under_way = bisect_right(begins, sooner.at) > bisect_right(ends, sooner.at)
            mixed = bisect_right(edges, sooner.at) < bisect_left(edges, later.at)
            found[2 if mixed else int(under_way)].append((later.at - sooner.at) / later.stands_for)
    return found


def _per_checkpoint(events: Sequence[Event], kind: str, name: str) -> list[float]:
    """The figure `name` of each checkpoint; where several ranks record it, the slowest one's counts."""
    slowest: dict[tuple[int | None, int | None], float] = {}
    for event in events:
        seconds = _seconds(event.data.get(name)) if event.kind == kind else None
        if seconds is not None:
            key = event.generation, event.step
            slowest[key] = max(seconds, slowest.get(key, 0.0))
    return list(slowest.values())


def _seconds(value: Any) -> float | None:
    """A recorded time, or None for what is none."""
    return float(value) if isinstance(value, int | float) and _is_time(value) else None


def _is_time(seconds: float) -> bool:
    return 0 <= seconds < math.inf  # false for NaN as well


def _median(values: Iterable[float], otherwise: float) -> float:
    known = list(values)
    return statistics.median(known) if known else otherwise


def _require_mtbf(mtbf: float) -> None:
    _require(mtbf > 0, f"mtbf must be positive: a run that always fails has no best interval (got {mtbf})")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
