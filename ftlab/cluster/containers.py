"""Nodes as containers: each with its own address, file system view and memory limit, on the cluster's own network.

The launcher stays on the host and owns them. Creating and removing takes the engine a while, so children of the
launcher do it, and the launcher goes on; the end of a container is seen at once, through a handle on its first process.
Inside there is no capability, no root, no Docker socket, and a root file system that cannot be written.

The methods below are all that a fault may do to a node. Each one tells what it read back from the engine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ftlab.cluster import engine
from ftlab.cluster.bridge import create_bridge, pick_address
from ftlab.cluster.forks import fork
from ftlab.cluster.identity import NodeIdentity, write_identity
from ftlab.cluster.image import ensure_empty
from ftlab.cluster.nodes import (
    Others,
    Receipt,
    kill_worker,
    limit_data,
    moments,
    spring_trap,
    squeeze_worker,
    tree,
    wait_until,
)
from ftlab.cluster.recipe import Recipe
from ftlab.config import ClusterConfig
from ftlab.errors import ClusterError, FaultError, FaultUnavailable, FtlabError, UnknownNode
from ftlab.health.memory import OomCount, find_cgroup

log = logging.getLogger(__name__)
_KEEP_S = 1.0  # a container that has ended stays so long, for whoever wants to read its state
_LOOK_S = 0.2  # between two looks at a node whose memory is limited
_PERIOD_US, _LEAST_QUOTA_US = 50_000, 1_000  # of the CPU quota
_LEAST_USE_S = 1.0  # a few steps, also long ones: memory that a step takes and gives back must not count
_LOWER_S = 3.0  # how long a smaller memory limit is tried
_CPU_LOOK_S = 0.5  # how long a worker's use of the CPU is measured before it is cut down
_START_LIMIT_S = 30.0  # for the engine to start one container
Say = Callable[..., None]


@dataclass
class _Node:
    name: str
    address: str
    container: str = ""  # its id, once it is started
    pid: int = 0  # of its first process, as this machine sees it
    handle: int = -1  # on that process: readable when it has ended
    ended_at: float | None = None
    how: str = ""
    cut: bool = False
    oom: OomCount | None = None  # while its memory is limited by a fault
    ooms: int = 0  # kills that were told


@dataclass
class _Child:
    """A child of the launcher that talks to the engine for it."""

    node: str
    answer: int  # the reading end of a pipe
    starting: bool


class ContainerNodes:
    """Starts, watches and breaks nodes that are containers; `say` takes news for the controller."""

    def __init__(self, *, cluster: str, folder: Path, config: ClusterConfig, token: str, reap: Callable[[], None],
                 watch: Callable[[int, Callable[[], None]], None], unwatch: Callable[[int], None], say: Say) -> None:
        self._cluster, self._folder, self._config, self._token = cluster, folder, config, token
        self._reap, self._watch, self._unwatch, self._say = reap, watch, unwatch, say
        self._nodes: dict[str, _Node] = {}
        self._children: dict[int, _Child] = {}
        self._client = engine.connect()
        self._closed = False
        self._controller = ""

    def open(self) -> str:
        """Remove what earlier clusters left, make the image and the network; the address at which nodes find the
        host."""
        _remove_leftovers(self._client)
        total = int(self._client.info()["MemTotal"])
        check_memory(self._config, total)
        labels = engine.labels(self._cluster, self._folder)
        image = self._config.image or ensure_empty(self._client)
        self._subnet = create_bridge(self._client, self._cluster, labels, seed=int(self._cluster[-4:], 16))
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
        node = _Node(name, pick_address(self._subnet, int(name.rsplit("-", 1)[1]), used))
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
        """Remove all containers and the network; may be called twice."""
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

    def pids(self, name: str) -> list[int]:
        """All processes of a node, as this machine sees them."""
        node = self._find(name)
        return tree(node.pid)

    # ---- faults --------------------------------------------------------------------------------------------

    def kill(self, name: str) -> Receipt:
        """Have the engine kill a container."""
        node = self._find(name)
        pids, at = tree(node.pid), time.monotonic()
        self._kill([node])
        state = self._state(node)
        return {"at": at, "pids": pids, "left": [pid for pid in pids if psutil.pid_exists(pid)],
                "status": _ending(state), **_engine_says(state)}

    def kill_all(self) -> Receipt:
        """Have the engine kill all containers at once."""
        nodes = [self._find(name) for name in self.names()]
        pids, at = [pid for node in nodes for pid in tree(node.pid)], time.monotonic()
        self._kill(nodes)
        states = [self._state(node) for node in nodes]
        killed = sum(not state.get("Running", False) for state in states)
        return {"at": at, "nodes": [node.name for node in nodes], "pids": pids,
                "left": [pid for pid in pids if psutil.pid_exists(pid)], "status": f"{killed} nodes killed"}

    def hang(self, name: str) -> Receipt:
        """Pause a container: all its processes stand still."""
        node, at = self._find(name), time.monotonic()
        self._ask("pause", self._client.pause, node.container)
        state = self._state(node)
        return {"at": at, "pids": tree(node.pid), "status": "stopped" if state.get("Paused") else "not all stopped",
                **_engine_says(state)}

    def hang_all(self) -> Receipt:
        """Pause all containers."""
        nodes, at = [self._find(name) for name in self.names()], time.monotonic()
        engine.together([partial(self._client.pause, node.container) for node in nodes])
        paused = all(self._state(node).get("Paused") for node in nodes)
        return {"at": at, "nodes": [node.name for node in nodes], "status": "stopped" if paused else "not all stopped"}

    def resume(self, name: str) -> Receipt:
        """Let a container go on."""
        node, at = self._find(name), time.monotonic()
        self._ask("go on", self._client.unpause, node.container)
        return {"at": at, "status": "continued", **_engine_says(self._state(node))}

    def cut(self, name: str, others: Others) -> Receipt:
        """Take a container off the network; its connections go silent."""
        node, at = self._find(name), time.monotonic()
        if not node.cut:
            self._ask("leave its network", self._client.disconnect_container_from_network, node.container,
                      self._cluster, force=True)
            node.cut = True
        on = self._networks(node)
        return {"at": at, "networks": on, "status": "cut" if self._cluster not in on else "not cut"}

    def heal(self, name: str) -> Receipt:
        """Put it back, at its old address: TCP sends again what was lost."""
        node, at = self._find(name), time.monotonic()
        if not node.cut:
            return {"at": at, "status": "was not cut"}
        self._ask("join its network", self._client.connect_container_to_network, node.container, self._cluster,
                  ipv4_address=node.address)
        node.cut = False
        on = self._networks(node)
        return {"at": at, "networks": on, "status": "healed" if self._cluster in on else "still cut"}

    def crash(self, name: str, pid: int) -> Receipt:
        """SIGKILL one worker of a node."""
        return kill_worker(self._on_host(name, pid))

    def spring(self, name: str, pid: int, trap: str) -> Receipt:
        """Spring one of a worker's traps: its training thread blocks, or one of its gradients becomes NaN."""
        return spring_trap(self._on_host(name, pid), trap)

    def squeeze(self, name: str, pid: int, room_mb: int) -> Receipt:
        """Let a worker take no more than so much memory beyond its least use: a larger allocation fails in it."""
        node = self._find(name)
        return squeeze_worker(self._on_host(name, pid), room_mb, partial(self._limit_data, node))

    def cage(self, name: str, pid: int, room_mb: int) -> Receipt:
        """Lower a container's memory limit to so much above its least use: beyond it the kernel kills."""
        node = self._find(name)
        self._on_host(name, pid)
        least = min(self._memory_use(node) for _ in moments(_LEAST_USE_S))
        limit = least + (room_mb << 20)
        node.oom = OomCount.of(node.pid)
        node.ooms = node.oom.read() or 0
        at = self._lower_memory(node, limit)
        held = self._client.inspect_container(node.container)["HostConfig"]["Memory"]
        return {"at": at, "pids": tree(node.pid), "limit_bytes": held, "used_bytes": least,
                "status": f"the container may take {room_mb} MB more"}

    def make_room(self, name: str) -> Receipt:
        """Lift the limits of memory that `squeeze` and `cage` have set."""
        node, at = self._find(name), time.monotonic()
        self._look_at_memory(node)
        kills = node.ooms
        if node.oom is not None:
            node.oom = None
            limit = self._recipe.memory_bytes
            self._ask("take more memory", self._client.update_container, node.container, mem_limit=limit,
                      memswap_limit=limit)
        self._limit_data(node, tree(node.pid), resource.RLIM_INFINITY)
        return {"at": at, "oom_kills": kills, "status": "no limit any more", **_engine_says(self._state(node))}

    def slow_down(self, name: str, pid: int, share: float) -> Receipt:
        """Give a container only a share of the CPU time that its worker takes now."""
        node, worker = self._find(name), self._on_host(name, pid)
        cores = _cores_used(worker, _CPU_LOOK_S)
        quota = max(_LEAST_QUOTA_US, round(share * cores * _PERIOD_US))
        at = time.monotonic()
        self._set_quota(node, _PERIOD_US, quota)
        held = self._client.inspect_container(node.container)["HostConfig"]
        return {"at": at, "pids": [worker], "used_cores": round(cores, 3), "quota_us": held["CpuQuota"],
                "period_us": held["CpuPeriod"], "status": f"gets {quota / _PERIOD_US:.1%} of a core"}

    def speed_up(self, name: str) -> Receipt:
        """Let it have its CPU time again."""
        node, at = self._find(name), time.monotonic()
        self._set_quota(node, self._recipe.period_us, self._recipe.quota_us)
        held = self._client.inspect_container(node.container)["HostConfig"]
        return {"at": at, "quota_us": held["CpuQuota"], "status": "runs again"}

    # ---- chores --------------------------------------------------------------------------------------------

    def next_chore(self, now: float) -> float | None:
        """How long the launcher may sleep; None: until something happens."""
        due = [node.ended_at + _KEEP_S - now for node in self._nodes.values()
               if node.ended_at is not None and node.container]
        due += [_LOOK_S for node in self._nodes.values() if node.oom is not None and node.ended_at is None]
        return max(0.0, min(due)) if due else None

    def do_chores(self, now: float, others: Others) -> None:
        """Remove containers that have ended, and see whether the kernel has killed for memory."""
        for node in list(self._nodes.values()):
            if node.ended_at is not None and node.container and now >= node.ended_at + _KEEP_S:
                self._tell_end(node)
                self._sweep(node)
            elif node.ended_at is None:
                self._look_at_memory(node)

    def _look_at_memory(self, node: _Node) -> None:
        kills = node.oom.read() if node.oom is not None else None
        if kills is not None and kills > node.ooms:
            node.ooms = kills
            self._say(oom=node.name, kills=kills, engine=_engine_says(self._state(node)))

    def _tell_end(self, node: _Node) -> None:
        state = self._state(node)
        log.info("%s: %s%s", node.name, _ending(state), self._last_words(node))
        self._say(removed=node.name, engine=_engine_says(state))

    # ---- helpers -------------------------------------------------------------------------------------------

    def _delegate(self, name: str, starting: bool, work: Callable[[Any], dict[str, Any]]) -> None:
        """Have a child do something with the engine, and go on."""
        reading, writing = os.pipe()
        pid = fork(lambda: _child_main(work, writing), keep=(writing,))
        os.close(writing)
        self._children[pid] = _Child(name, reading, starting)

    def _hold(self, node: _Node) -> None:
        """See the end of a container as soon as it comes."""
        try:
            node.handle = os.pidfd_open(node.pid)
        except OSError:
            self._bury(node, _ending(self._state(node)))
            return
        self._watch(node.handle, lambda: self._bury(node, "its container ended"))

    def _bury(self, node: _Node, how: str) -> None:
        if node.ended_at is not None:
            return
        node.ended_at, node.how = time.monotonic(), how
        if node.handle >= 0:
            self._unwatch(node.handle)
            os.close(node.handle)
            node.handle = -1
        self._say(exited=node.name, how=how)

    def _sweep(self, node: _Node) -> None:
        """Have the engine forget a container."""
        if not node.container:
            return  # still being started: it is swept when it is there
        container, node.container = node.container, ""
        self._nodes.pop(node.name, None)
        things = engine.Owned(self._cluster, self._folder, [container])
        self._delegate(node.name, False, lambda client: engine.remove(client, things))
        with contextlib.suppress(OSError):
            (self._folder / "nodes" / f"{node.name}.json").unlink()

    def _kill(self, nodes: list[_Node]) -> None:
        """Kill containers, and report each one's end when its processes are gone, not when the engine knows."""
        def seen(node: _Node) -> bool:
            if node.ended_at is None and select.select([node.handle], [], [], 0)[0]:
                self._bury(node, "killed by SIGKILL")
            return node.ended_at is not None

        with ThreadPoolExecutor(max_workers=min(16, max(1, len(nodes)))) as pool:  # gone before the launcher forks
            asked = [pool.submit(self._client.kill, node.container, "SIGKILL") for node in nodes]
            wait_until(lambda: all([seen(node) for node in nodes]) or all(each.done() for each in asked), 10.0)
        problems = [error for each in asked if (error := each.exception())]
        if problems and any(node.ended_at is None for node in nodes):
            raise FaultError(f"the engine could not kill: {problems[0]}")

    def _find(self, name: str) -> _Node:
        node = self._nodes.get(name)
        if node is not None and node.ended_at is None and not node.pid:
            self._await_start(node)
        if node is None or node.ended_at is not None:
            raise UnknownNode(f"no node is called {name!r}" if node is None else f"{name} is already gone",
                              seen=f"nodes are {', '.join(self.names()) or 'none'}")
        return node

    def _await_start(self, node: _Node) -> None:
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
            if _inner_pid(each) == pid:
                return each
        raise UnknownNode(f"process {pid} is not a worker of {name}")

    def _state(self, node: _Node) -> dict[str, Any]:
        try:
            return dict(self._client.inspect_container(node.container)["State"])
        except Exception:  # removed meanwhile
            return {}

    def _last_words(self, node: _Node) -> str:
        """What a container said at the end, if it was not killed."""
        with contextlib.suppress(Exception):  # removed meanwhile
            said = self._client.logs(node.container, tail=4).decode(errors="replace").strip()
            return f"; it said: {said}" if said else ""
        return ""

    def _networks(self, node: _Node) -> list[str]:
        return sorted(self._client.inspect_container(node.container)["NetworkSettings"]["Networks"])

    def _memory_use(self, node: _Node) -> int:
        """Bytes that a container holds and the kernel could not take back."""
        group = find_cgroup("memory", node.pid)
        if group is None:
            raise FaultUnavailable("the memory of a container cannot be read here")
        stat = dict(line.split() for line in (group.path / "memory.stat").read_text().splitlines())
        name = "memory.usage_in_bytes" if group.version == 1 else "memory.current"
        cache = int(stat["inactive_file"]) + int(stat["active_file"])
        return max(0, int((group.path / name).read_text()) - cache)

    def _lower_memory(self, node: _Node, limit: int) -> float:
        """Set a smaller memory limit; when it began to hold. The kernel refuses one that is below the use of this very
        moment, so it is tried again until a step has given back what it took."""
        deadline = time.monotonic() + _LOWER_S
        while True:
            at = time.monotonic()
            try:
                self._ask("take less memory", self._client.update_container, node.container, mem_limit=limit,
                          memswap_limit=limit)
                return at
            except FaultError as error:
                if "unable to set memory limit" not in error.message or at > deadline:
                    raise

    def _limit_data(self, node: _Node, pids: Iterable[int], size: int) -> None:
        """Set RLIMIT_DATA from here, or, where that needs a right we lack, from inside, as the same user."""
        found = list(pids)
        try:
            limit_data(found, size)
            return
        except PermissionError:
            inner = [_inner_pid(pid) for pid in found]
        script = (f"import resource as r\nfor pid in {inner}:\n try: r.prlimit(pid, r.RLIMIT_DATA, ({size}, -1))\n"
                  f" except ProcessLookupError: pass")
        job = self._client.exec_create(node.container, [self._recipe.command[0], "-S", "-c", script])["Id"]
        said = self._client.exec_start(job)
        if self._client.exec_inspect(job)["ExitCode"]:
            raise FaultUnavailable(f"the memory of {node.name}'s worker cannot be limited", seen=said.decode()[-300:])

    def _set_quota(self, node: _Node, period_us: int, quota_us: int) -> None:
        self._ask("change its share of the CPU", self._client.update_container, node.container, cpu_period=period_us,
                  cpu_quota=quota_us)

    def _ask(self, what: str, do: Callable[..., Any], *args: Any, **options: Any) -> None:
        from docker.errors import APIError

        try:
            do(*args, **options)
        except APIError as error:
            raise FaultError(f"the engine cannot have the container {what}: {error.explanation or error}") from None


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
        if not launcher_lives(things.cluster, things.folder):
            log.info("removing what %s left in the engine", things.cluster)
            engine.remove(client, things)


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


def _engine_says(state: dict[str, Any]) -> dict[str, Any]:
    names = {"Status": "engine_status", "ExitCode": "exit_code", "OOMKilled": "oom_killed", "Paused": "paused"}
    return {ours: state[theirs] for theirs, ours in names.items() if theirs in state}


def _ending(state: dict[str, Any]) -> str:
    if not state or state.get("Running"):
        return "still there" if state else "gone"
    if state.get("OOMKilled"):
        return f"exited with code {state['ExitCode']}, out of memory"
    return "killed by SIGKILL" if state["ExitCode"] == 137 else f"exited with code {state['ExitCode']}"


def _inner_pid(pid: int) -> int:
    """The pid of a process in its own container."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1])
    return 0


def _cores_used(pid: int, seconds: float) -> float:
    """How much of a core a process takes."""
    def used() -> float:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)

    before = used()
    time.sleep(seconds)
    return max(0.0, used() - before) / seconds
