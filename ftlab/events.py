"""The one record: everything notable happens once, as an `Event`, in an append-only log.

Metrics, dashboards, reports and graders only read it. `at` is the monotonic clock, which all processes of
one machine share, so times from different processes compare. A line that was cut off by a crash (the last
one only) is ignored on reading; `kill -9` of the writer loses nothing that `record` or `together` has returned from.

The log is in the order of `seq`, in which it was written. A receipt is written after the fact, so that order is not
the one in which things happened: whoever shows events to people shows them `in_order_of_time`.

A log that has become long is made shorter (`compact`), in memory and in its file: of what comes again and again, such
as steps, one of several stays and `stands_for` the others. Nothing is left out of the newest part, nor of what is rare:
faults, failures, recoveries, seats and jobs, and the first step after each.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

LONGEST = 20_000  # events in a log before it is made shorter
REPEATED = frozenset({"step.committed", "checkpoint.snapshot", "checkpoint.committed", "checkpoint.delayed",
                      "checkpoint.replicated", "checkpoint.retired",
                      "worker.parked", "worker.stopped", "memory.warned", "message.refused", "node.suspected"})


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened; `kind` is `noun.past_verb`."""

    kind: str
    seq: int = 0
    at: float = field(default_factory=time.monotonic)
    source: str = "controller"
    generation: int | None = None
    rank: int | None = None
    step: int | None = None
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def stands_for(self) -> int:
        """How many events of its kind it stands for: itself, and those before it that were left out."""
        return int(self.data.get("stands_for", 1))

    def to_json(self) -> str:
        """One line of the log."""
        return json.dumps(vars(self), separators=(",", ":"))  # not asdict: this runs once a step

    def brief(self) -> str:
        """One short line for people: what happened, where and when; its data stays in the log."""
        where = [f"{name} {value}" for name in ("generation", "rank", "step")
                 if (value := getattr(self, name)) is not None]
        return f"{self.kind} ({', '.join([f'from {self.source}', *where])})"

    @staticmethod
    def from_json(line: str | bytes) -> Event:
        """The event on one line of the log."""
        return Event(**json.loads(line))


class EventLog:
    """The append-only log of one cluster: events in memory, and as JSON lines in a file.

    Opening an existing file reads it back and goes on with the next `seq`. `listeners` are called with
    every new event, after it was written. `events` is made anew when the log becomes too long, and then has gaps.
    """

    def __init__(self, path: Path | None = None, longest: int = LONGEST) -> None:
        self.events: list[Event] = list(read_events(path)) if path and path.exists() else []
        self.seq = self.events[-1].seq if self.events else 0  # of the newest event
        self.listeners: list[Callable[[Event], None]] = []
        if path and path.exists():
            _drop_torn_line(path)
        self._path, self._longest, self._limit = path, longest, longest
        self._file = path.open("a", encoding="utf-8") if path else None
        self._held: list[Event] | None = None  # recorded together and not yet written

    def record(self, kind: str, **fields: Any) -> Event:
        """Append one event and tell the listeners; fields that are None are left out."""
        given = {name: value for name, value in fields.items() if value is not None}
        head = {name: given.pop(name) for name in ("at", "source", "generation", "rank", "step") if name in given}
        self.seq += 1
        event = Event(kind=kind, seq=self.seq, data=given, **head)
        self.events.append(event)
        if self._held is not None:
            self._held.append(event)
        else:
            self._write([event])
        return event

    def after(self, seq: int) -> list[Event]:
        """The events behind the one with this number."""
        return events_after(self.events, seq)

    def last(self, kind: str) -> Event | None:
        """The newest event of a kind."""
        return next((event for event in reversed(self.events) if event.kind == kind), None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is recorded in here is written at its end, all with one system call; only then it may be relied on."""
        if self._held is not None:  # inside of another one, which writes
            yield
            return
        self._held = []
        try:
            yield
        finally:
            events, self._held = self._held, None
            self._write(events)

    def _write(self, events: Sequence[Event]) -> None:
        if self._file and events:
            self._file.write("".join(f"{event.to_json()}\n" for event in events))
            self._file.flush()
        for event in events:
            for listener in self.listeners:
                listener(event)
        if len(self.events) > self._limit:
            self._shorten()

    def _shorten(self) -> None:
        self.events = compact(self.events, self._longest)
        self._limit = max(self._longest, 2 * len(self.events))  # where all of it is rare, it may grow
        if self._file and self._path:
            self._file.close()
            new = self._path.with_suffix(".new")
            new.write_text("".join(f"{event.to_json()}\n" for event in self.events), encoding="utf-8")
            new.replace(self._path)  # a crash before this leaves the long one, after it the short one
            self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file:
            self._file.close()
            self._file = None


def events_after(events: Sequence[Event], seq: int) -> list[Event]:
    """The events behind the one with this number; they are in the order of their numbers, which may have gaps."""
    return list(events[bisect_right(events, seq, key=lambda event: event.seq):])


def compact(events: Sequence[Event], longest: int) -> list[Event]:
    """A shorter log, of half of `longest` if it can be: neighbours of one kind and source become one, first
    those that stand for the fewest, so that what is left is spread evenly over the run."""
    recent = longest // 4
    old, new, heaviest = [_folded(event) for event in events[:-recent]], list(events[-recent:]), 1
    while len(old) > longest // 4 and heaviest < events[-1].seq:
        old, heaviest = _thinned(old, heaviest), 2 * heaviest
    return [*old, *new]


def _thinned(events: Sequence[Event], heaviest: int) -> list[Event]:
    """Every second event left out, of what is repeated and stands for no more than `heaviest`; not across what is rare,
    and not the first behind it."""
    kept: list[Event | None] = []
    waiting: dict[tuple[str, str], int | None] = {}  # kind and source → where one is that may be left out
    for event in events:
        key = event.kind, event.source
        if event.kind not in REPEATED or event.data.get("skipped"):
            waiting = {}
        elif key not in waiting or event.stands_for > heaviest:
            waiting[key] = None
        elif (place := waiting[key]) is None:
            waiting[key] = len(kept)
        else:
            sooner, kept[place], waiting[key] = kept[place], None, None
            assert sooner is not None
            event = replace(event, data={**event.data, "stands_for": sooner.stands_for + event.stands_for})
        kept.append(event)
    return [event for event in kept if event is not None]


def _folded(event: Event) -> Event:
    """An old recovery with one span for each of its steps instead of one for each rank."""
    spans = event.data.get("spans") or ()
    names = dict.fromkeys(span["name"] for span in spans)
    if len(names) == len(spans):
        return event
    folded = []
    for name in names:
        same = [span for span in spans if span["name"] == name]
        folded.append({**same[0], "begin": min(span["begin"] for span in same),
                       "end": max(span["end"] for span in same), "by": same[0]["by"] if len(same) == 1 else "all"})
    return replace(event, data={**event.data, "spans": folded})


def in_order_of_time(events: Iterable[Event]) -> list[Event]:
    """Events as they happened; what happened at the same moment stays in the order of the log."""
    return sorted(events, key=lambda event: (event.at, event.seq))


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that a crash left unfinished, so that the next one does not grow onto it."""
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        os.truncate(path, whole)


def read_events(path: Path) -> Iterator[Event]:
    """The events in a log file; a last line that a crash cut short is skipped."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield Event.from_json(line)
