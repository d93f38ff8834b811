"""The node agent: one per node; it heartbeats, and passes word between the node's crew of workers and the controller.

A heartbeat goes out when a worker has told of its steps, and else when its time has come: waking up costs an agent as
much as what it does then, so what can be done in one go is done in one go.

It holds a lease: while the controller answers, the workers train. When the controller has been silent longer than the
lease, the agent has its workers stop, so a node that was cut off cannot go on in a world that has moved on. They keep
their state: if nobody else has taken their seats when the controller is heard again, training goes on from there. One
that does not stop is ended after as long again.
While the controller is away for a shorter time (it was killed and is being restarted) training goes on, and what the
workers reported meanwhile is kept until it is acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from multiprocessing.connection import Connection
from typing import Any

from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import WebSocketClientConnection, WebSocketClosedError, websocket_connect

from ftlab import messages
from ftlab.checkpoint.saving import SaveOrder
from ftlab.cluster.crew import Crew, Worker
from ftlab.cluster.identity import NodeIdentity
from ftlab.cluster.keeper import Keeper
from ftlab.cluster.lookout import GLANCE_S
from ftlab.config import MAX_CODE_BYTES, MAX_MESSAGE_BYTES
from ftlab.health.stacks import StackFile
from ftlab.train.status import StatusPage

log = logging.getLogger(__name__)
_RETRY_S = 0.05
_SILENT_S = 3.0  # a link on which three acknowledgements did not come is made anew
_MAX_STEPS = 500  # step records in one heartbeat
_SOON = 0.6  # of the time between two heartbeats: steps that come after it take the next heartbeat with them
_MAX_OUTPUT_LINES = 1000  # kept while the controller is away
_REFUSED_S = 2.0  # how long nobody may listen before the launcher is taken to be gone


class NodeAgent:
    """Runs until its launcher closes the lifeline, or, where there is none, until its controller is gone for good."""

    def __init__(self, identity: NodeIdentity, forkserver: Connection, forkserver_pid: int,
                 pages: list[StatusPage], stacks: list[StackFile], lifeline: int | None) -> None:
        self.identity, self._lifeline = identity, lifeline
        self._crew = Crew(identity, forkserver, forkserver_pid, pages, stacks, self)
        self._instance = uuid.uuid4().hex
        self._job = ""
        self._link: WebSocketClientConnection | None = None
        self._heartbeat_s, self._lease_s = 0.1, 5.0
        self._beaten = 0.0  # when the last heartbeat was sent
        self._next_beat: asyncio.TimerHandle | None = None
        self._heard = time.monotonic()
        self._halted = False  # its lease ran out, and its workers were told to stop
        self._refused: float | None = None  # since when nobody listens at the controller's port
        self._steps: list[list[Any]] = []  # [local_rank, *StepDone] of each that is not yet in the controller's journal
        self._sent = 0  # of them, on this link
        self._output: list[list[Any]] = []
        self._outbox: list[messages.Message] = []
        self._keeper = Keeper(identity.address, identity.token)
        self._watch: int | None = None
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Serve until the launcher is gone."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_note_error)
        if self._lifeline is not None:
            loop.add_reader(self._lifeline, self._over.set)
        self._crew.listen()
        link = asyncio.create_task(self._keep_link())
        self._beat()
        await self._over.wait()
        link.cancel()
        self._crew.end_all()

    # ---- the link to the controller ------------------------------------------------------------------------

    async def _keep_link(self) -> None:
        while True:
            try:
                self._link = await self._connect()
                self._refused = None
                while (raw := await self._link.read_message()) is not None:
                    self._heard, self._halted = time.monotonic(), False
                    await self._on_message(messages.loads(raw))
            except (TimeoutError, OSError, RuntimeError) as error:
                self._note_refusal(error)
                log.debug("link lost: %s", error)
            except Exception as error:  # HTTP errors of the handshake, bad messages: try again, say why
                log.info("link refused: %s", error)
            self._link = None
            self._crew.go_on()
            await asyncio.sleep(_RETRY_S)

    async def _connect(self) -> WebSocketClientConnection:
        link = await websocket_connect(self._request("/node", connect_timeout=0.5, request_timeout=1.0),
                                       max_message_size=MAX_MESSAGE_BYTES)
        await link.write_message(messages.dumps(messages.Hello(
            node=self.identity.name, address=self.identity.address, pid=os.getpid(), instance=self._instance,
            job=self._job, workers=self._crew.reports(),
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
            self._link.write_message(messages.dumps(message))
        except Exception:  # closed just now: the reader notices and reconnects
            return False
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
                self._crew.end_all()
                self._drop_steps()  # of a job that is over
                self._keeper.release(message.job)
            case messages.ToWorkers():
                if message.body.get("kind") == "Terminate":
                    self._keeper.ended(int(message.body["generation"]))
                elif message.body.get("kind") == "Join":
                    self._take_over(message.job, message.body["table"])
                self._crew.tell(message.job, message.body)
            case messages.Buddy():
                self._keeper.buddy = message
            case messages.Examine():
                self._examine(message.local_rank, time.monotonic() + message.seconds)
            case messages.Watch():
                self._watch = message.step
                self._crew.tell(self._job, messages.encode(message))

    def _beat(self) -> None:
        """Report, look at the workers and at the lease; and again when the time has come."""
        if self._next_beat is not None:
            self._next_beat.cancel()
        self._next_beat = asyncio.get_running_loop().call_later(self._heartbeat_s, self._beat)
        self._send_heartbeat()
        now = self._beaten = time.monotonic()
        self._crew.look_out(now)
        if now - self._heard > self._lease_s and self._crew.workers:
            self._lose_lease(now - self._heard)
        elif self._is_orphan(now):
            log.warning("the controller is gone: this node ends itself")
            self._over.set()
        elif self._link is not None and now - self._heard > _SILENT_S:
            self._link.close()  # silent: knock again

    def _lose_lease(self, silence: float) -> None:
        """Nobody may train here any more; what the workers hold may be all there is, so they live."""
        if not self._halted:
            log.warning("lease ran out after %.1f s: workers stop", silence)
            self._halted = True
            self._keeper.ended(self._crew.halt())
        elif silence > 2 * self._lease_s:
            self._crew.end_training()

    def _examine(self, local_rank: int, until: float) -> None:
        """Glance at a worker again and again, at moments that have nothing to do with what it does."""
        self._crew.glance(local_rank)
        if time.monotonic() < until:
            asyncio.get_running_loop().call_later(GLANCE_S, self._examine, local_rank, until)

    def _note_refusal(self, error: Exception) -> None:
        """The launcher holds the controller's port as long as it lives: a port that refuses has no launcher."""
        refused = isinstance(error, ConnectionRefusedError)
        self._refused = (self._refused or time.monotonic()) if refused else None

    def _is_orphan(self, now: float) -> bool:
        if self.identity.orphan_s is None:
            return False
        refused = self._refused is not None and now - self._refused > _REFUSED_S
        return refused or now - self._heard > self.identity.orphan_s

    def _send_heartbeat(self) -> None:
        steps = self._steps[self._sent:self._sent + _MAX_STEPS]
        if self._send(messages.Heartbeat(workers=self._crew.reports(), steps=steps, output=self._output[:200])):
            self._sent += len(steps)
            del self._output[:200]

    def _forget_steps(self, journal: tuple[int, int]) -> None:
        """Steps up to this one are in the controller's journal."""
        def is_new(row: list[Any]) -> bool:
            return (row[1], row[2]) > journal

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
        self._crew.end_all()
        self._keeper.drop()
        self._drop_steps()
        self._outbox, self._job = [], ""

    # ---- the crew ------------------------------------------------------------------------------------------

    async def _run_job(self, message: messages.RunJob) -> None:
        request = self._request(f"/api/jobs/{message.job}/code", request_timeout=60.0)
        response = await AsyncHTTPClient(max_body_size=MAX_CODE_BYTES).fetch(request)
        if message.local_ranks is None:
            self._crew.end_all()
            self._drop_steps()
            self._outbox = []
        self._job, config = message.job, message.spec["config"]
        self._crew.lookout.warn = float(config["health"]["memory_warn"])
        settings = config.get("checkpoint")
        for local_rank in message.local_ranks if message.local_ranks is not None else range(self._crew.size):
            self._crew.end(local_rank)  # before its memory is given to the next one
            slots = self._keeper.open(message.job, local_rank, settings) if settings else []
            self._crew.start(local_rank, message, response.body, slots, self._keeper.busy(message.job, local_rank))

    def worker_said(self, worker: Worker, message: messages.Message) -> None:
        """A worker's word: steps go with a heartbeat, snapshots to the keeper, the rest to the controller at once."""
        if isinstance(message, messages.Steps):
            self._steps += [[worker.local_rank, *row] for row in message.rows]
            watched = self._watch is not None and self._steps[-1][2] >= self._watch
            if worker.urgent or watched:
                self._watch = None if watched else self._watch
                worker.urgent = False
                self._send_heartbeat()
            elif time.monotonic() - self._beaten > _SOON * self._heartbeat_s:
                self._beat()
            return
        if isinstance(message, messages.Snapshot):
            self._keep(worker, message)
            return
        if isinstance(message, messages.Failed):
            worker.reported = True
        elif isinstance(message, messages.Held):
            worker.held = self._link is not None and not message.missed
        worker.urgent = worker.urgent or isinstance(message, messages.Spans)  # the first step of a generation
        if isinstance(message, messages.Finished | messages.Held):
            self._send_heartbeat()  # the steps before it first
        self._pass_on(messages.FromWorker(job=worker.job, run=worker.run, local_rank=worker.local_rank, pid=worker.pid,
                                          body=messages.encode(message)))

    def worker_printed(self, rows: list[list[Any]]) -> None:
        """Output goes with the next heartbeat; while the controller is away, the newest of it is kept."""
        self._output += rows
        del self._output[:-_MAX_OUTPUT_LINES]

    def crew_noted(self, note: messages.Noted) -> None:
        """Something that belongs into the event log."""
        self._pass_on(note)

    def crew_lost(self) -> None:
        """A node without a fork server is no node."""
        self._over.set()

    def _keep(self, worker: Worker, message: messages.Snapshot) -> None:
        """A snapshot is in memory that outlives the worker: note it, and have it written."""
        order = SaveOrder(**message.order)
        self._pass_on(messages.Noted(job=worker.job, event="checkpoint.snapshot", step=order.step,
                                     generation=order.generation,
                                     data={"blocking_s": message.blocking_s, "bytes": order.bytes}))
        loop = asyncio.get_running_loop()

        def tell(news: messages.Message) -> None:
            loop.call_soon_threadsafe(self._on_kept, worker.local_rank, news)

        self._keeper.keep(worker.job, worker.local_rank, message.slot, order, tell)

    def _take_over(self, job: str, table: dict[str, Any]) -> None:
        """A generation begins: the agent of its rank 0, which will commit, fences the earlier ones in storage."""
        if table["seats"][0]["node"] == self.identity.name:
            self._keeper.take_over(job, int(table["generation"]))

    def _on_kept(self, local_rank: int, news: messages.Message) -> None:
        worker = self._crew.workers.get(local_rank)  # perhaps not the one that took the snapshot
        if not isinstance(news, messages.Saved):
            self._pass_on(news)
        elif worker is not None:
            worker.tell(messages.dumps(news))


def _note_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The outer edge: what nobody waits for. That a link closed under a message is noticed where the link is read."""
    error = context.get("exception")
    level = logging.DEBUG if isinstance(error, WebSocketClosedError) else logging.ERROR
    log.log(level, "%s", context["message"], exc_info=error)


def run_agent(identity: NodeIdentity, forkserver: Connection, forkserver_pid: int, pages: list[StatusPage],
              stacks: list[StackFile], lifeline: int | None) -> int:
    """The whole life of a node agent; returns its exit code."""
    asyncio.run(NodeAgent(identity, forkserver, forkserver_pid, pages, stacks, lifeline).run())
    return 0
