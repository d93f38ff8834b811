"""A controller without sockets and without waiting: a clock that is moved by hand, nodes that only take notes.

`World.pass_time` is the only thing that makes time pass: it ticks the controller as its server would, lets every node
that is not silent send its heartbeat, and runs what the controller asked to be called later.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftlab import messages
from ftlab.config import ClusterConfig, JobConfig
from ftlab.events import Event, EventLog
from ftlab.messages import Message, Place
from ftlab.recovery import controller as controller_module
from ftlab.recovery import hearing, restore, roster
from ftlab.recovery.controller import Controller
from ftlab.recovery.job import RESTORING, RUNNING, Job
from ftlab.recovery.watch import TICK_S

STORE = ("127.0.0.1", 29500)


class Clock:
    """The time, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class TimedLog(EventLog):
    """An event log whose events carry the fake clock's time."""

    def __init__(self, clock: Clock, path: Path | None = None) -> None:
        super().__init__(path)
        self.clock = clock

    def record(self, kind: str, **fields: Any) -> Event:
        return super().record(kind, **{"at": self.clock.now, **fields})


class Provider:
    """Takes note of the nodes that were asked for and given up."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.removed: list[str] = []

    def start_node(self, name: str) -> None:
        self.started.append(name)

    def remove_node(self, name: str) -> None:
        self.removed.append(name)


class Node:
    """One node's agent and its workers, as far as the controller can see them."""

    def __init__(self, world: World, name: str, instance: str = "") -> None:
        self.world, self.name, self.instance = world, name, instance or f"{name}-first"
        self.pid = 100 + int(name.rsplit("-", 1)[-1])
        self.sent: list[Message] = []  # by the controller
        self.dropped = ""  # why the controller closed the link
        self.pids = {local: 1000 + 10 * self.pid + local for local in range(world.config.procs_per_node)}
        self.places: dict[int, dict[str, Any]] = {}
        self.ordered: dict[int, str] = {}  # the runs it was last told to start
        self.runs: dict[int, str] = {}  # the runs its workers say they belong to

    # ---- what the controller does to it

    def link(self, message: Message) -> None:
        self.sent.append(message)
        if isinstance(message, messages.RunJob):
            for local in self.pids if message.local_ranks is None else message.local_ranks:
                self.ordered[local] = message.run

    def drop(self, reason: str) -> None:
        self.dropped = reason

    def words(self) -> list[str]:
        """The kinds of the messages it got, those for its workers by the kind of their body; no heartbeat answers."""
        return [message.body["kind"] if isinstance(message, messages.ToWorkers) else type(message).__name__
                for message in self.sent if not isinstance(message, messages.Ack)]

    def last(self, kind: type[Message]) -> Any:
        """The newest message of a kind; a worker's message is taken out of its wrapper."""
        for message in reversed(self.sent):
            inner = messages.decode(message.body) if isinstance(message, messages.ToWorkers) else message
            if isinstance(inner, kind):
                return inner
        raise AssertionError(f"{self.name} got no {kind.__name__}: {self.words()}")

    # ---- what it does

    def hello(self) -> None:
        job = self.world.job.id if self.places and self.world.job else ""
        self.world.controller.node_hello(
            messages.Hello(node=self.name, address=self.address, pid=self.pid, instance=self.instance, job=job,
                           workers=self._progress()), self.link, self.drop)

    @property
    def address(self) -> str:
        return f"127.0.1.{1 + int(self.name.rsplit('-', 1)[-1])}"

    def beat(self, steps: list[list[Any]] | None = None) -> None:
        self._say(messages.Heartbeat(workers=self._progress(), steps=steps or []))

    def parks(self) -> None:
        for local in self.pids:
            self.runs[local] = self.ordered[local]
            self._move(local, place=Place.PARKED)
            self.worker_says(messages.Parked(seconds=0.1), local)

    def takes_seats(self) -> None:
        """Do what the newest Join says."""
        table = self.last(messages.Join).table
        for seat in table["seats"]:
            if seat["node"] == self.name:
                self._move(seat["local_rank"], generation=table["generation"], rank=seat["rank"],
                           place=Place.RECOVERING)

    def stops(self) -> None:
        for local, progress in self.places.items():
            self._move(local, place=Place.RECOVERING)
            self.worker_says(messages.Stopped(generation=progress["generation"], step=progress["step"],
                                              at=self.world.clock.now, reason="told to"), local)

    def commits(self, step: int, **more: Any) -> None:
        """All its workers commit a step, and it tells so with its next heartbeat."""
        self.beat([self.record(step, local, **more) for local in self.pids])

    def record(self, step: int, local: int = 0, **more: Any) -> list[Any]:
        """The record of one step of a worker."""
        self._move(local, step=step, place=Place.OUTSIDE)
        done = messages.StepDone(self.places[local]["generation"], step, self.world.clock.now, values={"loss": 1.0},
                                 digest=7)
        return [local, *done._replace(**more)]

    def is_at(self, place: Place, local: int = 0) -> None:
        self._move(local, place=place)

    def fails(self, detail: str = "ValueError: no", *, cause: str = "crash", local: int = 0, **more: Any) -> None:
        self.worker_says(messages.Failed(cause=cause, detail=detail, **more), local)
        self.places.pop(local, None)

    def restarts_worker(self, local: int = 0) -> None:
        """Start the worker again, with another pid, and let it park."""
        self.pids[local] += 1
        self.runs[local] = self.ordered[local]
        self._move(local, place=Place.PARKED, generation=0, step=0, rank=-1)
        self.worker_says(messages.Parked(seconds=0.1), local)

    def notes(self, event: str, step: int, generation: int) -> None:
        """Its agent tells of a save."""
        assert self.world.job is not None
        self._say(messages.Noted(job=self.world.job.id, event=event, step=step, generation=generation,
                                 data={"seconds": 0.1, "bytes": 1}))

    def finishes(self, digest: str = "d" * 8) -> None:
        for local, progress in list(self.places.items()):
            self._move(local, place=Place.FINISHED)
            self.worker_says(messages.Finished(generation=progress["generation"], step=progress["step"], digest=digest,
                                               result="r"), local)

    def worker_says(self, message: Message, local: int = 0) -> None:
        assert self.world.job is not None
        self._say(messages.FromWorker(job=self.world.job.id, run=self.runs[local], local_rank=local,
                                      pid=self.pids[local], body=messages.encode(message)))

    def _say(self, message: Message) -> None:
        self.world.controller.node_said(self.name, messages.loads(messages.dumps(message)))

    def _move(self, local: int, **facts: Any) -> None:
        old = self.places.get(local, {"generation": 0, "rank": -1, "step": 0, "committed_at": 0.0})
        self.places[local] = {**old, "since": self.world.clock.now, **facts}

    def _progress(self) -> list[dict[str, Any]]:
        job = self.world.job.id if self.world.job else ""
        return [{**progress, "place": int(progress["place"]), "local_rank": local, "pid": self.pids[local],
                 "run": self.runs[local], "job": job}
                for local, progress in self.places.items()]


class World:
    """A controller and its nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, path: Path | None = None, clock: Clock | None = None,
                 **config: Any) -> None:
        self.config = ClusterConfig(**{"nodes": 2, "spares": 1, "replenish": False, **config})
        self.clock = clock or Clock()
        fake = SimpleNamespace(monotonic=self.clock.monotonic)
        for module in (controller_module, hearing, restore, roster):
            monkeypatch.setattr(module, "time", fake)
        self.provider, self.log = Provider(), TimedLog(self.clock, path)
        self.waiting: list[tuple[float, Callable[[], None]]] = []
        self.controller = Controller(self.config, self.log, self.provider, lambda: STORE, self._later)
        self.nodes: dict[str, Node] = {}
        self.job: Job | None = None
        self.silent: set[str] = set()

    def _later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.waiting.append((self.clock.now + seconds, callback))

    # ---- set-up

    def join(self, *names: str) -> None:
        """These nodes come up and say hello."""
        for name in names:
            self.nodes[name] = Node(self, name)
            self.nodes[name].hello()

    def submit(self, policy: Any = None, **config: Any) -> Job:
        job = Job(id="0123456789ab", name="train", config=JobConfig(**config), wanted=self.config.nodes, path=[])
        if policy is not None:
            job.policy = policy
        self.job = job
        self.controller.submit(job)
        return job

    def start(self, steps: int = 1, policy: Any = None, **config: Any) -> Job:
        """All nodes come up and the job has committed some steps."""
        self.join(*(f"node-{number}" for number in range(self.config.nodes + self.config.spares)))
        job = self.submit(policy, **config)
        for node in self.nodes.values():
            node.parks()
        assert job.status == RESTORING
        self.seat()
        for step in range(1, steps + 1):
            self.commit(step)
        if steps:
            assert job.status == RUNNING
        return job

    # ---- what happens

    def members(self) -> list[Node]:
        """The nodes with a seat, in rank order."""
        assert self.job is not None and self.job.table is not None
        return [self.nodes[name] for name in self.job.table.nodes]

    def seat(self) -> None:
        """The members do what the newest Join says."""
        for node in self.members():
            node.takes_seats()

    def commit(self, step: int, **more: Any) -> None:
        """All members commit a step."""
        for node in self.members():
            node.commits(step, **more)

    def pass_time(self, seconds: float) -> None:
        """Tick, beat and call back, in small steps; nodes in `silent` say nothing."""
        end = self.clock.now + seconds
        beaten = self.clock.now
        while self.clock.now < end - 1e-9:
            self.clock.now += TICK_S
            if self.clock.now - beaten >= self.config.heartbeat_s - 1e-9:
                beaten = self.clock.now
                self.beat()
            self.run_due()
            self.controller.tick()

    def beat(self) -> None:
        """Everybody who is not silent and still has a link says that it lives."""
        for name, node in self.nodes.items():
            view = self.controller.roster.get(name)
            if name not in self.silent and view is not None and view.link == node.link:
                node.beat()

    def run_due(self) -> None:
        """Run the callbacks whose time has come."""
        due = [callback for at, callback in self.waiting if at <= self.clock.now]
        self.waiting = [(at, callback) for at, callback in self.waiting if at > self.clock.now]
        for callback in due:
            callback()

    def decide(self) -> None:
        """Let the controller's short wait for more failures be over."""
        self.pass_time(TICK_S)

    # ---- what is seen

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.log.events if event.kind == kind]

    def tables(self) -> list[list[str]]:
        """The nodes of every generation, in rank order."""
        return [[seat["node"] for seat in event.data["table"]["seats"]] for event in self.events("membership.changed")]

    def verdict(self, name: str) -> str:
        node = self.controller.roster.get(name)
        return str(node.verdict) if node else "gone"
