"""The launcher template: a warm process from which the launchers of a Python process's clusters are forked.

`import torch` and the first optimizer step take seconds of a core; a notebook pays them with its first cluster, and
the next ones start in a fraction of a second. The template has a single thread, holds nothing of any cluster, and ends
when its owner does, or when nothing was asked of it for long. Launchers do not need it once they run.

Every process of a cluster carries the cluster's label in the environment that the kernel shows of it, which is the one
that it was started with. Here that holds two places of the right length, and a forked launcher writes its labels there.
Run as `python -m ftlab.cluster.launcher_template SOCKET_FD OWNER_PID`; only on Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import selectors
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path

from ftlab.cluster.forks import ended_children, fork
from ftlab.cluster.launcher import serve_cluster
from ftlab.config import be_started_with

READY = "ready"
_IDLE_S = 1800.0  # without an order it ends: a few hundred megabytes are much on a small laptop
_ENV_START, _ENV_END = 47, 48  # in /proc/self/stat, counted from the state on


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """What a launcher would be started with."""

    folder: Path
    environment: Mapping[str, str]
    labels: Mapping[str, str]  # place → label, each a name with its value
    path: list[str]  # where modules are found
    cwd: str | None  # None: it is no more
    umask: int


def serve(owner: Connection, owner_pid: int) -> None:
    """Fork launchers until the owner is gone."""
    from ftlab.train.worker import warm_up

    warm_up()
    owner.send(READY)
    selector = selectors.DefaultSelector()
    selector.register(owner, selectors.EVENT_READ)
    selector.register(os.pidfd_open(owner_pid), selectors.EVENT_READ)  # its forks may hold the socket, too
    signal.signal(signal.SIGCHLD, lambda number, frame: list(ended_children()))
    while found := selector.select(_IDLE_S):
        if any(key.fileobj is not owner for key, _ in found):
            return
        _launch(owner)


def _launch(owner: Connection) -> None:
    order: LaunchOrder = owner.recv()
    link, log = reduction.recv_handle(owner), reduction.recv_handle(owner)

    def child() -> int:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, taken in enumerate((nothing, log, log)):
            os.dup2(taken, fd)
        os.close(nothing)
        os.close(log)
        take_labels(order.labels)
        be_started_with(order.environment)
        os.umask(order.umask)
        if order.cwd is not None:
            with contextlib.suppress(OSError):  # who could not come here was brought here
                os.chdir(order.cwd)
        sys.path[:] = order.path
        serve_cluster(order.folder, Connection(link))
        return 0

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # or its number might already be another process's
    pid = fork(child, keep=(link, log), new_session=True, alone=True)
    watch = os.pidfd_open(pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    owner.send(pid)
    reduction.send_handle(owner, watch, os.getppid())
    for fd in (link, log, watch):
        os.close(fd)


def take_labels(labels: Mapping[str, str]) -> None:
    """Put new texts for old ones where the kernel shows the environment that this process was started with."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(stat[_ENV_START]), int(stat[_ENV_END])
    area = ctypes.string_at(start, end - start)
    for old, new in labels.items():
        at = area.find(f"{old}\0".encode())
        if at < 0 or len(old.encode()) != len(new.encode()):
            raise RuntimeError(f"there is no place for the label {new}")
        ctypes.memmove(start + at, new.encode(), len(new.encode()))


def main() -> None:
    """Entry point of the template."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    owner = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):
        serve(owner, int(sys.argv[2]))


if __name__ == "__main__":
    main()
