"""What the event log tells, as plain data that a picture can be drawn from: lanes, outages, recoveries, commits.

Reading is pure and forgiving: a log cut short in the middle of a recovery still gives a story, in which that
recovery has no end. Times stay on the log's monotonic clock; `Story.start` is the zero that people see.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftlab.detection import Fault, Recovery, hits, injected_at, read_failures
from ftlab.events import Event, in_order_of_time


@dataclass(frozen=True, kw_only=True)
class Spell:
    """A stretch of time that a node spent in one state."""

    begin: float
    end: float
    state: str  # member, spare, waiting (up, no rank), silent (hit, and not yet found dead), up (the controller)
    generation: int | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment in a lane."""

    at: float
    kind: str  # fault, heal, suspect, dead, failed, restarted, found (by the health monitor)
    text: str  # the short label; empty when another lane already carries it
    detail: str = ""  # the tooltip


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One node's (or the controller's) row."""

    name: str
    spells: tuple[Spell, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True, kw_only=True)
class Story:
    """Everything a timeline shows."""

    start: float
    end: float
    controller: Lane
    lanes: tuple[Lane, ...]
    memberships: tuple[tuple[float, int, int], ...]  # when, generation, world
    commits: tuple[tuple[float, int], ...]  # when, step
    faults: tuple[Fault, ...]
    recoveries: tuple[Recovery, ...]

    def stalls(self) -> list[tuple[float, float, bool]]:
        """When training stood still as (begin, end, ended), overlapping ones joined."""
        joined: list[tuple[float, float, bool]] = []
        for fault in self.faults:
            if fault.recovery is None:
                continue
            ended = fault.stalled_until is not None
            begin, end = fault.at, fault.stalled_until if fault.stalled_until is not None else self.end
            if joined and begin <= joined[-1][1]:
                begin, end, ended = joined[-1][0], max(end, joined[-1][1]), ended and joined[-1][2]
                joined.pop()
            joined.append((begin, end, ended))
        return joined


def read_story(events: Sequence[Event]) -> Story:
    """The story of one job; an empty log gives an empty story."""
    ordered = in_order_of_time(events)
    start, end = _bounds(ordered)
    seen = [event for event in ordered if event.at <= end]
    failures = read_failures(seen)
    names = _node_names(seen)
    numbers = {id(fault.event): fault.number for fault in failures.faults}
    return Story(
        start=start, end=end,
        controller=Lane(
            name="controller", spells=tuple(_controller_spells(seen, start, end)),
            marks=tuple(_controller_marks(seen, names, numbers, start)),
        ),
        lanes=tuple(
            _lane(name, seen, start, end, _marks(name, seen, numbers, first=name == names[0])) for name in names
        ),
        memberships=tuple(
            (event.at, event.generation or _table(event).get("generation", 0), _world(event))
            for event in _of(seen, "membership.changed")
        ),
        commits=tuple(_commits(seen)),
        faults=failures.faults,
        recoveries=failures.recoveries,
    )


def _of(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event.kind == kind]


def _bounds(ordered: Sequence[Event]) -> tuple[float, float]:
    """The job's first and last moment; what the cluster did before and after is not drawn."""
    if not ordered:
        return 0.0, 1.0
    submitted, finished = _of(ordered, "job.submitted"), _of(ordered, "job.finished")
    start = submitted[0].at if submitted else ordered[0].at
    end = finished[-1].at if finished else ordered[-1].at
    return start, max(end, start + 1e-3)


def _node_names(events: Sequence[Event]) -> list[str]:
    """Every node that ever joined or had a seat; node-10 comes after node-9."""
    names = {event.source for event in _of(events, "node.joined")}
    for event in _of(events, "membership.changed"):
        names |= {str(seat["node"]) for seat in _table(event).get("seats", ())}
    return sorted(names, key=lambda name: [(0, int(part), "") if part.isdigit() else (1, 0, part)
                                           for part in re.split(r"(\d+)", name) if part])


def _table(event: Event) -> Mapping[str, Any]:
    table = event.data.get("table")
    return table if isinstance(table, Mapping) else {}


def _world(event: Event) -> int:
    return int(event.data.get("world") or len(_table(event).get("seats", ())))


_State = tuple[str, int | None, tuple[int, ...]]  # state, generation, ranks


def _spells(name: str, events: Sequence[Event], start: float, end: float) -> list[Spell]:
    """The node's life as spells inside the window; being dead is the absence of one."""
    fatal = _fatal_faults(name, events)
    changes: list[tuple[float, _State | None]] = []
    state: _State | None = None
    for event in events:
        after = ("silent", *state[1:]) if state and id(event) in fatal else _state_after(event, name, state)
        if after != state:
            changes.append((event.at, after))
            state = after
    spells = []
    for index, (at, now) in enumerate(changes):
        until = changes[index + 1][0] if index + 1 < len(changes) else end
        begin, until = max(at, start), min(until, end)
        if now and until > begin:
            spells.append(Spell(begin=begin, end=until, state=now[0], generation=now[1], ranks=now[2]))
    return spells


def _lane(name: str, events: Sequence[Event], start: float, end: float, marks: Sequence[Mark]) -> Lane:
    """A node's lane; a fault on `all` leaves no mark where no node was."""
    spells = tuple(_spells(name, events, start, end))
    kept = [mark for mark in marks if mark.text or any(one.begin <= mark.at <= one.end for one in spells)]
    return Lane(name=name, spells=spells, marks=tuple(kept))


def _state_after(event: Event, name: str, state: _State | None) -> _State | None:
    if event.kind == "membership.changed":
        ranks = tuple(int(seat["rank"]) for seat in _table(event).get("seats", ()) if seat["node"] == name)
        if ranks:
            return "member", event.generation, ranks
        return ("waiting", None, ()) if state and state[0] == "member" else state
    if event.source != name:
        return state
    if event.kind == "node.died":
        return None
    if event.kind == "node.joined" and (state is None or state[0] != "member"):  # a restarted controller asks again
        return ("spare" if event.data.get("role") == "spare" else "waiting"), None, ()
    return state


def _fatal_faults(name: str, events: Sequence[Event]) -> set[int]:
    """The faults on this node that ended in a DEAD verdict: from there on it was silent."""
    fatal, last = set(), None
    for event in events:
        if event.kind == "fault.injected" and hits(event, name):
            last = event
        elif event.source == name and event.kind == "node.joined":
            last = None
        elif event.source == name and event.kind == "node.died" and last:
            fatal.add(id(last))
    return fatal


def _marks(name: str, events: Sequence[Event], numbers: Mapping[int, int], *, first: bool) -> list[Mark]:
    marks = []
    for event in events:
        if event.kind in ("fault.injected", "fault.healed") and hits(event, name):
            marks.append(_fault_mark(event, numbers, name, labelled=first or event.data.get("target") != "all"))
        elif event.source == name and event.kind in _NODE_MARKS:
            kind, label = _NODE_MARKS[event.kind]
            why = event.data.get("reason") or event.data.get("detail") or event.data.get("cause") or ""
            marks.append(Mark(at=event.at, kind=kind, text=label, detail=f"{label} {name}: {why}".rstrip(": ")))
    return marks


_NODE_MARKS = {
    "node.suspected": ("suspect", "SUSPECT"),
    "node.died": ("dead", "DEAD"),
    "worker.failed": ("failed", "worker failed"),
    "worker.restarted": ("restarted", "worker restarted"),
    "worker.caught": ("found", "caught"),
    "step.spoiled": ("found", "bad step"),
    "straggler.found": ("found", "straggler"),
    "memory.warned": ("found", "memory"),
}


def _controller_marks(
    events: Sequence[Event], names: Sequence[str], numbers: Mapping[int, int], start: float,
) -> list[Mark]:
    """Faults on the controller, its restarts, and faults on things that have no lane (a store, a checkpoint)."""
    marks = []
    for event in events:
        if event.kind in ("fault.injected", "fault.healed") and not any(hits(event, name) for name in names):
            marks.append(_fault_mark(event, numbers, "controller", labelled=True))
        elif event.kind == "controller.started" and event.at > start:
            marks.append(Mark(at=event.at, kind="restarted", text="restarted", detail="the controller is back"))
    return marks


def _fault_mark(event: Event, numbers: Mapping[int, int], lane: str, *, labelled: bool) -> Mark:
    name, target = str(event.data.get("fault", "fault")), str(event.data.get("target", ""))
    healed = event.kind == "fault.healed"
    label = f"{name} healed" if healed else f"#{numbers[id(event)]} {name}"
    if target != lane:
        label = f"{label} {target}"
    return Mark(at=event.at if healed else injected_at(event), kind="heal" if healed else "fault",
                text=label if labelled else "",
                detail=f"{name} {target}{' healed' if healed else ''} {_pairs(event.data.get('receipt'))}".strip())


def _pairs(receipt: object) -> str:
    return ", ".join(f"{key}={value}" for key, value in receipt.items()) if isinstance(receipt, Mapping) else ""


def _controller_spells(events: Sequence[Event], start: float, end: float) -> list[Spell]:
    """The controller is up, except from a fault on it until it starts again or is healed."""
    spells, up_since = [], start
    up = True
    for event in events:
        healed = event.kind == "fault.healed" and hits(event, "controller")
        if event.kind == "fault.injected" and hits(event, "controller") and up:
            spells.append(Spell(begin=up_since, end=max(event.at, up_since), state="up"))
            up = False
        elif not up and (event.kind == "controller.started" or healed):
            up, up_since = True, event.at
    return [*spells, Spell(begin=up_since, end=end, state="up")] if up else spells


def _commits(events: Sequence[Event]) -> list[tuple[float, int]]:
    """Each committed step once per generation, however many ranks told of it."""
    first: dict[tuple[int | None, int], float] = {}
    for event in _of(events, "step.committed"):
        if event.step is not None:
            first.setdefault((event.generation, event.step), event.at)
    return [(at, step) for (_, step), at in first.items()]
