"""One page of shared memory per worker: where the training thread is, readable by the agent at any moment.

The worker writes it at each step without a system call; the agent reads it with each heartbeat. The page is
anonymous memory that was mapped before the processes were forked, so it has no name and cannot be left behind.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from typing import Any

from ftlab.messages import Place

_COUNT, _ENTERED = 0, 1  # cells: how often a slot was written, which says which one holds; when a step was entered
_SLOTS = (8, 16)  # written in turn


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a worker's page says."""

    generation: int
    rank: int  # -1 without a seat
    step: int
    place: Place
    since: float  # when it came to this place
    committed_at: float  # when the last step was committed

    def to_dict(self) -> dict[str, Any]:
        """The progress as JSON-able data."""
        return {**vars(self), "place": int(self.place)}  # not asdict: with every heartbeat


class StatusPage:
    """A worker's page: cells of eight bytes, each of which is written at once."""

    def __init__(self) -> None:
        self._cells = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
        self.reset()

    def reset(self) -> None:
        """For the next worker on this page."""
        self.generation, self.rank, self.step = 0, -1, 0
        self._committed_at = time.monotonic()
        self.move(Place.STARTING)

    def move(self, place: Place) -> float:
        """Say where the training thread is now; when it came there."""
        self.place = place
        now = time.monotonic()
        self._write(now)
        return now

    def enter(self) -> None:
        """Say that a step is entered: after each commit, so this writes one cell only."""
        self.place = Place.COMPUTING
        self._cells[_ENTERED] = time.monotonic()

    def commit(self, step: int, at: float) -> None:
        """Say that a step was committed."""
        self.step, self._committed_at = step, at
        self.place = Place.OUTSIDE
        self._write(at)

    def _write(self, since: float) -> None:
        """Fill the slot that nobody reads, then point to it: one cell changes at once, a slot does not."""
        cells = self._cells
        count = cells[_COUNT] + 1.0
        slot = _SLOTS[int(count) & 1]
        cells[slot], cells[slot + 1], cells[slot + 2] = self.generation, self.rank, self.step
        cells[slot + 3], cells[slot + 4], cells[slot + 5] = self.place, since, self._committed_at
        cells[_COUNT] = count

    def read(self) -> Progress:
        """What the page says now."""
        cells = self._cells
        while True:
            count, entered = cells[_COUNT], cells[_ENTERED]
            slot = _SLOTS[int(count) & 1]
            generation, rank, step, place, since, committed_at = cells[slot:slot + 6]
            if cells[_COUNT] == count:  # else it was written meanwhile, perhaps over what was read
                break
        if entered > since:  # whatever it was before: after a commit, in the first step of a generation, once more
            place, since = Place.COMPUTING, entered
        return Progress(generation=int(generation), rank=int(rank), step=int(step), place=Place(int(place)),
                        since=since, committed_at=committed_at)
