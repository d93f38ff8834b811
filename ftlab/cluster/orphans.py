"""Processes that a train function started: they end with the worker that started them, whatever they did to hide.

A child may take a session of its own, clear its environment or fork twice, but not its ancestors: the kernel hands the
children of a process that has ended to the nearest ancestor that asked for them ("subreaper"). Workers ask for theirs,
so that a process that forked twice stays below its worker; fork servers and the launcher ask for what is left when a
worker or a whole node ends. What arrives there was started by nobody there, and is ended: by the fork server after a
moment in which helpers that clean up after their worker (multiprocessing has one) can do so and end by themselves.

Only on Linux. Elsewhere orphans go to the system's first process, where nobody can tell whose they were.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 0.5
_AGAIN_S = 0.02  # what a process leaves behind arrives when it has ended
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def adopt_orphans() -> None:
    """Have this process become the parent of what its descendants leave behind."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Orphans:
    """What the workers of a fork server left behind."""

    def __init__(self) -> None:
        self._due: float | None = None  # when those that are there now are ended

    def look(self, known: Collection[int], now: float) -> float | None:
        """End those whose time is over, among all children but the known ones; seconds until the next look is due."""
        left = [pid for pid in children() if pid not in known]
        if not left:
            self._due = None
        elif self._due is None:
            self._due = now + _GRACE_S
        elif now >= self._due:
            end_orphans(known)
            self._due = now + _AGAIN_S
        return None if self._due is None else max(0.0, self._due - now)


def end_orphans(known: Collection[int]) -> list[int]:
    """SIGKILL all children of this process but the known ones; their pids.

    What such a child leaves behind arrives only when it has ended: call again after each end of a child.
    """
    found = [pid for pid in children() if pid not in known]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def end_all_children(limit_s: float = 2.0) -> None:
    """End every child of this process, and what arrives when they end, until none is left."""
    deadline = time.monotonic() + limit_s
    while end_orphans(()) and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def children() -> list[int]:
    """The children of this process. The kernel's own list may miss one while another one ends: that end is a reason to
    look again."""
    if _libc is None:
        return [child.pid for child in psutil.Process().children()]
    try:
        return [int(pid) for task in Path("/proc/self/task").iterdir()
                for pid in (task / "children").read_text().split()]
    except OSError:  # a kernel without these lists
        return [child.pid for child in psutil.Process().children()]
