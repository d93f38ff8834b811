"""A whole cluster in one thread: the real controller over nodes that behave as agents and workers do.

Nodes obey what they are told, train together while all of a generation are there, leave when a peer is gone, keep what
the journal does not have yet, and find a controller that comes back. The controller can be killed at any event of its
journal (before it is written, or after) and at any moment; what it had sent by then arrives, or is lost with it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ftlab import messages
from ftlab.events import Event
from ftlab.messages import Message, Place
from ftlab.policy import decide
from ftlab.recovery.job import Job
from ftlab.recovery.restore import restore
from ftlab.recovery.watch import TICK_S
from tests.unit.recovery.harness import Node, TimedLog, World

_TRAINING = (Place.OUTSIDE, Place.COMPUTING)


class Killed(BaseException):
    """The controller ends here."""


class LiveNode(Node):
    """An agent with its workers: one each, which holds the state of a step once it has trained."""

    def __init__(self, world: Simulation, name: str) -> None:
        super().__init__(world, name)
        self.sim = world
        self.read, self.linked, self.comes_back = 0, False, 0.0
        self.held = -1  # the step whose state its worker holds
        self.ended = 0  # the newest generation that is over, by the controller's word
        self.rows: list[list[Any]] = []  # steps that are not in the journal yet
        self.told = 0  # of them, on this link
        self.outbox: list[Message] = []
        self.given_up: list[int] = []  # the steps it held when it was told to begin anew
        self.heard = 0.0
        self.join: messages.Join | None = None

    def say(self, message: Message) -> None:
        """A worker's word: now, or when there is a link."""
        if self.linked and self.sim.up:
            self.worker_says(message)
        else:
            self.outbox.append(message)

    def connect(self) -> None:
        """Find the controller, and tell it what it missed."""
        self.read, self.sent = 0, []
        self.hello()
        self.linked, self.told = True, 0
        waiting, self.outbox = self.outbox, []
        for message in waiting:
            if self.places:
                self.worker_says(message)

    def report(self) -> None:
        """One heartbeat, with the steps that were not told yet."""
        new, self.told = self.rows[self.told:], len(self.rows)
        self.beat(new)

    def obey(self) -> None:
        """Do what it was told since the last time."""
        while self.linked and self.read < len(self.sent):
            message = self.sent[self.read]
            self.read, self.heard = self.read + 1, self.sim.clock.now
            self._obey(messages.decode(message.body) if isinstance(message, messages.ToWorkers) else message)

    def _obey(self, message: Message) -> None:
        match message:
            case messages.Welcome() if message.fresh:
                self.begin_anew()
            case messages.Ack():
                done = (message.generation, message.step)
                self.told = sum((row[1], row[2]) > done for row in self.rows[:self.told])
                self.rows = [row for row in self.rows if (row[1], row[2]) > done]
            case messages.RunJob():
                self.begin_anew()
                self.parks()
            case messages.EndJob():
                self.places, self.held = {}, -1
            case messages.Terminate():
                self.ended = max(self.ended, message.generation)
                self.leave("generation ended")
            case messages.Join():
                self.join = message

    def begin_anew(self) -> None:
        if self.held >= 0:
            self.given_up.append(self.held)
        self.places, self.held, self.rows, self.told, self.ended, self.join = {}, -1, [], 0, 0, None

    def leave(self, reason: str) -> None:
        """Stop training if that generation is over, or a peer is gone; nobody comes back to a group it left."""
        for local, progress in self.places.items():
            if progress["generation"] and progress["place"] in (*_TRAINING, Place.FINISHED):
                self._move(local, place=Place.RECOVERING)
                self.ended = max(self.ended, progress["generation"])
                self.say(messages.Stopped(generation=progress["generation"], step=progress["step"],
                                          at=self.sim.clock.now, reason=reason))

    def take_seat(self) -> None:
        """A worker that waits comes for its newest seat."""
        progress = self.places.get(0)
        if progress is None or self.join is None or progress["place"] in _TRAINING:
            return
        generation = self.join.table["generation"]
        if generation > max(progress["generation"], self.ended):
            self.takes_seats_of(self.join.table)

    def takes_seats_of(self, table: dict[str, Any]) -> None:
        rank = next(seat["rank"] for seat in table["seats"] if seat["node"] == self.name)
        self._move(0, generation=table["generation"], rank=rank, place=Place.RECOVERING)

    @property
    def generation(self) -> int:
        return self.places[0]["generation"] if self.places else 0


class KillableLog(TimedLog):
    """A journal at one event of which the controller is killed."""

    def __init__(self, sim: Simulation, path: Path) -> None:
        super().__init__(sim.clock, path)
        self.sim = sim

    def record(self, kind: str, **fields: Any) -> Event:
        if self.sim.kill_at == (len(self.events) + 1, "before"):
            raise Killed
        event = super().record(kind, **fields)
        if self.sim.kill_at == (event.seq, "after"):
            raise Killed
        return event


class Simulation(World):
    """Controllers, one after the other, and the nodes that outlive them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, *, seed: int = 0, **config: Any) -> None:
        self.kill_at: tuple[int, str] | None = None
        super().__init__(monkeypatch, **config)
        self.monkeypatch, self.path, self.lots = monkeypatch, path, random.Random(seed)
        self.loses_what_was_sent, self.back_at, self.late_s = False, 0.0, 0.0
        self.beaten = self.clock.now
        self._begin_controller()

    def _begin_controller(self) -> None:
        """A controller on the journal that there is."""
        config = {**self.config.to_dict()}
        old, job = self.nodes, self.job
        kill_at = self.kill_at
        World.__init__(self, self.monkeypatch, clock=self.clock, **config)
        self.kill_at, self.nodes, self.job = kill_at, old, job
        self.log = KillableLog(self, self.path)
        self.controller = type(self.controller)(self.config, self.log, self.provider, lambda: ("127.0.0.1", 1),
                                                self._later)
        restore(self.controller, lambda job: decide)
        self.job = self.controller.job or self.job
        self.up = True

    def start_job(self, steps: int, **config: Any) -> Job:
        for number in range(self.config.nodes + self.config.spares):
            self.add(f"node-{number}")
        job = self.submit(**config)
        self.run_until(lambda: self.committed >= steps, 10.0)
        return job

    def add(self, name: str) -> LiveNode:
        node = LiveNode(self, name)
        self.nodes[name] = node
        node.connect()
        return node

    # ---- faults

    def kill_node(self, name: str) -> None:
        """A node ends; its launcher tells whoever is the controller."""
        node = self.nodes.pop(name)
        assert isinstance(node, LiveNode)
        if self.up:
            self.attempt(lambda: self.controller.node_exited(name, "killed by SIGKILL"))

    def kill_controller(self, away: float, late_s: float) -> None:
        """The controller ends; the next one is there after a time, and nodes find it up to `late_s` later."""
        self.log.close()
        self.up, self.kill_at, self.waiting = False, None, []
        self.back_at, self.late_s = self.clock.now + away, late_s
        for node in self.live():
            node.linked = False
            if not self.loses_what_was_sent:
                node.linked = True
                node.obey()
                node.linked = False
            node.comes_back = self.back_at + self.lots.uniform(0.0, late_s)

    # ---- time

    def live(self) -> list[LiveNode]:
        return [node for node in self.nodes.values() if isinstance(node, LiveNode)]

    @property
    def committed(self) -> int:
        """The steps that are in the journal."""
        return max((event.step or 0 for event in self.log.events if event.kind == "step.committed"), default=0)

    def run_until(self, condition: Any, limit: float) -> None:
        """Let time pass until something is so; it must be within the limit."""
        end = self.clock.now + limit
        while not condition():
            job = self.controller.job
            assert self.clock.now < end, (f"not within {limit} s", job and job.to_dict(), self.log.events[-8:])
            assert job is None or not job.over or job.status == "finished", (job.error, self.log.events[-12:])
            self.turn()

    def turn(self) -> None:
        """One tick of everybody."""
        self.clock.now += TICK_S
        if not self.up and self.clock.now >= self.back_at:
            self._begin_controller()
            for name in [name for name in self.controller.roster.nodes if name not in self.nodes]:
                self.attempt(lambda name=name: self.controller.node_exited(name, "ended meanwhile"))
        for name in self.provider.started:
            if name not in self.nodes and self.up:
                self.attempt(lambda name=name: self.add(name))
        for node in self.live():
            if self.up and not node.linked and self.clock.now >= node.comes_back:
                self.attempt(node.connect)
            self.attempt(node.obey)
        self._train()
        if self.clock.now - self.beaten >= 0.25:
            self.beaten = self.clock.now
            for node in self.live():
                view = self.controller.roster.get(node.name)
                if self.up and node.linked and view is not None and view.link == node.link:
                    self.attempt(node.report)
                elif self.up and node.linked:
                    node.linked, node.comes_back = False, self.clock.now
        if self.up:
            self.attempt(self.run_due)
        if self.up:
            self.attempt(self.controller.tick)

    def attempt(self, do: Any) -> None:
        """Something that the controller may die of."""
        try:
            do()
        except Killed:
            self.kill_controller(away=self.lots.choice([0.1, 0.3, 1.0]), late_s=self.late_s)

    def _train(self) -> None:
        """Those of a generation who are all there restore the newest step, and then commit one step more."""
        seats: dict[int, list[LiveNode]] = {}
        for node in self.live():
            self.attempt(node.take_seat)
        for node in self.live():
            if node.generation:
                seats.setdefault(node.generation, []).append(node)
        for generation, nodes in seats.items():
            world = len(next(node.join for node in nodes if node.join).table["seats"]) if nodes[0].join else -1
            here = [node for node in nodes if node.generation > node.ended]
            if len(here) < world or any(node.join is None or node.join.table["generation"] != generation
                                        for node in here):
                for node in nodes:
                    self.attempt(lambda node=node: node.leave("a peer is gone"))
                continue
            newest = max(node.held for node in here)
            assert newest >= 0 or self.committed == 0, "nobody holds the state any more"
            for node in here:
                node.held = max(0, newest) + (node.places[0]["place"] in _TRAINING)
                if node.places[0]["place"] in _TRAINING:
                    node.rows.append(node.record(node.held))
                else:
                    node._move(0, place=Place.OUTSIDE, step=node.held)
