"""What a launcher can have done to nodes, whatever a node is: a process group or a container.

Each method tells what it read back from the kernel or the engine. What hits a single worker is the same for both: a
worker of a container is a process of this machine too.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil

from ftlab.errors import FaultUnavailable

_LEAST_USE_S = 0.3  # a few steps
_LONGEST_LOOK_S = 1.5  # at memory that never rises or falls
_CHANGE = 1 << 20  # bytes that a step takes and gives back
Receipt = dict[str, Any]
Others = Callable[[Collection[str]], list[int]]  # the processes of everybody but some nodes


class Nodes(Protocol):
    """Starts, watches and breaks the nodes of one cluster."""

    def start(self, name: str) -> Receipt:
        """Have a new node started."""

    def remove(self, name: str) -> Receipt:
        """End a node for good."""

    def ended(self, pid: int, status: int) -> None:
        """A child of the launcher has ended."""

    def close(self) -> None:
        """End all nodes."""

    def names(self) -> list[str]:
        """The nodes that have not ended."""

    def agents(self) -> list[int]:
        """The children of the launcher that nodes are made of."""

    def pids(self, name: str) -> list[int]:
        """All processes of a node."""

    def kill(self, name: str) -> Receipt:
        """End a node at once."""

    def kill_all(self) -> Receipt:
        """End all nodes at once."""

    def hang(self, name: str) -> Receipt:
        """Stop a node."""

    def hang_all(self) -> Receipt:
        """Stop all nodes."""

    def resume(self, name: str) -> Receipt:
        """Let a node go on."""

    def cut(self, group: str, way: str, others: Others) -> Receipt:
        """Drop all packets between some nodes (their names, separated by commas) and the rest; `way`: only what they
        send, or receive."""

    def heal(self, group: str) -> Receipt:
        """Let packets pass again."""

    def worsen(self, name: str, loss: float, delay_ms: float, rate_mbit: float, others: Others) -> Receipt:
        """Make a node's link lossy, late or slow."""

    def mend(self, name: str) -> Receipt:
        """Make it as good as it was."""

    def fill(self, name: str) -> Receipt:
        """Leave no room on the disk that a node saves to."""

    def empty(self, name: str) -> Receipt:
        """Give the room back."""

    def crash(self, name: str, pid: int) -> Receipt:
        """End one worker at once."""

    def spring(self, name: str, pid: int, trap: str) -> Receipt:
        """Spring one of a worker's traps."""

    def squeeze(self, name: str, pid: int, room_mb: int) -> Receipt:
        """Let a worker's allocations fail."""

    def cage(self, name: str, pid: int, room_mb: int) -> Receipt:
        """Let the kernel kill for memory."""

    def make_room(self, name: str) -> Receipt:
        """Lift the limits of memory."""

    def slow_down(self, name: str, pid: int, share: float) -> Receipt:
        """Give a worker only a share of its time."""

    def speed_up(self, name: str) -> Receipt:
        """Let it run again."""

    def next_chore(self, now: float) -> float | None:
        """How long the launcher may sleep."""

    def do_chores(self, now: float, others: Others) -> None:
        """What is to be done now and then."""


def kill_worker(pid: int) -> Receipt:
    """SIGKILL a process and see it gone."""
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    gone = wait_until(lambda: not psutil.pid_exists(pid))
    return {"at": at, "pids": [pid], "status": "gone" if gone else "still there"}


def spring_trap(pid: int, trap: str) -> Receipt:
    """Send a worker the signal of one of its traps."""
    from ftlab.train.trap import SIGNALS  # not above: it imports torch, and containers are started before that

    at = time.monotonic()
    os.kill(pid, SIGNALS[trap])
    return {"at": at, "pids": [pid], "status": f"{SIGNALS[trap].name} sent"}


def limit_data(pids: Iterable[int], size: int) -> None:
    """Set RLIMIT_DATA of some processes; those that are gone are no problem."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_DATA, (size, resource.RLIM_INFINITY))


def squeeze_worker(pid: int, room_mb: int, limit: Callable[[Iterable[int], int], None] = limit_data) -> Receipt:
    """Let a worker take no more than so much memory beyond its least use: a larger allocation fails in it."""
    if sys.platform != "linux":
        raise FaultUnavailable("memory cannot be limited from outside here", hint="use the Docker backend")
    least = least_use(partial(_data_bytes, pid), _LEAST_USE_S)
    at = time.monotonic()
    limit([pid], least + (room_mb << 20))
    return {"at": at, "pids": [pid], "limit_bytes": _data_limit(pid), "used_bytes": least,
            "status": f"RLIMIT_DATA leaves {room_mb} MB"}


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    with contextlib.suppress(psutil.Error):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def least_use(read: Callable[[], int], seconds: float) -> int:
    """The least memory in use in the course of a few steps: what a step takes and gives back must not count.

    Looks for so long, and longer if nothing has changed meanwhile: on a busy machine that may be a part of one step.
    """
    begin, least, most = time.monotonic(), read(), 0
    while (passed := time.monotonic() - begin) < seconds or (most - least < _CHANGE and passed < _LONGEST_LOOK_S):
        time.sleep(0.002)
        now = read()
        least, most = min(least, now), max(most, now)
    return least


def wait_until(condition: Callable[[], bool], limit_s: float = 2.0) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _data_limit(pid: int) -> int | None:
    """RLIMIT_DATA of a process, as the kernel shows it to everybody; None: there is none."""
    shown = Path(f"/proc/{pid}/limits").read_text().partition("Max data size")[2].split()[0]
    return int(shown) if shown.isdigit() else None


def _data_bytes(pid: int) -> int:
    """What counts against RLIMIT_DATA."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) << 10
