"""A node's fork server: a warm, single-threaded process that does nothing but fork workers and watch them end.

The agent asks for a worker and passes the worker's ends of two pipes along; the answer is the new pid. Ends of workers
are reported without being asked, and what a worker leaves behind is ended. When the agent is gone, the fork server ends
and takes its workers with it.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection

from ftlab.cluster.forks import ended_children, fork
from ftlab.cluster.orphans import Orphans, adopt_orphans, end_all_children
from ftlab.health.stacks import StackFile
from ftlab.train.status import StatusPage
from ftlab.train.worker import STACK_SIGNAL, WorkerSpec, run_worker


def request_worker(server: Connection, spec: WorkerSpec, control: Connection, output: int, memory: Sequence[int],
                   pid: int) -> None:
    """Ask the fork server (process `pid`) for a worker that owns `control`, writes its output to `output` and puts its
    snapshots into `memory`."""
    server.send((spec, len(memory)))
    for handle in (control.fileno(), output, *memory):
        reduction.send_handle(server, handle, pid)


def serve(agent: Connection, pages: list[StatusPage], stacks: list[StackFile]) -> int:
    """Fork workers until the agent is gone."""
    selector = selectors.DefaultSelector()
    waker, alarm = os.pipe()
    os.set_blocking(alarm, False)
    signal.set_wakeup_fd(alarm)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    adopt_orphans()
    selector.register(agent, selectors.EVENT_READ)
    selector.register(waker, selectors.EVENT_READ)
    workers: set[int] = set()
    orphans = Orphans()
    try:
        while True:
            for key, _ in selector.select(orphans.look(workers, time.monotonic())):
                if key.fileobj is agent:
                    workers.add(_start(agent, pages, stacks))
                else:
                    os.read(waker, 4096)
                    _reap(agent, workers)
    except (EOFError, OSError):
        return 0
    finally:
        end_all_children()


def _start(agent: Connection, pages: list[StatusPage], stacks: list[StackFile]) -> int:
    spec, files = agent.recv()
    control, output, *memory = [reduction.recv_handle(agent) for _ in range(2 + files)]
    page, caught = pages[spec.local_rank], stacks[spec.local_rank]
    page.reset()

    def child() -> int:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        caught.arm(STACK_SIGNAL)
        adopt_orphans()  # what the train function starts and lets go of stays below its worker
        return run_worker(spec, Connection(control), page, memory)

    begin = time.monotonic()
    pid = fork(child, keep=(control, output, caught.fd, *memory))
    for handle in (control, output, *memory):
        os.close(handle)
    agent.send(("started", spec.local_rank, pid, time.monotonic() - begin))
    return pid


def _reap(agent: Connection, workers: set[int]) -> None:
    for pid, status in ended_children():
        if pid in workers:
            workers.discard(pid)
            agent.send(("ended", pid, status))
