"""Is a node alive? Detectors that hear heartbeats and give verdicts, pure: the time is always passed in.

A fixed timeout calls a node dead after so many seconds of silence, whatever its heartbeats were like. A phi-accrual
detector (Hayashibara and others, 2004; also in Akka and Cassandra) learns how regular they are and says how unlikely
the silence is: phi = -log10(the chance that the next heartbeat comes still later), so phi 3 is one chance in a
thousand. One threshold is meant to fit a calm and a busy machine alike; `bench detectors` shows how far it does.

The chance is that of a normal distribution. Real delays have a longer tail, so false alarms come more often than phi
says: the least deviation and the pause that is always allowed are there for that. A long silence that ends is learned
as an interval like any other, and makes the detector slower until it leaves the window. No detector can tell a dead
node from a silent one, and one that was never heard is not judged: how long a node may take to come up is another
question, with another limit.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from ftlab.errors import ConfigError
from ftlab.health.heartbeat import FixedTimeout
from ftlab.membership import Verdict

_FAR = 30.0  # deviations from the mean; there erfc is still far from its underflow at 38
_FARTHEST = 1e6  # beyond it, phi grows no more


class Detector(Protocol):
    """Watches one node."""

    def heard(self, at: float) -> None:
        """A heartbeat arrived; one that is older than the newest tells nothing."""

    def suspicion(self, now: float) -> float:
        """How suspicious the silence is, on the detector's own scale: 0 or more, never falling while it lasts."""

    def judge(self, now: float) -> Verdict:
        """The verdict at this moment; only looks, so that it may be asked about any moment, and in any order."""


class TimeoutDetector:
    """SUSPECT and DEAD after fixed times of silence; the suspicion is the silence in seconds."""

    def __init__(self, limits: FixedTimeout) -> None:
        self.limits = limits
        self._newest: float | None = None

    def heard(self, at: float) -> None:
        """A heartbeat arrived."""
        self._newest = at if self._newest is None else max(at, self._newest)

    def suspicion(self, now: float) -> float:
        """Seconds of silence."""
        return 0.0 if self._newest is None else max(0.0, now - self._newest)

    def judge(self, now: float) -> Verdict:
        """The verdict on the silence so far."""
        return self.limits.judge(self.suspicion(now))


@dataclass(frozen=True, kw_only=True)
class PhiConfig:
    """How a phi-accrual detector learns and when it gives a node up; the times fit a heartbeat every 0.1 s."""

    suspect_phi: float = 4.0  # SUSPECT from here
    dead_phi: float = 8.0  # DEAD from here
    window: int = 100  # intervals it remembers
    enough: int = 10  # intervals it wants to see before it trusts them
    first_s: float = 0.1  # the interval it supposes until then, with a quarter of it as deviation
    least_deviation_s: float = 0.01  # heartbeats are never taken to be more regular than this
    pause_s: float = 0.3  # lateness that is always allowed: a busy machine, a garbage collection

    def __post_init__(self) -> None:
        _require(0 < self.suspect_phi < self.dead_phi < math.inf,
                 "need 0 < suspect_phi < dead_phi: a node is suspected before it is given up")
        _require(2 <= self.enough <= self.window,
                 "need 2 <= enough <= window: one interval has no deviation, and only the window's are remembered")
        _require(self.first_s > 0 and self.least_deviation_s > 0,
                 "first_s and least_deviation_s must be positive: else the first late heartbeat is a death")
        _require(self.pause_s >= 0, "pause_s must not be negative: no heartbeat can be expected before its time")


class PhiDetector:
    """SUSPECT and DEAD by how unlikely the silence is, given the intervals between the last heartbeats."""

    def __init__(self, config: PhiConfig | None = None) -> None:
        self.config = config or PhiConfig()
        self._intervals: deque[float] = deque(maxlen=self.config.window)
        self._newest: float | None = None
        self._mean, self._deviation = self._learned()

    def heard(self, at: float) -> None:
        """A heartbeat arrived: learn the interval."""
        if self._newest is not None and at <= self._newest:
            return
        if self._newest is not None:
            self._intervals.append(at - self._newest)
            self._mean, self._deviation = self._learned()
        self._newest = at

    def suspicion(self, now: float) -> float:
        """Phi at this moment."""
        return 0.0 if self._newest is None else self._phi(now - self._newest)

    def judge(self, now: float) -> Verdict:
        """The verdict on phi at this moment."""
        return Verdict.ALIVE if self._newest is None else self.judge_silence(now - self._newest)

    def judge_silence(self, silence_s: float) -> Verdict:
        """The verdict on a silence of this length: for a watcher that does not count all of it against the node."""
        suspicion = self._phi(silence_s)
        if suspicion >= self.config.dead_phi:
            return Verdict.DEAD
        return Verdict.SUSPECT if suspicion >= self.config.suspect_phi else Verdict.ALIVE

    def _phi(self, silence_s: float) -> float:
        return phi((silence_s - self._mean - self.config.pause_s) / self._deviation)

    def _learned(self) -> tuple[float, float]:
        """Mean and deviation of the intervals in the window.

        Summed anew each time: running sums would keep the rounding error of one huge interval for ever.
        """
        count, config = len(self._intervals), self.config
        if count < config.enough:
            return config.first_s, max(config.first_s / 4, config.least_deviation_s)
        mean = math.fsum(self._intervals) / count
        deviation = math.sqrt(sum((each - mean) ** 2 for each in self._intervals) / count)
        return mean, max(deviation, config.least_deviation_s)


def phi(deviations: float) -> float:
    """-log10 of the chance that a normally distributed value lies at least so many deviations above its mean.

    Far out the chance itself is too small for a float; its logarithm comes from the tail's lower bound there, whose
    relative error is below 3 / deviations^4 and which lies on the side that keeps phi rising.
    """
    if deviations < _FAR:
        return max(0.0, -math.log10(math.erfc(deviations / math.sqrt(2)) / 2))
    far = min(deviations, _FARTHEST)
    return (far * far / 2 + math.log(math.sqrt(2 * math.pi) * (far + 1 / far))) / math.log(10)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
