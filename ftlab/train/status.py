"""One page of shared memory per worker: where the training thread is, readable by the agent at any moment.

The worker writes it at each step without a system call; the agent reads it with each heartbeat. The page is
anonymous memory that was mapped before the processes were forked, so it has no name and cannot be left behind.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import asdict, dataclass
from typing import Any

from ftlab.messages import Place

_LAYOUT = struct.Struct("=qiqidd")


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
        return {**asdict(self), "place": int(self.place)}


class StatusPage:
    """A worker's page."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.reset()

    def reset(self) -> None:
        """For the next worker on this page."""
        self.generation, self.rank, self.step = 0, -1, 0
        self._committed_at = time.monotonic()
        self.move(Place.STARTING)

    def move(self, place: Place) -> None:
        """Say where the training thread is now."""
        self.place = place
        _LAYOUT.pack_into(self._memory, 0, self.generation, self.rank, self.step, place, time.monotonic(),
                          self._committed_at)

    def commit(self, step: int, at: float) -> None:
        """Say that a step was committed."""
        self.step, self._committed_at = step, at
        self.place = Place.OUTSIDE
        _LAYOUT.pack_into(self._memory, 0, self.generation, self.rank, step, Place.OUTSIDE, at, at)

    def read(self) -> Progress:
        """What the page says now."""
        generation, rank, step, place, since, committed_at = _LAYOUT.unpack_from(self._memory, 0)
        return Progress(generation=generation, rank=rank, step=step, place=Place(place), since=since,
                        committed_at=committed_at)
