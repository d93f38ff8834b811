"""The crew of a node: its workers, started from the warm fork server, listened to, told, watched and ended.

A worker that ends without a word is reported as failed, with what the kernel says about its end. One that is ended
because it got stuck is asked first where it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

from ftlab import messages
from ftlab.checkpoint.arena import Slot
from ftlab.cluster.forkserver import request_worker
from ftlab.cluster.identity import NodeIdentity
from ftlab.cluster.lookout import Lookout
from ftlab.cluster.output import OutputFilter
from ftlab.health.stacks import StackFile, capture, describe, parse
from ftlab.messages import Place
from ftlab.train.status import StatusPage
from ftlab.train.worker import STACK_SIGNAL, WorkerSpec

_IN_LOOP = (Place.OUTSIDE, Place.COMPUTING, Place.COMMUNICATING)
_STUCK_S = 0.5  # a worker that has not moved for so long and is ended was stuck


@dataclass(eq=False)
class Worker:
    """One training process, from the moment it is asked for."""

    local_rank: int
    job: str
    run: str
    control: Connection
    output: int
    filter: OutputFilter
    pid: int = 0
    reported: bool = False  # it said itself why it ends
    urgent: bool = False  # its next step is reported at once
    held: bool = False  # it pauses, and the controller has heard of it

    def tell(self, raw: bytes) -> None:
        """Send it an encoded message; one that is gone hears nothing."""
        with contextlib.suppress(OSError):
            self.control.send_bytes(raw)


class Ears(Protocol):
    """Who hears what happens in the crew."""

    def worker_said(self, worker: Worker, message: messages.Message) -> None:
        """A message of a worker's, or about its end."""

    def worker_printed(self, rows: list[list[Any]]) -> None:
        """Lines of output: [local rank, rank, line] of each."""

    def crew_noted(self, note: messages.Noted) -> None:
        """Something about a worker, seen from outside."""

    def crew_lost(self) -> None:
        """The fork server is gone: no worker can be started any more."""


class Crew:
    """The workers of one node, by their local rank."""

    def __init__(self, identity: NodeIdentity, forkserver: Connection, forkserver_pid: int, pages: list[StatusPage],
                 stacks: list[StackFile], ears: Ears) -> None:
        self._identity, self._forkserver, self._forkserver_pid = identity, forkserver, forkserver_pid
        self._pages, self._stacks, self._ears = pages, stacks, ears
        self.lookout = Lookout()
        self.workers: dict[int, Worker] = {}
        self._starting: deque[Worker] = deque()  # asked of the fork server, not yet answered
        self._by_pid: dict[int, Worker] = {}

    @property
    def size(self) -> int:
        """How many workers there are room for."""
        return len(self._pages)

    def listen(self) -> None:
        """Hear from the fork server, from now on."""
        asyncio.get_running_loop().add_reader(self._forkserver.fileno(), self._on_forkserver)

    def reports(self) -> list[dict[str, Any]]:
        """Each worker's progress with its place on the node, as heartbeats carry it."""
        return [{"local_rank": local_rank, "pid": worker.pid, "run": worker.run,
                 "slow": self.lookout.slow(local_rank), "starved": self.lookout.starved(local_rank),
                 **self._pages[local_rank].read().to_dict()}
                for local_rank, worker in sorted(self.workers.items())]

    def look_out(self, now: float) -> None:
        """Look at the workers from outside; a warning is noted."""
        seen = {worker.local_rank: (worker.pid, self._pages[worker.local_rank].read())
                for worker in self.workers.values() if worker.pid}
        for local_rank, warning in self.lookout.look(now, seen):
            self._ears.crew_noted(messages.Noted(
                job=self.workers[local_rank].job, event="memory.warned", step=seen[local_rank][1].step,
                data={"local_rank": local_rank, "detail": warning}))

    def glance(self, local_rank: int) -> None:
        """One look at a worker that is examined."""
        worker = self.workers.get(local_rank)
        if worker is not None and worker.pid:
            self.lookout.glance(local_rank, worker.pid)

    def start(self, local_rank: int, order: messages.RunJob, code: bytes, slots: list[Slot], busy: list[int]) -> None:
        """Start a worker in a place that is free; `slots` are for its snapshots, some of them still `busy`."""
        mine, theirs = Pipe()
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        logs = self._identity.logs
        worker = Worker(local_rank, order.job, order.run, mine, reading,
                        OutputFilter(logs / f"{self._identity.name}-{local_rank}.log" if logs else None))
        spec = WorkerSpec(node=self._identity.name, local_rank=local_rank, code=code, path=order.spec["path"],
                          config=order.spec["config"], job=order.job, busy=busy)
        request_worker(self._forkserver, spec, theirs, writing, [slot.fd for slot in slots], self._forkserver_pid)
        theirs.close()
        os.close(writing)
        self.workers[local_rank] = worker
        self._starting.append(worker)
        loop = asyncio.get_running_loop()
        loop.add_reader(mine.fileno(), self._hear, worker)
        loop.add_reader(reading, self._on_output, worker)

    def tell(self, job: str, body: dict[str, Any]) -> None:
        """Pass an encoded message on to all workers of a job."""
        raw = messages.dumps(messages.decode(body))
        for worker in self.workers.values():
            if worker.job == job:
                worker.tell(raw)

    def go_on(self) -> None:
        """The controller that was told of their pauses is gone: nobody would end them."""
        for worker in self.workers.values():
            if worker.held:
                worker.held = False
                worker.tell(messages.dumps(messages.GoOn()))

    def halt(self) -> int:
        """Have the workers leave their generation, as if the controller had ended it; which one that is."""
        generations = {worker: self._pages[worker.local_rank].read().generation for worker in self.workers.values()}
        for worker, generation in generations.items():
            worker.tell(messages.dumps(messages.Terminate(generation=generation)))
        return max(generations.values(), default=0)

    def end_training(self) -> None:
        """End the workers that are in their loop, although they were told to leave it."""
        for local_rank in list(self.workers):
            if self._pages[local_rank].read().place in _IN_LOOP:
                self.end(local_rank)

    def end_all(self) -> None:
        """End every worker."""
        for local_rank in list(self.workers):
            self.end(local_rank)

    def end(self, local_rank: int) -> None:
        """End a worker, if there is one."""
        worker = self.workers.get(local_rank)
        if worker is None:
            return
        if worker.pid:
            self._catch(worker)
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        self._forget(worker)

    def _on_forkserver(self) -> None:
        try:
            kind, *rest = self._forkserver.recv()
        except (EOFError, OSError):
            self._ears.crew_lost()
            return
        if kind == "started":
            worker = self._starting.popleft()
            worker.pid = rest[1]
            self._by_pid[worker.pid] = worker
            if self.workers.get(worker.local_rank) is not worker:  # replaced before it had begun
                os.kill(worker.pid, signal.SIGKILL)
        else:
            pid, status = rest
            if pid in self._by_pid:
                self._on_ended(self._by_pid.pop(pid), status)

    def _hear(self, worker: Worker) -> None:
        """There is something to hear: one message, or the end. If there are more, the event loop calls again."""
        try:
            self._ears.worker_said(worker, messages.loads(worker.control.recv_bytes()))
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(worker.control.fileno())

    def _hear_out(self, worker: Worker) -> None:
        """All that a worker that has ended said."""
        with contextlib.suppress(EOFError, OSError):
            while worker.control.poll():
                self._ears.worker_said(worker, messages.loads(worker.control.recv_bytes()))

    def _on_output(self, worker: Worker) -> None:
        try:
            data = os.read(worker.output, 1 << 18)
        except BlockingIOError:
            return
        lines = worker.filter.feed(data, time.monotonic()) if data else worker.filter.finish()
        if not data:
            asyncio.get_running_loop().remove_reader(worker.output)
            os.close(worker.output)
        rank = self._pages[worker.local_rank].read().rank
        self._ears.worker_printed([[worker.local_rank, rank, line] for line in lines])

    def _on_ended(self, worker: Worker, status: int) -> None:
        if self.workers.get(worker.local_rank) is not worker:
            return  # it was ended on purpose
        self._hear_out(worker)  # its last words come before its end
        if not worker.reported:
            progress, end = self._pages[worker.local_rank].read(), self.lookout.explain(status)
            self._ears.worker_said(worker, messages.Failed(
                cause="oom" if end.for_memory else "crash", detail=f"worker {end.text}",
                generation=progress.generation, step=progress.step))
        self._forget(worker)

    def _catch(self, worker: Worker) -> None:
        """Before a worker that got stuck is ended: where is it?"""
        progress = self._pages[worker.local_rank].read()
        stuck_s = time.monotonic() - progress.since
        if progress.place not in _IN_LOOP or stuck_s < _STUCK_S:
            return
        text = capture(worker.pid, self._stacks[worker.local_rank].fd, STACK_SIGNAL)
        thread = next((each for each in parse(text) if each.main), None)
        if thread is not None:
            frames = [[frame.file, frame.line, frame.function] for frame in thread.frames]
            self._ears.crew_noted(messages.Noted(job=worker.job, event="worker.caught", step=progress.step, data={
                "stuck_rank": progress.rank, "since_s": round(stuck_s, 3), "frames": frames[:30],
                "detail": describe(thread.frames, stuck_s)}))

    def _forget(self, worker: Worker) -> None:
        if self.workers.get(worker.local_rank) is worker:
            del self.workers[worker.local_rank]
        with contextlib.suppress(OSError, ValueError):
            asyncio.get_running_loop().remove_reader(worker.control.fileno())
            worker.control.close()
