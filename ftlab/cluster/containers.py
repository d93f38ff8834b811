"""Nodes as containers: each with its own address, file system view and memory limit, on the cluster's own network.

The launcher stays on the host and owns them. Creating and removing takes the engine a while, so children of the
launcher do it, and the launcher goes on; the end of a container is seen at once, through a handle on its first process.
Inside there is no capability, no root, no Docker socket, and a root file system that cannot be written.

This file is about their lives; `container_faults.py` is about what breaks them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftlab.cluster import engine
from ftlab.cluster.bridge import create_bridge, pick_address
from ftlab.cluster.container import Container, ending, engine_says, inner_pid, last_words, state_of
from ftlab.cluster.forks import fork
from ftlab.cluster.identity import NodeIdentity, write_identity
from ftlab.cluster.image import choose_image
from ftlab.cluster.nodes import Others, Receipt, tree, wait_until
from ftlab.cluster.recipe import Recipe
from ftlab.config import ClusterConfig
from ftlab.errors import ClusterError, FaultUnavailable, FtlabError, UnknownNode

log = logging.getLogger(__name__)
_KEEP_S = 1.0  # a container that has ended stays so long, for whoever wants to read its state
_START_LIMIT_S = 30.0  # for the engine to start one container
Say = Callable[..., None]


@dataclass
class _Child:
    """A child of the launcher that talks to the engine for it."""

    node: str
    answer: int  # the reading end of a pipe
    starting: bool


class Containers:
    """Starts, watches and ends nodes that are containers; `say` takes news for the controller."""

    def __init__(self, *, cluster: str, folder: Path, config: ClusterConfig, token: str, reap: Callable[[], None],
                 watch: Callable[[int, Callable[[], None]], None], unwatch: Callable[[int], None], say: Say) -> None:
        self._cluster, self._folder, self._config, self._token = cluster, folder, config, token
        self._reap, self._watch, self._unwatch, self._say = reap, watch, unwatch, say
        self._nodes: dict[str, Container] = {}
        self._children: dict[int, _Child] = {}
        self._client = engine.connect()
        self._closed = False
        self._controller = ""

    def open(self) -> str:
        """Remove what earlier clusters left, make the image, the network and the disk; the address at which nodes find
        the host."""
        _remove_leftovers(self._client)
        total = int(self._client.info()["MemTotal"])
        check_memory(self._config, total)
        labels = engine.labels(self._cluster, self._folder)
        image = choose_image(self._client, self._config.image)
        self._subnet = create_bridge(self._client, self._cluster, labels, seed=int(self._cluster[-4:], 16))
        if self._config.disk_mb:
            engine.create_disk(self._client, self._cluster, labels, self._config.disk_mb)
        self._recipe = Recipe.of(self._config, image=image, network=self._cluster, labels=labels, folder=self._folder,
                                 machine_bytes=total)
        return str(self._subnet[1])

    def join_at(self, controller: str) -> None:
        """Where nodes find the controller; said before the first one is started."""
        self._controller = controller

    # ---- life ----------------------------------------------------------------------------------------------

    def start(self, name: str) -> Receipt:
        """Have a child create and start a container."""
        used = {node.address for node in self._nodes.values()}
        node = Container(name, pick_address(self._subnet, int(name.rsplit("-", 1)[1]), used))
        orphan_s = max(self._config.lease_s, self._config.reclaim_s) + 5.0
        identity = NodeIdentity(name=name, address=node.address, controller=self._controller, token=self._token,
                                logs=self._recipe.logs, orphan_s=orphan_s)
        card = self._folder / "nodes" / f"{name}.json"
        card.parent.mkdir(mode=0o700, exist_ok=True)
        write_identity(card, identity, self._config.procs_per_node, self._recipe.user)
        self._nodes[name] = node
        full_name = f"{self._cluster}-{name}"
        self._delegate(name, True, lambda client: self._recipe.start(client, full_name, node.address, card))
        return {"address": node.address}

    def remove(self, name: str) -> Receipt:
        """End a node for good."""
        node = self._find(name)
        self._bury(node, "removed")
        self._sweep(node)
        return {"removed": name}

    def ended(self, pid: int, status: int) -> None:
        """A child has ended: a container is up, or it could not be started, or one is removed."""
        child = self._children.pop(pid, None)
        if child is None:
            return
        with os.fdopen(child.answer, "rb") as pipe:
            raw = pipe.read()
        node = self._nodes.get(child.node)
        if not child.starting or node is None or self._closed:
            return
        answer: dict[str, Any] = json.loads(raw) if raw else {"failed": "the engine's client died"}
        if "failed" in answer:
            log.warning("%s could not be started: %s", child.node, answer["failed"])
            self._bury(node, f"its container could not be started: {answer['failed']}")
            return
        node.container, node.pid = answer["id"], answer["pid"]
        self._say(created=node.name, create_s=answer["create_s"], start_s=answer["start_s"])
        if node.ended_at is not None:  # removed while it was being started
            self._sweep(node)
        else:
            self._hold(node)

    def close(self) -> None:
        """Remove all containers, the network and the disk; may be called twice."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + 5.0
        while self._children and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.005)
        for things in engine.owned(self._client, self._cluster):
            engine.remove(self._client, things)
        self._client.close()

    def names(self) -> list[str]:
        """The nodes that have not ended."""
        return [node.name for node in self._nodes.values() if node.ended_at is None]

    def agents(self) -> list[int]:
        """None: an agent is a child of its container's first process."""
        return []

    def pids(self, name: str) -> list[int]:
        """All processes of a node, as this machine sees them."""
        node = self._find(name)
        return tree(node.pid)

    # ---- chores --------------------------------------------------------------------------------------------

    def next_chore(self, now: float) -> float | None:
        """How long the launcher may sleep; None: until something happens."""
        due = [node.ended_at + _KEEP_S - now for node in self._nodes.values()
               if node.ended_at is not None and node.container]
        return max(0.0, min(due)) if due else None

    def do_chores(self, now: float, others: Others) -> None:
        """Remove containers that have ended."""
        for node in list(self._nodes.values()):
            if node.ended_at is not None and node.container and now >= node.ended_at + _KEEP_S:
                self._tell_end(node)
                self._sweep(node)

    def _tell_end(self, node: Container) -> None:
        state = self._state(node)
        log.info("%s: %s%s", node.name, ending(state), last_words(self._client, node.container))
        self._say(removed=node.name, engine=engine_says(state))

    # ---- helpers -------------------------------------------------------------------------------------------

    def _delegate(self, name: str, starting: bool, work: Callable[[Any], dict[str, Any]]) -> None:
        """Have a child do something with the engine, and go on."""
        reading, writing = os.pipe()
        pid = fork(lambda: _child_main(work, writing), keep=(writing,))
        os.close(writing)
        self._children[pid] = _Child(name, reading, starting)

    def _hold(self, node: Container) -> None:
        """See the end of a container as soon as it comes."""
        try:
            node.handle = os.pidfd_open(node.pid)
        except OSError:
            self._bury(node, ending(self._state(node)))
            return
        self._watch(node.handle, lambda: self._bury(node, "its container ended"))

    def _bury(self, node: Container, how: str) -> None:
        if node.ended_at is not None:
            return
        node.ended_at, node.how = time.monotonic(), how
        if node.handle >= 0:
            self._unwatch(node.handle)
            os.close(node.handle)
            node.handle = -1
        self._say(exited=node.name, how=how)

    def _sweep(self, node: Container) -> None:
        """Have the engine forget a container."""
        if not node.container:
            return  # still being started: it is swept when it is there
        container, node.container = node.container, ""
        self._nodes.pop(node.name, None)
        things = engine.Owned(self._cluster, self._folder, [container])
        self._delegate(node.name, False, lambda client: engine.remove(client, things))
        with contextlib.suppress(OSError):
            (self._folder / "nodes" / f"{node.name}.json").unlink()

    def _find(self, name: str) -> Container:
        node = self._nodes.get(name)
        if node is not None and node.ended_at is None and not node.pid:
            self._await_start(node)
        if node is None or node.ended_at is not None:
            raise UnknownNode(f"no node is called {name!r}" if node is None else f"{name} is already gone",
                              seen=f"nodes are {', '.join(self.names()) or 'none'}")
        return node

    def _await_start(self, node: Container) -> None:
        def settled() -> bool:
            self._reap()
            return bool(node.pid) or node.ended_at is not None
        if not wait_until(settled, _START_LIMIT_S):
            raise UnknownNode(f"{node.name} is still being started")

    def _on_host(self, name: str, pid: int) -> int:
        """A worker's pid on this machine, from the one it has inside its container."""
        node = self._find(name)
        if not os.path.isdir(f"/proc/{node.pid}"):
            raise FaultUnavailable("processes inside the containers cannot be seen from here",
                                   hint="run the engine on this machine, not in a virtual one")
        for each in tree(node.pid):
            if inner_pid(each) == pid:
                return each
        raise UnknownNode(f"process {pid} is not a worker of {name}")

    def _state(self, node: Container) -> dict[str, Any]:
        return state_of(self._client, node.container)


def check_memory(config: ClusterConfig, machine_bytes: int) -> None:
    """Raise ClusterError if the machine has less memory than all nodes may take."""
    wanted = (config.nodes + config.spares) * (config.memory_mb or 0) << 20
    if wanted > machine_bytes:
        raise ClusterError(f"{config.nodes + config.spares} nodes with {config.memory_mb} MB each need "
                           f"{wanted >> 20} MB, and the engine has {machine_bytes >> 20} MB",
                           hint="fewer nodes, or a smaller memory_mb")


def _remove_leftovers(client: Any) -> None:
    from ftlab.cluster.runs import launcher_lives

    for things in engine.owned(client):
        if is_a_cluster(things) and not launcher_lives(things.cluster, things.folder):
            log.info("removing what %s left in the engine", things.cluster)
            engine.remove(client, things)


def is_a_cluster(things: engine.Owned) -> bool:
    """Whether things with our labels are a cluster's: its folder bears its name. Others with these labels have no
    launcher that could be looked for, and may be in use."""
    return things.folder.name == things.cluster


def _child_main(work: Callable[[Any], dict[str, Any]], writing: int) -> int:
    try:
        with contextlib.closing(engine.connect()) as client:
            answer = work(client)
    except FtlabError as error:
        answer = {"failed": error.message}
    except Exception as error:  # the outer edge of a process
        answer = {"failed": str(getattr(error, "explanation", "") or error)[:500]}
    os.write(writing, json.dumps(answer).encode())
    return 1 if "failed" in answer else 0
