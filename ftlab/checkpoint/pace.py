"""A pace for what is done behind training's back.

A disk at full speed takes processor time and memory bandwidth from the training beside it, and nobody is in a hurry to
see a checkpoint finished a tenth of a second sooner. So the pieces of a shard are handed out at a moderate rate, unless
somebody waits for the save: then as fast as storage takes them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

_NICE = 5
RATE = 500e6  # bytes a second; a slower storage sets its own pace
_LOOK_S = 0.005
Pace = Callable[[Iterable[memoryview]], Iterator[memoryview]]


def at_once(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """No pace at all."""
    yield from pieces


def moderate(hurried: Callable[[], bool]) -> Pace:
    """Not faster than RATE for as long as nobody is in a hurry."""

    def pace(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        begin, sent = time.monotonic(), 0
        for piece in pieces:
            while (early := begin + sent / RATE - time.monotonic()) > 0 and not hurried():
                time.sleep(min(early, _LOOK_S))
            yield piece
            sent += len(piece)

    return pace


def step_back() -> None:
    """Let training go first where processors are scarce: lower this thread's priority, where that is possible."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
