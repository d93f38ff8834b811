"""How good is a detector? Replays recorded heartbeats and counts what it gets wrong, and how long it takes.

Two figures pull against each other. A false alarm is a DEAD verdict on a node whose next heartbeat still came; after
one the node is a new node, and the detector starts afresh. The latency of a death is measured at every heartbeat of the
trace: the node is taken to die right after it, the worst moment, and the watcher looks on at its own pace until the
verdict is DEAD. That needs no second replay, because `judge` only looks. Deaths before a detector has learned anything
count too: the worst latency of phi is often that of its first estimate.

A trace shows the heartbeats as they were received, so when the receiver itself was late that counts against the node;
the controller is kinder (`heartbeat.Watch`). Latency here is that of silence: a node whose end somebody saw is given up
at once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from ftlab.health.detector import Detector, PhiConfig, PhiDetector, TimeoutDetector
from ftlab.health.heartbeat import FixedTimeout
from ftlab.health.traces import Trace
from ftlab.membership import Verdict

LOOK_S = 0.05
LIMIT_S = 60.0  # a death that is not noticed by then is missed
TIMEOUTS_S = (0.12, 0.15, 0.2, 0.3, 0.4, 0.55, 0.8, 1.2, 2.0)
PHIS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
PAUSE_S = PhiConfig().pause_s

MakeDetector = Callable[[], Detector]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a detector did on one trace or several."""

    false_alarms: int
    watched_s: float  # node-seconds
    latencies: tuple[float, ...]  # of the deaths that were noticed, in seconds
    missed: int  # deaths that were not noticed in time

    @property
    def alarms_per_hour(self) -> float:
        """False alarms per hour and node."""
        return self.false_alarms * 3600 / self.watched_s if self.watched_s else 0.0

    @property
    def median_s(self) -> float | None:
        """The median latency; None if no death was noticed."""
        return statistics.median(self.latencies) if self.latencies else None

    @property
    def worst_s(self) -> float | None:
        """The longest latency; None if a death was missed, or there was none."""
        return max(self.latencies) if self.latencies and not self.missed else None

    @staticmethod
    def together(outcomes: Iterable[Outcome]) -> Outcome:
        """The outcome on several traces as one."""
        each = list(outcomes)
        return Outcome(false_alarms=sum(one.false_alarms for one in each), missed=sum(one.missed for one in each),
                       watched_s=sum(one.watched_s for one in each),
                       latencies=tuple(chain.from_iterable(one.latencies for one in each)))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting of one detector under one condition."""

    trace: str
    detector: str  # "timeout", "phi", or "phi_pause" for phi with an allowed pause
    threshold: float  # seconds of silence, or phi, from which a node is DEAD
    outcome: Outcome

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-able data."""
        seen = self.outcome
        return {"trace": self.trace, "detector": self.detector, "threshold": self.threshold,
                "false_alarms": seen.false_alarms, "alarms_per_hour": round(seen.alarms_per_hour, 2),
                "median_s": _rounded(seen.median_s), "worst_s": _rounded(seen.worst_s),
                "deaths": len(seen.latencies) + seen.missed, "missed": seen.missed}


def simulate(make_detector: MakeDetector, trace: Trace, look_s: float = LOOK_S, limit_s: float = LIMIT_S) -> Outcome:
    """Replay a trace to a detector whose verdict is asked for every `look_s` seconds."""
    detector, alarms, latencies, missed = make_detector(), 0, [], 0
    arrivals = [at for at in trace.arrivals if trace.death is None or at <= trace.death]
    for at, after in zip_longest(arrivals, arrivals[1:]):
        detector.heard(at)
        dead = _dead_at(detector, at, look_s, limit_s)
        if dead is None:
            missed += 1
        else:
            latencies.append(dead - at)
        if dead is not None and after is not None and dead < after:
            alarms += 1
            detector = make_detector()
    watched = arrivals[-1] - arrivals[0] if arrivals else 0.0
    return Outcome(false_alarms=alarms, watched_s=watched, latencies=tuple(latencies), missed=missed)


def sweep(traces: Sequence[Trace], timeouts: Sequence[float] = TIMEOUTS_S, phis: Sequence[float] = PHIS) -> list[Row]:
    """All detectors at all thresholds, under each condition the traces name; its nodes are counted together."""
    makers = [("timeout", threshold, timeout_detector(threshold)) for threshold in timeouts]
    makers += [("phi", threshold, phi_detector(threshold, 0.0)) for threshold in phis]
    makers += [("phi_pause", threshold, phi_detector(threshold, PAUSE_S)) for threshold in phis]
    conditions = dict.fromkeys(trace.name for trace in traces)
    return [Row(trace=name, detector=kind, threshold=threshold, outcome=Outcome.together(
                simulate(make, trace) for trace in traces if trace.name == name))
            for name in conditions for kind, threshold, make in makers]


def timeout_detector(dead_s: float) -> MakeDetector:
    """Makes fixed timeouts; SUSPECT comes half way."""
    return lambda: TimeoutDetector(FixedTimeout(suspect_s=dead_s / 2, dead_s=dead_s))


def phi_detector(dead_phi: float, pause_s: float) -> MakeDetector:
    """Makes phi-accrual detectors; SUSPECT comes at half the threshold."""
    config = PhiConfig(suspect_phi=dead_phi / 2, dead_phi=dead_phi, pause_s=pause_s)
    return lambda: PhiDetector(config)


def _dead_at(detector: Detector, at: float, look_s: float, limit_s: float) -> float | None:
    """The first look after `at` at which the verdict is DEAD, if nothing more is heard.

    Looks are counted from 0, not from the heartbeat: a watcher's looks and a node's heartbeats know nothing of each
    other.
    """
    first = math.floor(at / look_s) + 1
    looks = (number * look_s for number in range(first, first + math.ceil(limit_s / look_s)))
    return next((now for now in looks if detector.judge(now) == Verdict.DEAD), None)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
