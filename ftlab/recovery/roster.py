"""The roster: which nodes there are, what is held of them, and how they come and go.

A node is let in by Hello. It is DEAD when whoever started it saw it end, or when it has been silent for too long; from
then on it is fenced: its link is closed, and when it comes back it must start over as a new node.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

from ftlab import messages
from ftlab.config import ClusterConfig
from ftlab.events import EventLog
from ftlab.health.detector import PhiConfig, PhiDetector
from ftlab.health.heartbeat import FixedTimeout
from ftlab.health.own import MakeOwn, OwnDetector
from ftlab.membership import RankTable, Verdict
from ftlab.recovery.views import NodeView

_ACK_S = 1.0  # often enough for a lease (a quarter of a short one), and to let nodes forget what is written down
OnDeath = Callable[[NodeView, str, float, float], None]  # node, reason, time of the evidence, time of the verdict


class Provider(Protocol):
    """Where nodes come from."""

    def start_node(self, name: str) -> None:
        """Ask for a new node; it will say hello."""

    def remove_node(self, name: str) -> None:
        """Get rid of a node for good."""


class Roster:
    """All nodes of a cluster."""

    def __init__(self, config: ClusterConfig, log: EventLog, provider: Provider,
                 later: Callable[[float, Callable[[], None]], Any], on_death: OnDeath,
                 own_detector: MakeOwn | None = None) -> None:
        self.config, self.log, self.provider, self.later, self.on_death = config, log, provider, later, on_death
        self.nodes: dict[str, NodeView] = {}
        self.detector = FixedTimeout(suspect_s=config.suspect_s, dead_s=config.dead_s)
        self._phi = PhiConfig(first_s=config.heartbeat_s, pause_s=config.suspect_s - config.heartbeat_s)
        self._own = own_detector
        self._next_number = 0

    def get(self, name: str) -> NodeView | None:
        """A node by its name."""
        return self.nodes.get(name)

    def alive(self) -> list[NodeView]:
        """The nodes that can be counted on, in the order of their numbers."""
        return sorted((node for node in self.nodes.values() if node.alive), key=lambda node: node.number)

    def next_members(self, wanted: int) -> list[str]:
        """Who gets the seats of a job that starts now."""
        return [node.name for node in self.alive()[:wanted]]

    def status(self, table: RankTable | None, chosen: Collection[str]) -> list[dict[str, Any]]:
        """All nodes for the status page; `chosen` have seats, or would get them."""
        return [node.to_dict(table.ranks_of(node.name) if table else (), node.name in chosen)
                for node in sorted(self.nodes.values(), key=lambda each: each.number)]

    def seated(self, plan: list[str]) -> list[NodeView]:
        """The planned nodes that can be counted on, in the order of the plan."""
        return [node for name in plan if (node := self.nodes.get(name)) is not None and node.alive]

    def expect(self, name: str) -> NodeView:
        """A node that was asked for and has not said hello yet."""
        now = time.monotonic()
        node = self.nodes[name] = NodeView(name, started=now, heard=now)
        self._next_number = max(self._next_number, node.number + 1)
        return node

    def start(self) -> str:
        """Ask for a new node; its name."""
        name = f"node-{self._next_number}"
        self.expect(name)
        self.log.record("node.requested", source=name)
        self.provider.start_node(name)
        return name

    def hello(self, hello: messages.Hello, link: Callable[[messages.Message], None],
              drop_link: Callable[[str], None], generation: int) -> tuple[NodeView, bool] | str:
        """Let a node in: its view, and whether it is new here; or why it is refused."""
        node = self.nodes.get(hello.node) or self.expect(hello.node)
        if node.alive and node.instance != hello.instance:
            if node.link is not None:
                return f"{hello.node} is already linked by another process"
            self._bury(node, "another process came under its name", evidence=node.heard)
        returning = node.instance == hello.instance
        fresh = not returning or node.verdict == Verdict.DEAD
        if returning and fresh:
            self.log.record("node.fenced", source=node.name, generation=generation,
                            reason="it was declared dead: it starts over as a new node",
                            refused=[worker for worker in hello.workers if worker.get("generation")])
        node.address, node.pid, node.instance = hello.address, hello.pid, hello.instance
        node.replica_port = hello.replica_port
        node.link, node.drop_link, node.verdict = link, drop_link, Verdict.ALIVE
        node.heard = node.spoke = time.monotonic()
        node.rhythm = self._rhythm(node.name)
        node.job = "" if fresh else hello.job
        if fresh:
            node.workers, node.born = {}, generation
        node.take_progress(hello.workers, adopt=not fresh)
        node.send(messages.Welcome(fresh=fresh, heartbeat_s=self.config.heartbeat_s, lease_s=self.config.lease_s))
        return node, fresh

    def _rhythm(self, name: str) -> PhiDetector | OwnDetector | None:
        """What learns the rhythm of a node's heartbeats; None where fixed times are enough."""
        if self._own is not None:
            return OwnDetector(self._own, self.detector, lambda problem: self._own_failed(name, problem))
        return PhiDetector(self._phi) if self.config.detector == "phi" else None

    def _own_failed(self, name: str, problem: str) -> None:
        self.log.record("detector.failed", source=name, reason=problem)

    def pair(self, nodes: list[NodeView]) -> None:
        """Tell every node who keeps replicas of its snapshots: the next one."""
        for node, buddy in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            alone = buddy is node or not buddy.replica_port
            node.send(messages.Buddy() if alone else messages.Buddy(address=buddy.address, port=buddy.replica_port))

    def heard(self, name: str) -> NodeView | None:
        """A node said something: it lives; None if it was given up, whatever it says."""
        node = self.nodes.get(name)
        if node is None or node.verdict == Verdict.DEAD:
            return None
        node.heard = node.spoke = time.monotonic()
        if node.verdict == Verdict.SUSPECT:
            node.verdict = Verdict.ALIVE
        return node

    def beat(self, node: NodeView, generation: int, step: int) -> None:
        """What a node said was a heartbeat; now and then it is told so, and up to which step the journal has come."""
        if node.rhythm is not None:
            node.rhythm.heard(node.heard)
        if node.heard - node.acked >= min(_ACK_S, self.config.lease_s / 4):
            node.acked = node.heard
            node.send(messages.Ack(generation=generation, step=step))

    def unlinked(self, name: str, link: object) -> None:
        """A node's link closed: it may be gone, or only the link; silence will tell."""
        node = self.nodes.get(name)
        if node is not None and node.link == link:
            node.link = node.drop_link = None

    def exited(self, name: str, how: str) -> None:
        """Whoever started a node saw it end."""
        node = self.nodes.get(name)
        if node is None:
            return
        if node.verdict != Verdict.DEAD:
            self._bury(node, how, evidence=node.heard or node.started)
        self.nodes.pop(name, None)

    def judge(self, now: float, late: float, awaited: Collection[str] = ()) -> None:
        """Look at everybody's silence; `late` is how much longer than planned nobody looked. Those who are `awaited`
        are not given up before their lease has run out.

        While most nodes are silent at once, the machine or the network is the likelier cause, and nobody is given up
        before `crowd_s`: a cluster that buries all its nodes for a moment of load has lost its state.
        """
        silent: list[tuple[NodeView, float]] = []
        for node in list(self.nodes.values()):
            node.heard = max(node.heard, min(now, node.heard + late))  # which may be a grace that ends later
            node.started += late
            if node.joined and node.verdict != Verdict.DEAD:
                silent.append((node, now - node.heard))
            elif node.verdict != Verdict.DEAD and now - node.started > self.config.start_timeout_s:
                self._bury(node, f"did not come up in {self.config.start_timeout_s:g} s", evidence=node.started)
        verdicts = [self._verdict(node, silence) for node, silence in silent]
        dead = verdicts.count(Verdict.DEAD)
        patience = min(self.config.crowd_s, self.config.lease_s) if dead > 1 and 2 * dead > len(verdicts) else 0.0
        for (node, silence), verdict in zip(silent, verdicts, strict=True):
            limit = self.config.lease_s if node.name in awaited else patience
            doubtful = verdict == Verdict.DEAD and silence < limit
            self._pass_verdict(node, Verdict.SUSPECT if doubtful else verdict, silence)

    def next_verdict(self) -> float:
        """When the first node will be suspected, or given up, unless it is heard; at any time where rhythm counts."""
        limits = {Verdict.ALIVE: self.config.suspect_s, Verdict.SUSPECT: self.config.dead_s}
        return min((0.0 if node.rhythm else node.heard + limits[node.verdict]
                    for node in self.nodes.values() if node.alive), default=math.inf)

    def _verdict(self, node: NodeView, silence: float) -> Verdict:
        return node.rhythm.judge_silence(silence) if node.rhythm else self.detector.judge(silence)

    def _pass_verdict(self, node: NodeView, verdict: Verdict, silence: float) -> None:
        if verdict == Verdict.DEAD:
            self._bury(node, f"no heartbeat for {silence:.2f} s", evidence=node.heard)
        elif verdict == Verdict.SUSPECT and node.verdict == Verdict.ALIVE:
            node.verdict = verdict
            self.log.record("node.suspected", source=node.name, reason=f"no heartbeat for {silence:.2f} s")

    def _bury(self, node: NodeView, reason: str, evidence: float) -> None:
        """The verdict DEAD: close the link and fence the node."""
        node.verdict = Verdict.DEAD
        if node.drop_link:
            node.drop_link(f"declared dead: {reason}")
        node.link = node.drop_link = None
        node.workers, node.job = {}, ""
        event = self.log.record("node.died", source=node.name, verdict=str(Verdict.DEAD), reason=reason, cause="node",
                                evidence=evidence, address=node.address)
        self.reclaim_later(node)
        self.on_death(node, reason, evidence, event.at)

    def reclaim_later(self, node: NodeView) -> None:
        """Have a dead node removed, unless it comes back before."""
        self.later(self.config.reclaim_s, lambda: self._reclaim(node))

    def _reclaim(self, node: NodeView) -> None:
        if self.nodes.get(node.name) is node and node.verdict == Verdict.DEAD:
            self.nodes.pop(node.name)
            self.log.record("node.reclaimed", source=node.name)
            self.provider.remove_node(node.name)
