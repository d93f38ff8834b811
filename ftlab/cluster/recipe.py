"""How a container of a cluster is made: what it sees, what it may take, and as whom it runs."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ftlab.cluster.image import EMPTY, environment_binds, outermost
from ftlab.config import DISK, ClusterConfig, quiet_environment
from ftlab.errors import ClusterError

NOBODY = 65534  # as whom containers run when their owner is root
IDENTITY = "/run/ftlab/node.json"
_PIDS = 256  # processes and threads, for each worker and once more for the node
_PERIOD_US = 100_000
_START = ("import gc, sys; gc.disable()\n"  # imports make no garbage, and collecting none takes a quarter of their time
          "from ftlab.cluster.node import main; sys.exit(main())")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All containers of a cluster are made by one recipe."""

    image: str
    network: str
    labels: dict[str, str]
    user: int
    logs: Path
    command: list[str]
    environment: dict[str, str]
    seen: list[str]  # folders of the host, read-only
    shared: list[str]  # folders of the host that can be written
    memory_bytes: int
    period_us: int
    quota_us: int  # -1: all that there is
    pids: int
    gpus: int
    disk: str  # a volume that all of them share, at DISK; empty: none

    @classmethod
    def of(cls, config: ClusterConfig, *, image: str, network: str, labels: dict[str, str], folder: Path,
           machine_bytes: int) -> Self:
        """The recipe for a cluster; raises ClusterError if a shared folder cannot be used."""
        user, logs = node_user(), folder / "logs"
        if user != os.getuid():
            os.chown(logs, user, -1)
        shared = outermost([str(logs), *config.share])
        for each in config.share:
            check_writable(each, user)
        own = image == EMPTY  # way (a): this very environment
        python = sys.executable if own else "python3"
        limit = config.memory_mb << 20 if config.memory_mb else machine_bytes
        return cls(image=image, network=network, labels=labels, user=user, logs=logs, shared=shared,
                   command=[python, "-c", _START, IDENTITY],
                   environment=_environment(network, folder, own), seen=environment_binds() if own else [],
                   memory_bytes=limit, period_us=_PERIOD_US,
                   quota_us=round(config.cpus * _PERIOD_US) if config.cpus else -1,
                   pids=_PIDS * (config.procs_per_node + 1), gpus=config.gpus or 0,
                   disk=network if config.disk_mb else "")

    def start(self, client: Any, name: str, address: str, identity: Path) -> dict[str, Any]:
        """Create and start one container: its id, the pid of its first process, and how long each took."""
        begin = time.monotonic()
        network = client.create_networking_config({self.network: client.create_endpoint_config(ipv4_address=address)})
        made = client.create_container(
            self.image, self.command, name=name, hostname=name, user=f"{self.user}:{os.getgid() or NOBODY}",
            labels=self.labels, environment=self.environment, working_dir="/", networking_config=network,
            host_config=self._host_config(client, identity))["Id"]
        created = time.monotonic()
        try:
            client.start(made)
        except Exception:
            client.remove_container(made, force=True)
            raise
        started = time.monotonic()
        return {"id": made, "pid": int(client.inspect_container(made)["State"]["Pid"]),
                "create_s": round(created - begin, 4), "start_s": round(started - created, 4)}

    def _host_config(self, client: Any, identity: Path) -> Any:
        from docker.types import DeviceRequest

        binds = {each: {"bind": each, "mode": "ro"} for each in self.seen}
        binds |= {each: {"bind": each, "mode": "rw"} for each in self.shared}
        if self.disk:
            binds[self.disk] = {"bind": DISK, "mode": "rw"}
        binds[str(identity)] = {"bind": IDENTITY, "mode": "ro"}
        asked = [DeviceRequest(count=self.gpus, capabilities=[["gpu"]])] if self.gpus else None
        return client.create_host_config(
            binds=binds, network_mode=self.network, read_only=True, cap_drop=["ALL"],
            security_opt=["no-new-privileges"], tmpfs={"/tmp": "size=1g,mode=1777"},
            shm_size=max(64 << 20, self.memory_bytes // 2), mem_limit=self.memory_bytes,
            memswap_limit=self.memory_bytes, cpu_period=self.period_us, cpu_quota=self.quota_us, pids_limit=self.pids,
            device_requests=asked)


def node_user() -> int:
    """As whom containers run: as their owner, whose files they then can use; never as root."""
    return os.getuid() or NOBODY


def check_writable(folder: str, user: int) -> None:
    """Raise ClusterError if containers could not write to a shared folder."""
    if not os.path.isdir(folder):
        raise ClusterError(f"{folder} cannot be shared with the nodes: there is no such folder",
                           hint=f"mkdir -p {folder}")
    found = os.stat(folder)
    if found.st_uid != user and not found.st_mode & 0o002:
        raise ClusterError(f"nodes run as user {user}, who cannot write to {folder}", hint=f"chown {user} {folder}")


def _environment(cluster: str, folder: Path, own: bool) -> dict[str, str]:
    here = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return {**quiet_environment(cluster, folder), **(here if own else {}), "HOME": "/tmp", "USER": "ftlab",
            "PYTHONDONTWRITEBYTECODE": "1"}
