"""Heartbeats put to a student's detector one by one; false alarms and latencies are counted here, from raw verdicts.

The detector lives in a child, and is told of a heartbeat only when it has said what it thinks of the silence after the
one before: it cannot know which silence is a death.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftlab.grading.stage import Outcome
from ftlab.health.simulation import simulate
from ftlab.health.traces import Trace
from ftlab.membership import Verdict

_MOST_WORDS = 1000


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a detector did with some nodes' heartbeats."""

    false_alarms: int = 0
    missed: int = 0
    worst_s: float = 0.0  # the longest latency, of those that are held against it
    unlearned: int = 0  # deaths that were missed among a node's first heartbeats


class Unanswered(Exception):
    """The child said nothing that could be counted."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def replay(ask: Callable[[Any], Outcome], arrivals: list[list[float]], look_s: float, settle: int,
           limit_s: float) -> Replayed:
    """False alarms, missed deaths and the worst latency; the first heartbeats of each node, from which a detector
    learns, are not held against its latency. Raises Unanswered."""
    alarms, missed, worst, unlearned = 0, 0, 0.0, 0
    for beats in arrivals:
        trace = Trace(name="", node="", interval_s=1.0, arrivals=tuple(beats))
        heard: list[_Asked] = []

        def new(heard: list[_Asked] = heard) -> _Asked:
            heard.append(_Asked(ask, look_s, limit_s))
            return heard[-1]

        seen = simulate(new, trace, look_s, limit_s)
        alarms += seen.false_alarms
        missed += seen.missed
        unlearned += sum(each.missed_early for each in heard)
        worst = max([worst, *seen.latencies[settle:]])
    return Replayed(false_alarms=alarms, missed=missed, worst_s=round(worst, 3), unlearned=unlearned)


class _Asked:
    """A detector in a child; its verdicts on the silence after a heartbeat come at once."""

    def __init__(self, ask: Callable[[Any], Outcome], look_s: float, limit_s: float) -> None:
        self._ask, self._look_s, self._count = ask, look_s, math.ceil(limit_s / look_s)
        self._first, self._verdicts = 0, list[Verdict]()
        self._beats, self.missed_early = 0, 0
        _answer(ask([]))

    def heard(self, at: float) -> None:
        self._first = math.floor(at / self._look_s) + 1
        self._verdicts = _verdicts(_answer(self._ask([at, self._first, self._count])), self._count)
        self._beats += 1
        self.missed_early += self._beats <= 5 and Verdict.DEAD not in self._verdicts

    def suspicion(self, now: float) -> float:
        return 0.0

    def judge(self, now: float) -> Verdict:
        number = round(now / self._look_s) - self._first
        return self._verdicts[number] if number < len(self._verdicts) else Verdict.ALIVE


def _answer(outcome: Outcome) -> Any:
    if not outcome.ok:
        raise Unanswered(outcome)
    return outcome.value


def _verdicts(said: Any, most: int) -> list[Verdict]:
    """What was said, one verdict a look."""
    found: list[Verdict] = []
    for each in said if isinstance(said, list) else [said]:
        try:
            name, often = each
            found += [Verdict(name)] * min(max(0, int(often)), most - len(found))
        except (TypeError, ValueError):
            words = repr(each[0] if isinstance(each, list) and each else each)[:200]
            raise Unanswered(Outcome(raised=f"TypeError: judge gave {words}, which is no Verdict")) from None
    return found
