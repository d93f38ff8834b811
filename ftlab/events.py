"""The one record: everything notable happens once, as an `Event`, in an append-only log.

Metrics, dashboards, reports and graders only read it. `at` is the monotonic clock, which all processes of
one machine share, so times from different processes compare. A line that was cut off by a crash (the last
one only) is ignored on reading; `kill -9` of the writer loses nothing that `record` or `together` has returned from.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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

    def to_json(self) -> str:
        """One line of the log."""
        return json.dumps(vars(self), separators=(",", ":"))  # not asdict: this runs once a step

    @staticmethod
    def from_json(line: str | bytes) -> Event:
        """The event on one line of the log."""
        return Event(**json.loads(line))


class EventLog:
    """The append-only log of one cluster: events in memory, and as JSON lines in a file.

    Opening an existing file reads it back and goes on with the next `seq`. `listeners` are called with
    every new event, after it was written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.events: list[Event] = list(read_events(path)) if path and path.exists() else []
        self.listeners: list[Callable[[Event], None]] = []
        if path and path.exists():
            _drop_torn_line(path)
        self._file = path.open("a", encoding="utf-8") if path else None
        self._held: list[Event] | None = None  # recorded together and not yet written

    def record(self, kind: str, **fields: Any) -> Event:
        """Append one event and tell the listeners; fields that are None are left out."""
        given = {name: value for name, value in fields.items() if value is not None}
        head = {name: given.pop(name) for name in ("at", "source", "generation", "rank", "step") if name in given}
        event = Event(kind=kind, seq=len(self.events) + 1, data=given, **head)
        self.events.append(event)
        if self._held is not None:
            self._held.append(event)
        else:
            self._write([event])
        return event

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

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file:
            self._file.close()
            self._file = None


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
