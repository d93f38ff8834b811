"""What a fault may do to nodes that are containers: each method tells what it read back from the engine or kernel."""

from __future__ import annotations

import resource
import select
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil

from ftlab.cluster import engine
from ftlab.cluster.container import Container, ask, cores_used, ending, engine_says, networks_of
from ftlab.cluster.container_disk import empty_disk, fill_disk
from ftlab.cluster.container_links import let_pass, lose_packets, restore_link, spoil_link
from ftlab.cluster.container_memory import limit_worker_data, lower_memory, memory_use, set_memory
from ftlab.cluster.containers import Containers
from ftlab.cluster.nodes import Others, Receipt, kill_worker, least_use, spring_trap, squeeze_worker, tree, wait_until
from ftlab.errors import FaultError
from ftlab.health.memory import OomCount

_LOOK_S = 0.2  # between two looks at a node whose memory is limited
_PERIOD_US, _LEAST_QUOTA_US = 50_000, 1_000  # of the CPU quota
_LEAST_USE_S = 1.0  # a few steps, also long ones
_CPU_LOOK_S = 0.5  # how long a worker's use of the CPU is measured before it is cut down


class ContainerNodes(Containers):
    """Containers that can be broken: all that the launcher needs of nodes."""

    def kill(self, name: str) -> Receipt:
        """Have the engine kill a container."""
        node = self._find(name)
        pids, at = tree(node.pid), time.monotonic()
        self._kill([node])
        state = self._state(node)
        return {"at": at, "pids": pids, "left": [pid for pid in pids if psutil.pid_exists(pid)],
                "status": ending(state), **engine_says(state)}

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
        ask("pause", self._client.pause, node.container)
        state = self._state(node)
        return {"at": at, "pids": tree(node.pid), "status": "stopped" if state.get("Paused") else "not all stopped",
                **engine_says(state)}

    def hang_all(self) -> Receipt:
        """Pause all containers."""
        nodes, at = [self._find(name) for name in self.names()], time.monotonic()
        engine.together([partial(self._client.pause, node.container) for node in nodes])
        paused = all(self._state(node).get("Paused") for node in nodes)
        return {"at": at, "nodes": [node.name for node in nodes], "status": "stopped" if paused else "not all stopped"}

    def resume(self, name: str) -> Receipt:
        """Let a container go on."""
        node, at = self._find(name), time.monotonic()
        ask("go on", self._client.unpause, node.container)
        return {"at": at, "status": "continued", **engine_says(self._state(node))}

    def cut(self, group: str, way: str, others: Others) -> Receipt:
        """Take one container off the network, or lose the packets between some containers and the rest by rules of the
        kernel; connections go silent."""
        nodes, at = [self._find(name) for name in group.split(",")], time.monotonic()
        if len(nodes) > 1 or way:
            return {"at": at, **lose_packets(nodes, way), "status": "cut"}
        [node] = nodes
        if not node.cut:
            ask("leave its network", self._client.disconnect_container_from_network, node.container,
                self._cluster, force=True)
            node.cut = True
        on = networks_of(self._client, node.container)
        return {"at": at, "networks": on, "status": "cut" if self._cluster not in on else "not cut"}

    def heal(self, group: str) -> Receipt:
        """Let packets pass again, at the old addresses: TCP sends again what was lost."""
        nodes, at = self._living(group), time.monotonic()
        if any(node.rules for node in nodes):
            return {"at": at, **let_pass(nodes), "status": "healed"}
        if not nodes[0].cut:
            return {"at": at, "status": "was not cut"}
        [node] = nodes
        ask("join its network", self._client.connect_container_to_network, node.container, self._cluster,
            ipv4_address=node.address)
        node.cut = False
        on = networks_of(self._client, node.container)
        return {"at": at, "networks": on, "status": "healed" if self._cluster in on else "still cut"}

    def worsen(self, name: str, loss: float, delay_ms: float, rate_mbit: float, others: Others) -> Receipt:
        """Lose a share of a container's packets, both ways, and slow down or delay what it sends."""
        node, at = self._find(name), time.monotonic()
        return {"at": at, **spoil_link(node, loss, delay_ms, rate_mbit), "status": "its link is bad"}

    def mend(self, name: str) -> Receipt:
        """Make its link as good as it was."""
        node, at = self._find(name), time.monotonic()
        return {"at": at, **restore_link(node), "status": "its link is good"}

    def fill(self, name: str) -> Receipt:
        """Fill the disk that a container saves to, to the last byte."""
        node, at = self._find(name), time.monotonic()
        return {"at": at, **fill_disk(self._client, node, self._recipe.command[0])}

    def empty(self, name: str) -> Receipt:
        """Give the room on the disk back."""
        node, at = self._find(name), time.monotonic()
        return {"at": at, **empty_disk(self._client, node, self._recipe.command[0])}

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
        least = least_use(lambda: memory_use(node), _LEAST_USE_S)
        limit = least + (room_mb << 20)
        node.oom = OomCount.of(node.pid)
        node.ooms = node.oom.read() or 0
        at = lower_memory(self._client, node, limit)
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
            set_memory(self._client, node, self._recipe.memory_bytes)
        self._limit_data(node, tree(node.pid), resource.RLIM_INFINITY)
        return {"at": at, "oom_kills": kills, "status": "no limit any more", **engine_says(self._state(node))}

    def slow_down(self, name: str, pid: int, share: float) -> Receipt:
        """Give a container only a share of the CPU time that its worker takes now."""
        node, worker = self._find(name), self._on_host(name, pid)
        cores = cores_used(worker, _CPU_LOOK_S)
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
        looks = [_LOOK_S for node in self._nodes.values() if node.oom is not None and node.ended_at is None]
        return min((each for each in (super().next_chore(now), *looks) if each is not None), default=None)

    def do_chores(self, now: float, others: Others) -> None:
        """Remove containers that have ended, and see whether the kernel has killed for memory."""
        super().do_chores(now, others)
        for node in self._nodes.values():
            if node.ended_at is None:
                self._look_at_memory(node)

    def _look_at_memory(self, node: Container) -> None:
        kills = node.oom.read() if node.oom is not None else None
        if kills is not None and kills > node.ooms:
            node.ooms = kills
            self._say(oom=node.name, kills=kills, engine=engine_says(self._state(node)))

    # ---- helpers -------------------------------------------------------------------------------------------

    def _kill(self, nodes: list[Container]) -> None:
        """Kill containers, and report each one's end when its processes are gone, not when the engine knows."""
        def seen(node: Container) -> bool:
            if node.ended_at is None and select.select([node.handle], [], [], 0)[0]:
                self._bury(node, "killed by SIGKILL")
            return node.ended_at is not None

        with ThreadPoolExecutor(max_workers=min(16, max(1, len(nodes)))) as pool:  # gone before the launcher forks
            asked = [pool.submit(self._client.kill, node.container, "SIGKILL") for node in nodes]
            wait_until(lambda: all([seen(node) for node in nodes]) or all(each.done() for each in asked), 10.0)
        problems = [error for each in asked if (error := each.exception())]
        if problems and any(node.ended_at is None for node in nodes):
            raise FaultError(f"the engine could not kill: {problems[0]}")

    def _living(self, group: str) -> list[Container]:
        """Those of a group that have not ended; raises UnknownNode if nobody is left."""
        names = group.split(",")
        return [self._find(name) for name in names if name in self.names()] or [self._find(names[0])]

    def _limit_data(self, node: Container, pids: Iterable[int], size: int) -> None:
        limit_worker_data(self._client, node, self._recipe.command[0], pids, size)

    def _set_quota(self, node: Container, period_us: int, quota_us: int) -> None:
        ask("change its share of the CPU", self._client.update_container, node.container, cpu_period=period_us,
            cpu_quota=quota_us)
