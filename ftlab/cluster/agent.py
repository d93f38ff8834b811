"""The node agent: one per node; it heartbeats, starts workers, and passes word between them and the controller.

It holds a lease: while the controller answers, the workers train. When the controller has been silent longer than the
lease, the agent ends its workers by itself, so a node that was cut off cannot go on in a world that has moved on.
While the controller is away for a shorter time (it was killed and is being restarted) training goes on, and what the
workers reported meanwhile is kept until it is acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
import uuid
from collections import deque
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from ftlab import messages
from ftlab.checkpoint.saving import SaveOrder
from ftlab.cluster.forkserver import request_worker
from ftlab.cluster.identity import NodeIdentity
from ftlab.cluster.keeper import Keeper
from ftlab.cluster.lookout import Lookout
from ftlab.cluster.output import OutputFilter
from ftlab.config import MAX_CODE_BYTES, MAX_MESSAGE_BYTES
from ftlab.health.stacks import StackFile, capture, describe, parse
from ftlab.messages import Place
from ftlab.train.status import StatusPage
from ftlab.train.worker import STACK_SIGNAL, WorkerSpec

log = logging.getLogger(__name__)
_RETRY_S = 0.05
_SILENT_S = 1.5  # a link on which nothing came for so long, nor for three acknowledgements, is made anew
_MAX_STEPS = 500  # step records in one heartbeat
_MAX_OUTPUT_LINES = 1000  # kept while the controller is away
_IN_LOOP = (Place.OUTSIDE, Place.COMPUTING, Place.COMMUNICATING)
_REFUSED_S = 2.0  # how long nobody may listen before the launcher is taken to be gone
_STUCK_S = 0.5  # a worker that has not moved for so long and is ended was stuck


@dataclass
class _Worker:
    local_rank: int
    job: str
    run: str
    control: Connection
    output: int
    filter: OutputFilter
    pid: int = 0
    reported: bool = False  # it said itself why it ends
    urgent: bool = False  # its next step is reported at once


class NodeAgent:
    """Runs until its launcher closes the lifeline, or, where there is none, until its controller is gone for good."""

    def __init__(self, identity: NodeIdentity, forkserver: Connection, forkserver_pid: int,
                 pages: list[StatusPage], stacks: list[StackFile], lifeline: int | None) -> None:
        self.identity, self.pages, self._stacks = identity, pages, stacks
        self._lookout = Lookout()
        self._forkserver, self._forkserver_pid, self._lifeline = forkserver, forkserver_pid, lifeline
        self._instance = uuid.uuid4().hex
        self._workers: dict[int, _Worker] = {}
        self._starting: deque[_Worker] = deque()  # asked of the fork server, not yet answered
        self._by_pid: dict[int, _Worker] = {}
        self._job = ""
        self._link: WebSocketClientConnection | None = None
        self._heartbeat_s, self._lease_s = 0.1, 5.0
        self._heard = time.monotonic()
        self._refused: float | None = None  # since when nobody listens at the controller's port
        self._steps: list[dict[str, Any]] = []  # not yet in the controller's journal
        self._sent = 0  # of them, on this link
        self._output: list[list[Any]] = []
        self._outbox: list[messages.Message] = []
        self._keeper = Keeper(identity.address, identity.token)
        self._watch: int | None = None
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Serve until the launcher is gone."""
        loop = asyncio.get_running_loop()
        if self._lifeline is not None:
            loop.add_reader(self._lifeline, self._over.set)
        loop.add_reader(self._forkserver.fileno(), self._on_forkserver)
        tasks = [asyncio.create_task(self._keep_link()), asyncio.create_task(self._beat())]
        await self._over.wait()
        for task in tasks:
            task.cancel()
        self._end_workers()

    # ---- the link to the controller ------------------------------------------------------------------------

    async def _keep_link(self) -> None:
        while True:
            try:
                self._link = await self._connect()
                self._refused = None
                while (raw := await self._link.read_message()) is not None:
                    self._heard = time.monotonic()
                    await self._on_message(messages.loads(raw))
            except (TimeoutError, OSError, RuntimeError) as error:
                self._note_refusal(error)
                log.debug("link lost: %s", error)
            except Exception as error:  # HTTP errors of the handshake, bad messages: try again, say why
                log.info("link refused: %s", error)
            self._link = None
            await asyncio.sleep(_RETRY_S)

    async def _connect(self) -> WebSocketClientConnection:
        link = await websocket_connect(self._request("/node", connect_timeout=0.5, request_timeout=1.0),
                                       max_message_size=MAX_MESSAGE_BYTES)
        await link.write_message(messages.dumps(messages.Hello(
            node=self.identity.name, address=self.identity.address, pid=os.getpid(), instance=self._instance,
            job=self._job, workers=self._reports(),
            replica_port=self._keeper.port)))
        return link

    def _request(self, path: str, **options: Any) -> HTTPRequest:
        base = self.identity.controller.replace("http", "ws", 1) if path == "/node" else self.identity.controller
        return HTTPRequest(base + path, headers={"Authorization": f"Bearer {self.identity.token}"},
                           network_interface=self.identity.address, **options)

    def _send(self, message: messages.Message) -> bool:
        if self._link is None:
            return False
        try:
            future = self._link.write_message(messages.dumps(message))
        except Exception:  # closed just now: the reader notices and reconnects
            return False
        asyncio.ensure_future(future).add_done_callback(lambda done: done.exception())
        return True

    async def _on_message(self, message: messages.Message) -> None:
        match message:
            case messages.Welcome():
                self._heartbeat_s, self._lease_s = message.heartbeat_s, message.lease_s
                if message.fresh:
                    self._start_over()
                self._sent = 0
                self._flush()
            case messages.Ack():
                self._forget_steps((message.generation, message.step))
            case messages.RunJob():
                await self._run_job(message)
            case messages.EndJob():
                self._end_workers()
                self._drop_steps()  # of a job that is over
                self._keeper.release(message.job)
            case messages.ToWorkers():
                if message.body.get("kind") == "Terminate":
                    self._keeper.ended(int(message.body["generation"]))
                self._tell_workers(message)
            case messages.Buddy():
                self._keeper.buddy = message
            case messages.Watch():
                self._watch = message.step
                self._tell_workers(messages.ToWorkers(job=self._job, body=messages.encode(message)))

    async def _beat(self) -> None:
        while True:
            self._send_heartbeat()
            now = time.monotonic()
            self._look_out(now)
            if now - self._heard > self._lease_s and self._workers:
                log.warning("lease ran out after %.1f s: ending workers", now - self._heard)
                self._start_over()
            elif self._is_orphan(now):
                log.warning("the controller is gone: this node ends itself")
                self._over.set()
            elif self._link is not None and now - self._heard > max(_SILENT_S, 12 * self._heartbeat_s):
                self._link.close()  # silent: knock again
            await asyncio.sleep(self._heartbeat_s)

    def _note_refusal(self, error: Exception) -> None:
        """The launcher holds the controller's port as long as it lives: a port that refuses has no launcher."""
        refused = isinstance(error, ConnectionRefusedError)
        self._refused = (self._refused or time.monotonic()) if refused else None

    def _is_orphan(self, now: float) -> bool:
        if self.identity.orphan_s is None:
            return False
        refused = self._refused is not None and now - self._refused > _REFUSED_S
        return refused or now - self._heard > self.identity.orphan_s

    def _look_out(self, now: float) -> None:
        workers = {worker.local_rank: (worker.pid, self.pages[worker.local_rank].read())
                   for worker in self._workers.values() if worker.pid}
        for local_rank, warning in self._lookout.look(now, workers):
            self._pass_on(messages.Noted(job=self._job, event="memory.warned", step=workers[local_rank][1].step,
                                         data={"local_rank": local_rank, "detail": warning}))

    def _send_heartbeat(self) -> None:
        steps = self._steps[self._sent:self._sent + _MAX_STEPS]
        if self._send(messages.Heartbeat(workers=self._reports(), steps=steps, output=self._output[:200])):
            self._sent += len(steps)
            del self._output[:200]

    def _forget_steps(self, journal: tuple[int, int]) -> None:
        """Steps up to this one are in the controller's journal."""
        def is_new(record: dict[str, Any]) -> bool:
            return (record["generation"], record["step"]) > journal

        sent = list(filter(is_new, self._steps[:self._sent]))
        self._steps = [*sent, *filter(is_new, self._steps[self._sent:])]
        self._sent = len(sent)

    def _drop_steps(self) -> None:
        self._steps, self._sent = [], 0

    def _flush(self) -> None:
        """Send what waited for a link."""
        waiting, self._outbox = self._outbox, []
        for message in waiting:
            self._pass_on(message)
        self._send_heartbeat()

    def _pass_on(self, message: messages.Message) -> None:
        if not self._send(message):
            self._outbox.append(message)

    def _start_over(self) -> None:
        """This node was given up: nothing of its past may reach the present world."""
        self._end_workers()
        self._keeper.drop()
        self._drop_steps()
        self._outbox, self._job = [], ""

    # ---- workers -------------------------------------------------------------------------------------------

    def _reports(self) -> list[dict[str, Any]]:
        """Each worker's progress with its place on the node, as heartbeats carry it."""
        return [{"local_rank": local_rank, "pid": worker.pid, "run": worker.run,
                 "slow": self._lookout.slow(local_rank), **self.pages[local_rank].read().to_dict()}
                for local_rank, worker in sorted(self._workers.items())]

    async def _run_job(self, message: messages.RunJob) -> None:
        request = self._request(f"/api/jobs/{message.job}/code", request_timeout=60.0)
        response = await AsyncHTTPClient(max_body_size=MAX_CODE_BYTES).fetch(request)
        if message.local_ranks is None:
            self._end_workers()
            self._drop_steps()
            self._outbox = []
        self._job = message.job
        self._lookout.warn = float(message.spec["config"]["health"]["memory_warn"])
        for local_rank in message.local_ranks if message.local_ranks is not None else range(len(self.pages)):
            self._end_worker(local_rank)
            self._start_worker(local_rank, message, response.body)

    def _start_worker(self, local_rank: int, message: messages.RunJob, code: bytes) -> None:
        mine, theirs = Pipe()
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        logs = self.identity.logs
        worker = _Worker(local_rank, message.job, message.run, mine, reading,
                         OutputFilter(logs / f"{self.identity.name}-{local_rank}.log" if logs else None))
        settings = message.spec["config"].get("checkpoint")
        slots = self._keeper.open(message.job, local_rank, settings) if settings else []
        spec = WorkerSpec(node=self.identity.name, local_rank=local_rank, code=code, path=message.spec["path"],
                          config=message.spec["config"], job=message.job,
                          busy=self._keeper.busy(message.job, local_rank))
        request_worker(self._forkserver, spec, theirs, writing, [slot.fd for slot in slots], self._forkserver_pid)
        theirs.close()
        os.close(writing)
        self._workers[local_rank] = worker
        self._starting.append(worker)
        loop = asyncio.get_running_loop()
        loop.add_reader(mine.fileno(), self._on_worker, worker)
        loop.add_reader(reading, self._on_output, worker)

    def _on_forkserver(self) -> None:
        try:
            kind, *rest = self._forkserver.recv()
        except (EOFError, OSError):
            self._over.set()  # a node without a fork server is no node
            return
        if kind == "started":
            worker = self._starting.popleft()
            worker.pid = rest[1]
            self._by_pid[worker.pid] = worker
            if self._workers.get(worker.local_rank) is not worker:  # replaced before it had begun
                os.kill(worker.pid, signal.SIGKILL)
        else:
            pid, status = rest
            if pid in self._by_pid:
                self._on_ended(self._by_pid.pop(pid), status)

    def _on_worker(self, worker: _Worker) -> None:
        try:
            while worker.control.poll():
                self._on_worker_message(worker, messages.loads(worker.control.recv_bytes()))
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(worker.control.fileno())

    def _on_worker_message(self, worker: _Worker, message: messages.Message) -> None:
        if isinstance(message, messages.Steps):
            self._steps += [{**record, "local_rank": worker.local_rank} for record in message.records]
            watched = self._watch is not None and message.records[-1]["step"] >= self._watch
            if worker.urgent or watched:
                self._watch = None if watched else self._watch
                worker.urgent = False
                self._send_heartbeat()
            return
        if isinstance(message, messages.Snapshot):
            self._keep(worker, message)
            return
        if isinstance(message, messages.Failed):
            worker.reported = True
        worker.urgent = worker.urgent or isinstance(message, messages.Spans)  # the first step of a generation
        if isinstance(message, messages.Finished):
            self._send_heartbeat()  # the steps before it first
        self._pass_on(messages.FromWorker(job=worker.job, run=worker.run, local_rank=worker.local_rank, pid=worker.pid,
                                          body=messages.encode(message)))

    def _keep(self, worker: _Worker, message: messages.Snapshot) -> None:
        """A snapshot is in memory that outlives the worker: note it, and have it written."""
        order = SaveOrder(**message.order)
        self._pass_on(messages.Noted(job=worker.job, event="checkpoint.snapshot", step=order.step,
                                     data={"blocking_s": message.blocking_s, "bytes": order.bytes}))
        loop = asyncio.get_running_loop()

        def tell(news: messages.Message) -> None:
            loop.call_soon_threadsafe(self._on_kept, worker.local_rank, news)

        self._keeper.keep(worker.job, worker.local_rank, message.slot, order, tell)

    def _on_kept(self, local_rank: int, news: messages.Message) -> None:
        worker = self._workers.get(local_rank)  # perhaps not the one that took the snapshot
        if not isinstance(news, messages.Saved):
            self._pass_on(news)
        elif worker is not None:
            with contextlib.suppress(OSError):
                worker.control.send_bytes(messages.dumps(news))

    def _on_output(self, worker: _Worker) -> None:
        try:
            data = os.read(worker.output, 1 << 18)
        except BlockingIOError:
            return
        lines = worker.filter.feed(data, time.monotonic()) if data else worker.filter.finish()
        if not data:
            asyncio.get_running_loop().remove_reader(worker.output)
            os.close(worker.output)
        rank = self.pages[worker.local_rank].read().rank
        self._output += [[worker.local_rank, rank, line] for line in lines]
        del self._output[:-_MAX_OUTPUT_LINES]

    def _on_ended(self, worker: _Worker, status: int) -> None:
        if self._workers.get(worker.local_rank) is not worker:
            return  # it was ended on purpose
        self._on_worker(worker)  # its last words come before its end
        if not worker.reported:
            progress, end = self.pages[worker.local_rank].read(), self._lookout.explain(status)
            self._pass_on(messages.FromWorker(
                job=worker.job, run=worker.run, local_rank=worker.local_rank, pid=worker.pid,
                body=messages.encode(messages.Failed(cause="oom" if end.for_memory else "crash",
                                                     detail=f"worker {end.text}", generation=progress.generation,
                                                     step=progress.step))))
        self._forget(worker)

    def _tell_workers(self, message: messages.ToWorkers) -> None:
        raw = messages.dumps(messages.decode(message.body))
        for worker in self._workers.values():
            if worker.job == message.job:
                with contextlib.suppress(OSError):
                    worker.control.send_bytes(raw)

    def _end_workers(self) -> None:
        for local_rank in list(self._workers):
            self._end_worker(local_rank)

    def _end_worker(self, local_rank: int) -> None:
        worker = self._workers.get(local_rank)
        if worker is None:
            return
        if worker.pid:
            self._catch(worker)
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        self._forget(worker)

    def _catch(self, worker: _Worker) -> None:
        """Before a worker that got stuck is ended: where is it?"""
        progress = self.pages[worker.local_rank].read()
        stuck_s = time.monotonic() - progress.since
        if progress.place not in _IN_LOOP or stuck_s < _STUCK_S:
            return
        text = capture(worker.pid, self._stacks[worker.local_rank].fd, STACK_SIGNAL)
        thread = next((each for each in parse(text) if each.main), None)
        if thread is not None:
            frames = [[frame.file, frame.line, frame.function] for frame in thread.frames]
            self._pass_on(messages.Noted(job=worker.job, event="worker.caught", step=progress.step, data={
                "stuck_rank": progress.rank, "since_s": round(stuck_s, 3), "frames": frames[:30],
                "detail": describe(thread.frames, stuck_s)}))

    def _forget(self, worker: _Worker) -> None:
        if self._workers.get(worker.local_rank) is worker:
            del self._workers[worker.local_rank]
        with contextlib.suppress(OSError, ValueError):
            asyncio.get_running_loop().remove_reader(worker.control.fileno())
            worker.control.close()


def run_agent(identity: NodeIdentity, forkserver: Connection, forkserver_pid: int, pages: list[StatusPage],
              stacks: list[StackFile], lifeline: int | None) -> int:
    """The whole life of a node agent; returns its exit code."""
    asyncio.run(NodeAgent(identity, forkserver, forkserver_pid, pages, stacks, lifeline).run())
    return 0
