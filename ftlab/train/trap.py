"""A way to make the training thread block, for the `stall` fault: a signal whose handler sleeps.

Python runs signal handlers in the main thread, which is the training thread, so this blocks exactly what a lost lock
or a dead file server would block, while the worker's other threads and the agent go on. It waits until the thread is
inside a step. Nothing in training or recovery knows about it.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

from ftlab.messages import Place
from ftlab.train.status import StatusPage

STALL_SIGNAL = signal.SIGUSR2
_RETRY_S = 0.001


def set_trap(page: StatusPage) -> None:
    """Let STALL_SIGNAL block the training thread for ever at the next moment it is inside a step."""

    def block(number: int, frame: FrameType | None) -> None:
        if page.place not in (Place.COMPUTING, Place.COMMUNICATING):
            signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
            return
        while True:
            time.sleep(3600)

    signal.signal(STALL_SIGNAL, block)
    signal.signal(signal.SIGALRM, block)
