"""Nodes as process groups: forked from the warm launcher, each a session of its own with an agent, a fork server
and its workers, and each with its own loopback address.

The methods below are all that a fault may do to a node. Each one tells what it read back from the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ftlab.cluster.cgroups import MemoryCage
from ftlab.cluster.cgroups import available as cgroups_available
from ftlab.cluster.forks import describe_exit, fork
from ftlab.cluster.identity import NodeIdentity
from ftlab.cluster.node import run_node
from ftlab.cluster.nodes import (
    Others,
    kill_worker,
    limit_data,
    spring_trap,
    squeeze_worker,
    tree,
    wait_until,
)
from ftlab.cluster.packets import Cut, available
from ftlab.cluster.private_network import give_up_rights
from ftlab.cluster.slowdown import Slowdown
from ftlab.config import ClusterConfig
from ftlab.errors import FaultUnavailable, UnknownNode

_CUT_REFRESH_S = 0.05


@dataclass
class _Node:
    name: str
    address: str
    pid: int  # of the agent, which leads the node's process group
    status: int | None = None  # wait status once it has ended


class ProcessNodes:
    """Starts, watches and breaks nodes that are process groups."""

    def __init__(self, *, subnet: int, controller: str, token: str, config: ClusterConfig, logs: Path,
                 gate: socket.socket, reap: Callable[[], None], on_exit: Callable[[str, str], None]) -> None:
        self._subnet, self._controller, self._token = subnet, controller, token
        self._config, self._logs, self._gate = config, logs, gate
        self._reap, self._on_exit = reap, on_exit
        self._nodes: dict[str, _Node] = {}
        self._cuts: dict[str, Cut] = {}
        self._slowed: dict[str, Slowdown] = {}
        self._cages: dict[str, MemoryCage] = {}
        self._chores_at = 0.0  # when partitions are looked after again
        self._lifeline, self._lifeline_end = os.pipe()  # closes with the launcher

    # ---- life ----------------------------------------------------------------------------------------------

    def start(self, name: str) -> dict[str, Any]:
        """Fork a new node."""
        address = node_address(self._subnet, int(name.rsplit("-", 1)[1]))
        identity = NodeIdentity(name=name, address=address, controller=self._controller, token=self._token,
                                logs=self._logs)
        pid = fork(lambda: self._run(identity), keep=(self._lifeline,), new_session=True)
        self._nodes[name] = _Node(name, address, pid)
        return {"pid": pid, "address": address}

    def _run(self, identity: NodeIdentity) -> int:
        if self._config.network == "private":
            give_up_rights()  # code of the user's is about to run there
        return run_node(identity, self._config.procs_per_node, self._lifeline)

    def remove(self, name: str) -> dict[str, Any]:
        """End a node for good."""
        node = self._find(name)
        for group in [group for group in self._cuts if not set(self._living(group)) - {name}]:
            self._cuts.pop(group).heal()
        self._slowed.pop(name, None)
        _signal_group(node.pid, signal.SIGKILL)
        self._wait_gone(node)
        return {"removed": name}

    def ended(self, pid: int, status: int) -> None:
        """A child of the launcher has ended: report it if it was a node."""
        for node in self._nodes.values():
            if node.pid == pid and node.status is None:
                node.status = status
                self._on_exit(node.name, describe_exit(status))

    def close(self) -> None:
        """End all nodes."""
        for cut in self._cuts.values():
            cut.heal()
        for node in self._nodes.values():
            if node.status is None:
                _signal_group(node.pid, signal.SIGKILL)
        for node in self._nodes.values():
            self._wait_gone(node)
        for cage in self._cages.values():
            cage.remove()

    def agents(self) -> list[int]:
        """The agents of the nodes that have not ended."""
        return [node.pid for node in self._nodes.values() if node.status is None]

    def pids(self, name: str) -> list[int]:
        """All processes of a node."""
        return tree(self._find(name).pid)

    # ---- faults --------------------------------------------------------------------------------------------

    def kill(self, name: str) -> dict[str, Any]:
        """SIGKILL the whole node."""
        node = self._find(name)
        pids, at = self.pids(name), time.monotonic()
        _signal_group(node.pid, signal.SIGKILL)
        self._wait_gone(node, pids)
        return {"at": at, "pids": pids, "left": [pid for pid in pids if psutil.pid_exists(pid)],
                "status": describe_exit(node.status) if node.status is not None else "still there"}

    def kill_all(self) -> dict[str, Any]:
        """SIGKILL all nodes at once."""
        nodes = [self._find(name) for name in self.names()]
        pids, at = [pid for node in nodes for pid in self.pids(node.name)], time.monotonic()
        for node in nodes:
            _signal_group(node.pid, signal.SIGKILL)
        for node in nodes:
            self._wait_gone(node, pids)
        return {"at": at, "nodes": [node.name for node in nodes], "pids": pids,
                "left": [pid for pid in pids if psutil.pid_exists(pid)], "status": f"{len(nodes)} nodes killed"}

    def hang_all(self) -> dict[str, Any]:
        """SIGSTOP all nodes."""
        at, nodes = time.monotonic(), self.names()
        stopped = [self.hang(name)["status"] for name in nodes]
        return {"at": at, "nodes": nodes, "status": "stopped" if set(stopped) == {"stopped"} else "not all stopped"}

    def crash(self, name: str, pid: int) -> dict[str, Any]:
        """SIGKILL one worker of a node."""
        self._check_worker(name, pid)
        return kill_worker(pid)

    def spring(self, name: str, pid: int, trap: str) -> dict[str, Any]:
        """Spring one of a worker's traps: its training thread blocks, or one of its gradients becomes NaN."""
        self._check_worker(name, pid)
        return spring_trap(pid, trap)

    def squeeze(self, name: str, pid: int, room_mb: int) -> dict[str, Any]:
        """Let a worker take no more than so much memory beyond its least use: a larger allocation fails in it."""
        self._check_worker(name, pid)
        return squeeze_worker(pid, room_mb)

    def cage(self, name: str, pid: int, room_mb: int) -> dict[str, Any]:
        """Give a node a cgroup that may take no more than so much memory from now on: beyond it the kernel kills."""
        self._check_worker(name, pid)
        reason = cgroups_available()
        if reason:
            raise FaultUnavailable(f"the kernel cannot be made to kill for memory here: {reason}",
                                   hint="use faults.oom(way='allocation'), or the Docker backend")
        cage = self._cages.get(name) or MemoryCage(name)
        self._cages[name] = cage
        cage.limit(room_mb << 20)
        pids, at = self.pids(name), time.monotonic()
        held = cage.hold(pids)
        return {"at": at, "pids": pids, "limit_bytes": room_mb << 20, "status": f"{held} processes may take {room_mb} "
                                                                               f"MB more"}

    def make_room(self, name: str) -> dict[str, Any]:
        """Lift the limits of memory that `squeeze` and `cage` have set."""
        at, cage = time.monotonic(), self._cages.pop(name, None)
        if cage is not None:
            cage.remove()
        limit_data(self.pids(name), resource.RLIM_INFINITY)
        return {"at": at, "status": "no limit any more"}

    def slow_down(self, name: str, pid: int, share: float) -> dict[str, Any]:
        """Let a worker run only for a share of the time: SIGSTOP and SIGCONT in turn."""
        self._check_worker(name, pid)
        at = time.monotonic()
        self._slowed[name] = Slowdown(pid, share, at)
        return {"at": at, "pids": [pid], "status": f"runs for {share:.0%} of its time"}

    def speed_up(self, name: str) -> dict[str, Any]:
        """Let it run again."""
        at, slowed = time.monotonic(), self._slowed.pop(name, None)
        if slowed is not None:
            slowed.end()
        return {"at": at, "status": "runs again" if slowed else "was not slowed down"}

    def hang(self, name: str) -> dict[str, Any]:
        """SIGSTOP the whole node."""
        node = self._find(name)
        pids, at = self.pids(name), time.monotonic()
        stopped = wait_until(partial(self._stop, node))
        return {"at": at, "pids": pids, "status": "stopped" if stopped else "not all stopped"}

    def resume(self, name: str) -> dict[str, Any]:
        """SIGCONT the whole node."""
        node, at = self._find(name), time.monotonic()
        _signal_tree(node.pid, signal.SIGCONT)
        return {"at": at, "status": "continued"}

    def cut(self, group: str, way: str, others: Others) -> dict[str, Any]:
        """Drop all packets between some nodes and the rest, both ways or one way only."""
        return {**self._lose(group, group, way, 1.0, others), "status": "cut"}

    def heal(self, group: str) -> dict[str, Any]:
        """Let packets pass again."""
        cut = self._cuts.pop(group, None)
        at = time.monotonic()
        return {"at": at, "sockets": cut.heal() if cut else 0, "status": "healed" if cut else "was not cut"}

    def worsen(self, name: str, loss: float, delay_ms: float, rate_mbit: float, others: Others) -> dict[str, Any]:
        """Lose a share of a node's packets, both ways."""
        if delay_ms or rate_mbit:
            raise FaultUnavailable("links of processes can lose packets, but not be slow or late",
                                   hint="use the Docker backend")
        return {**self._lose(f"{name}:link", name, "", loss, others), "loss": loss, "status": "its link is bad"}

    def mend(self, name: str) -> dict[str, Any]:
        """Make its link as good as it was."""
        return {**self.heal(f"{name}:link"), "status": "its link is good"}

    def fill(self, name: str) -> dict[str, Any]:
        """Processes have no disk of their own."""
        raise FaultUnavailable("nodes that are processes have no disk of their own", hint="use the Docker backend")

    def empty(self, name: str) -> dict[str, Any]:
        """Nothing was filled."""
        return {"at": time.monotonic(), "status": "was not full"}

    def _lose(self, key: str, group: str, way: str, loss: float, others: Others) -> dict[str, Any]:
        reason = available()
        if reason:
            raise FaultUnavailable(f"packets cannot be lost here: {reason}",
                                   hint="use the Docker backend, or the `hang` fault, which is silent too")
        nodes = [self._find(name) for name in group.split(",")]
        cut = self._cuts.setdefault(key, Cut(group, ",".join(node.address for node in nodes), way, loss))
        rest, at = others([node.name for node in nodes]), time.monotonic()
        cut.refresh(self._pids_of(group), rest, self._gate)
        return {"at": at, "sockets": len(cut.sockets), "filtered": cut.verify()}

    def next_chore(self, now: float) -> float | None:
        """How long the launcher may sleep; None: until something happens."""
        due = [slowed.due - now for slowed in self._slowed.values()] + [self._chores_at - now for _ in self._cuts]
        return max(0.0, min(due)) if due else None

    def do_chores(self, now: float, others: Others) -> None:
        """Stop and continue slowed workers in turn, and catch connections opened since a partition began."""
        self._slowed = {name: slowed for name, slowed in self._slowed.items() if slowed.turn(now)}
        if now >= self._chores_at:
            self._chores_at = now + _CUT_REFRESH_S
            for cut in self._cuts.values():
                cut.refresh(self._pids_of(cut.node), others(cut.node.split(",")))

    # ---- helpers -------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The nodes that have not ended."""
        return [node.name for node in self._nodes.values() if node.status is None]

    def _find(self, name: str) -> _Node:
        node = self._nodes.get(name)
        if node is None or node.status is not None:
            raise UnknownNode(f"no node is called {name!r}" if node is None else f"{name} is already gone",
                              seen=f"nodes are {', '.join(self.names()) or 'none'}")
        return node

    def _living(self, group: str) -> list[str]:
        """Those of a group, or of a bad link, that have not ended."""
        return [name for name in group.partition(":")[0].split(",") if name in self.names()]

    def _pids_of(self, group: str) -> list[int]:
        return [pid for name in self._living(group) for pid in self.pids(name)]

    def _check_worker(self, name: str, pid: int) -> None:
        if pid not in self.pids(name):
            raise UnknownNode(f"process {pid} is not a worker of {name}")

    def _stop(self, node: _Node) -> bool:
        """Stop all of a node that is not stopped yet; whether nothing was left to stop."""
        _signal_tree(node.pid, signal.SIGSTOP)
        return all(_state(pid) in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, "gone") for pid in tree(node.pid))

    def _wait_gone(self, node: _Node, pids: Collection[int] = ()) -> None:
        """Until its process group is gone, and all else that was below it, which `reap` ends."""
        def gone() -> bool:
            self._reap()
            return node.status is not None and not _group_exists(node.pid) and not any(map(psutil.pid_exists, pids))
        wait_until(gone)


def node_address(subnet: int, number: int) -> str:
    """A node's own loopback address; macOS has only one. Numbers grow for ever: the next 253 have the next network."""
    more, host = divmod(number, 253)
    return f"127.{more % 256}.{subnet}.{host + 2}" if sys.platform == "linux" else "127.0.0.1"


def _signal_group(pgid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, number)


def _signal_tree(leader: int, number: signal.Signals) -> None:
    """The node's process group at once, then what has left the group but not the node."""
    _signal_group(leader, number)
    for pid in tree(leader):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) != leader:
                os.kill(pid, number)


def _group_exists(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def _state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"
