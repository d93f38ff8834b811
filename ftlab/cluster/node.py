"""What runs on a node: a fork server and the agent. In a container this is all there is, under a small init.

`python -m ftlab.cluster.node FILE` reads who it is from a file that only it can read, imports torch, and says hello to
its controller only then: a node that has joined is warm. It stays the container's first process, collects whatever is
orphaned inside, and ends with the agent, which ends itself when its controller is gone for good.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from multiprocessing import Pipe
from pathlib import Path

from ftlab.cluster.agent import run_agent
from ftlab.cluster.forks import fork
from ftlab.cluster.forkserver import serve
from ftlab.cluster.identity import NodeIdentity, read_identity
from ftlab.health.stacks import StackFile
from ftlab.train.status import StatusPage
from ftlab.train.worker import warm_up


def run_node(identity: NodeIdentity, procs: int, lifeline: int | None) -> int:
    """The whole life of a node, in a warm process; returns its exit code."""
    pages = [StatusPage() for _ in range(procs)]
    mine, theirs = Pipe()
    stacks = [StackFile() for _ in range(procs)]
    pid = fork(lambda: serve(theirs, pages, stacks), keep=(theirs.fileno(), *(each.fd for each in stacks)))
    theirs.close()
    return run_agent(identity, mine, pid, pages, stacks, lifeline)


def main() -> int:
    """Entry point of a container."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    return run_first(*read_identity(Path(sys.argv[1])))


def run_first(identity: NodeIdentity, procs: int) -> int:
    """A node with this process as its first one, in a container; returns its exit code."""
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))  # else process 1 ignores it
    warm_up()
    gc.enable()  # imports go faster without it: see the recipe
    agent = fork(lambda: run_node(identity, procs, None), keep=(), new_session=True)
    while True:
        pid, status = -1, 0
        with contextlib.suppress(InterruptedError):
            pid, status = os.wait()
        if pid == agent:
            return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(main())
