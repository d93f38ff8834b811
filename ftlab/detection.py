"""When a failure began, when it was noticed, and what answered it: the one place that says what `detect` means.

`detect` runs from the injection, or, where nobody injected anything, from the last evidence of life, to the verdict.
A controller sees what production sees and knows of no injection, so the `detect` spans in its log begin with the
evidence. Whoever shows or sums up a detection takes it from here, where injections are read as well: the figures of a
drill, its tables and pictures, the metrics and the cost model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ftlab.events import Event, in_order_of_time

_NO_RECOVERY = ("controller", "disk")  # faults that no step waits for
_MENDED_IN_STEP = ("nan", "oom")  # faults that may be mended without a new generation
_NEVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One recovery, from the failure that it answered to its last step."""

    began: float  # the first injection that it answered; else the last evidence of life
    noticed: float  # the verdict
    started: float  # when the controller began to mend; the verdict, unless the step had been tried again before
    end: float | None
    generation: int | None
    cause: str
    nodes: tuple[str, ...]
    spans: tuple[Mapping[str, Any], ...] = ()  # `detect` is the one from `began` to `noticed`
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds of each step of a recovery that came through
    source: str = ""
    abandoned: bool = False

    @property
    def detection_s(self) -> float:
        """How long nobody knew of the failure."""
        return self.noticed - self.began

    @property
    def planned(self) -> bool:
        """Whether nothing had failed: the world grew."""
        return self.cause == "grow"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One injection: when it was noticed, until when training stood still, and which recovery answered."""

    number: int
    event: Event
    noticed: float | None  # the verdict; None if there was none
    stalled_until: float | None  # first step committed after it was mended; None if none came
    recoveries: tuple[Recovery, ...]  # several where it hit several nodes that were not found at once
    healed_at: float | None

    @property
    def at(self) -> float:
        """When it really happened."""
        return injected_at(self.event)

    @property
    def recovery(self) -> Recovery | None:
        """The first recovery that answered."""
        return self.recoveries[0] if self.recoveries else None

    @property
    def kind(self) -> str:
        """`kill`, `hang` and so on."""
        return str(self.event.data.get("fault", "fault"))

    @property
    def target(self) -> str:
        """What was hit."""
        return str(self.event.data.get("target", ""))

    @property
    def name(self) -> str:
        """Fault and target: `kill node-2`."""
        return f"{self.kind} {self.target}".strip()

    @property
    def detection_s(self) -> float | None:
        """From the injection to the verdict."""
        return None if self.noticed is None else self.noticed - self.at

    @property
    def stall_s(self) -> float | None:
        """From the injection to the first step of the restored world."""
        return None if self.stalled_until is None else self.stalled_until - self.at


@dataclass(frozen=True, kw_only=True)
class Failures:
    """All that went wrong in a run, in the order of time."""

    faults: tuple[Fault, ...]
    recoveries: tuple[Recovery, ...]

    def detections(self) -> list[float]:
        """Of every fault that was noticed and of every recovery, whether an injection explains it or not."""
        of_faults = [fault.detection_s for fault in self.faults if fault.detection_s is not None]
        return of_faults + [one.detection_s for one in self.recoveries if not one.planned]


def read_failures(events: Iterable[Event]) -> Failures:
    """The faults and recoveries of one job's events, matched with each other."""
    ordered = in_order_of_time(events)
    plain = [_recovery(event, ordered) for event in ordered if event.kind == "recovery.started"]
    injections = [_Injection(event, ordered) for event in ordered if event.kind == "fault.injected"]
    injections.sort(key=lambda injection: injection.at)
    for number, injection in enumerate(injections, 1):
        injection.answers = _answers(injection, plain, injections[number:])
    recoveries = [_since(index, plain, [each for each in injections if index in each.answers])
                  for index in range(len(plain))]
    faults = [Fault(number=number, event=each.event, noticed=_verdict(each, plain), healed_at=each.healed_at,
                    stalled_until=_mended_at(each, plain),
                    recoveries=tuple(recoveries[index] for index in each.answers))
              for number, each in enumerate(injections, 1)]
    return Failures(faults=tuple(faults), recoveries=tuple(recoveries))


def injected_at(event: Event) -> float:
    """When a fault really happened: its receipt tells, which is written afterwards."""
    receipt = event.data.get("receipt")
    return float(receipt.get("at", event.at)) if isinstance(receipt, Mapping) else event.at


def hits(event: Event, name: str) -> bool:
    """Whether a fault's target means this node (or the controller): by name, in a list of names, or as `all`."""
    target = str(event.data.get("target", ""))
    return name in re.split(r"[\s:/,+\[\]'\"]+", target) or (target == "all" and name != "controller")


def _recovery(started: Event, events: Sequence[Event]) -> Recovery:
    """A recovery as the controller recorded it, before injections are looked at."""
    last = next((event for event in events if event.at >= started.at and event.generation == started.generation
                 and event.kind in ("recovery.finished", "recovery.abandoned")), None)
    spans = tuple(last.data.get("spans") or ()) if last else ()
    phases = dict(last.data.get("phases") or {}) if last else {}
    detected = min((float(span.get("begin", started.at)) for span in spans if span["name"] == "detect"),
                   default=started.at - phases.get("detect", 0.0))
    evidence = float(started.data.get("evidence", detected))
    nodes = dict.fromkeys([*(started.data.get("nodes") or ()), *((last.data.get("nodes") or ()) if last else ())])
    return Recovery(
        began=min(evidence, started.at), noticed=started.at, started=started.at, end=last.at if last else None,
        generation=started.generation, cause=str(started.data.get("cause", "")), nodes=tuple(map(str, nodes)),
        spans=spans, phases=phases, source=str(last.data.get("rung") or "") if last else "",
        abandoned=last is not None and last.kind == "recovery.abandoned")


class _Injection:
    """An injection and what the log tells from then on."""

    def __init__(self, event: Event, events: Sequence[Event]) -> None:
        self.event, self.at = event, injected_at(event)
        self.kind, self.target = event.data.get("fault"), event.data.get("target")
        later = [each for each in events if each.at >= self.at]
        again = next((each.at for each in later if each.kind == "fault.injected" and each is not event
                      and self._is_same(each)), _NEVER)
        self._after = [each for each in later if each.at <= again]  # the rest is about the next one of its kind
        self.steps = [each for each in later if each.kind == "step.committed"]
        self.healed_at = next((each.at for each in self._after if each.kind == "fault.healed" and self._is_same(each)),
                              None)
        self.own_end = next((each.at for each in self._after if each.kind in ("node.died", "worker.failed")
                             and hits(event, each.source)), None)
        self.holds_up_nobody = self.kind in _NO_RECOVERY or self.target == "controller"
        self.answers: list[int] = []  # which recoveries it caused

    def first(self, kind: str) -> float | None:
        """When the first event of a kind came."""
        return next((each.at for each in self._after if each.kind == kind), None)

    def _is_same(self, other: Event) -> bool:
        return all(other.data.get(key) == self.event.data.get(key) for key in ("fault", "target"))


def _answers(injection: _Injection, recoveries: Sequence[Recovery], following: Sequence[_Injection]) -> list[int]:
    """The recoveries that a fault caused: those that name its targets, else one that was under way when its target
    ended, else the first before the next fault."""
    if injection.holds_up_nobody:
        return []
    until = _NEVER if injection.healed_at is None else injection.healed_at
    later = [index for index, one in enumerate(recoveries)
             if injection.at <= one.started and one.began <= until and not one.planned]
    named = _named(injection, recoveries, later, following)
    if named:
        return named
    if injection.own_end is not None:
        running = [index for index, one in enumerate(recoveries) if one.started < injection.at <= (one.end or _NEVER)]
        return running[:1]  # none: what was hit had no seat
    next_hit = min((other.at for other in following), default=_NEVER)
    return [index for index in later if recoveries[index].started < next_hit][:1]


def _named(injection: _Injection, recoveries: Sequence[Recovery], later: Sequence[int],
           following: Sequence[_Injection]) -> list[int]:
    """The recoveries that name a fault's targets, each target once, until it is hit again: a hang is found late,
    perhaps after the next fault has struck elsewhere. One that was abandoned for them and names nobody is theirs, too.
    """
    found: list[int] = []
    known: set[str] = set()
    for index in later:
        mine = {node for node in recoveries[index].nodes if hits(injection.event, node)
                and not any(other.at <= recoveries[index].started and hits(other.event, node) for other in following)}
        another = bool(mine - known) and (not found or injection.target != "all")
        if mine and (another or _is_one_outage(recoveries, found[-1], index)):
            found.append(index)
            known |= mine
    while found and found[0] - 1 in later and recoveries[found[0] - 1].abandoned and not recoveries[found[0] - 1].nodes:
        found.insert(0, found[0] - 1)
    return found


def _is_one_outage(recoveries: Sequence[Recovery], first: int, last: int) -> bool:
    """Whether nothing was trained between two recoveries: each was abandoned for the next."""
    return all(one.abandoned for one in recoveries[first:last])


def _verdict(injection: _Injection, recoveries: Sequence[Recovery]) -> float | None:
    """When a fault was noticed."""
    if injection.holds_up_nobody:
        return injection.first("checkpoint.failed" if injection.kind == "disk" else "controller.started")
    started = [recoveries[index].started for index in injection.answers if recoveries[index].started >= injection.at]
    spoiled = injection.first("step.spoiled") if injection.kind in _MENDED_IN_STEP else None
    known = [*started, *([] if spoiled is None else [spoiled])]
    return min(known) if known else injection.own_end


def _since(index: int, recoveries: Sequence[Recovery], causes: Sequence[_Injection]) -> Recovery:
    """A recovery with its `detect` from the injection that caused it to the first verdict in the same outage."""
    recovery = recoveries[index]
    early = [cause for cause in causes if cause.at <= recovery.started]  # later ones struck while it ran
    began = min((cause.at for cause in early), default=recovery.began)
    same = [cause for cause in early if _is_one_outage(recoveries, cause.answers[0], index)]
    noticed = min((at for cause in same if (at := _verdict(cause, recoveries)) is not None), default=recovery.started)
    spans = tuple({**span, "begin": began, "end": noticed} if span["name"] == "detect" else span
                  for span in recovery.spans)
    phases = {name: round(noticed - began, 4) if name == "detect" else seconds
              for name, seconds in recovery.phases.items()}
    return replace(recovery, began=began, noticed=noticed, spans=spans, phases=phases)


def _mended_at(injection: _Injection, recoveries: Sequence[Recovery]) -> float | None:
    """When the first step was committed after a fault was mended; one that holds up nobody waits for the next step."""
    steps, noticed = injection.steps, _verdict(injection, recoveries)
    if injection.answers:
        generation = recoveries[injection.answers[0]].generation or 0
        steps = [step for step in steps if (step.generation or 0) >= generation]
    elif not injection.holds_up_nobody:
        mended = noticed is not None and injection.kind in _MENDED_IN_STEP
        steps = [step for step in steps if mended and step.at >= (noticed or 0) and not step.data.get("skipped")]
    return steps[0].at if steps else None
