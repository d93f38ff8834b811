"""A controller or a node that no launcher starts: for compose, or whatever else owns the containers.

    python -m ftlab.cluster.serve controller
    python -m ftlab.cluster.serve node

Settings come from the environment (see ServeConfig). Nodes join under a name made of their address; the first
FTLAB_NODES train, the others are spares. The controller starts and removes no nodes: a lost one is replaced by a spare,
or the job shrinks to its `min_nodes`, and grows again when the owner has started the container anew. Faults are the
owner's as well (`docker kill`). A controller that dies is started again on its journal; one whose whole container is
restarted finds it too.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import signal
import socket
import sys
from ipaddress import IPv4Address
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from ftlab.cluster.identity import NodeIdentity
from ftlab.config import QUIET, ClusterConfig, ServeConfig
from ftlab.errors import ConfigError, FtlabError

log = logging.getLogger(__name__)
_LEASE_S = 30.0  # of the nodes: a container that is restarted takes longer than a process
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def main() -> int:
    """Entry point of a container that somebody else owns."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    roles = {"controller": serve_controller, "node": serve_node}
    try:
        if len(sys.argv) != 2 or sys.argv[1] not in roles:
            raise ConfigError("say what to be: controller or node", seen=" ".join(sys.argv[1:]))
        settings = ServeConfig.from_environment()
        os.environ.update(QUIET)  # before torch is imported
        return roles[sys.argv[1]](settings)
    except FtlabError as error:
        log.error("%s", error)
        return 2


def serve_node(settings: ServeConfig) -> int:
    """Be a node until the container is stopped."""
    gc.disable()  # imports make no garbage, and collecting none takes a quarter of their time
    from ftlab.cluster.node import run_first

    address = own_address()
    identity = NodeIdentity(name=node_name(address), address=address, controller=settings.controller,
                            token=settings.token)
    log.info("%s joins %s", identity.name, identity.controller)
    return run_first(identity, settings.procs_per_node)


def serve_controller(settings: ServeConfig) -> int:
    """Be the controller until the container is stopped."""
    from ftlab.cluster.control import run_controller  # without torch: a restarted controller must be back soon
    from ftlab.cluster.forks import describe_exit, fork

    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))  # else process 1 ignores it
    config = cluster_config(settings)
    folder = own_folder(Path(settings.state), socket.gethostname())
    gate = socket.create_server((own_address(), settings.port), backlog=512)
    gate.setblocking(False)
    while True:
        mine, theirs = Pipe()
        pid = fork(lambda: run_controller(config, settings.token, folder, [gate], theirs, launched=False),  # noqa: B023
                   keep=(gate.fileno(), theirs.fileno()), new_session=True)
        theirs.close()
        log.info("the controller listens at %s:%d", *gate.getsockname())
        if _attend(mine):
            return 0
        log.warning("the controller %s", describe_exit(os.waitpid(pid, 0)[1]))


def cluster_config(settings: ServeConfig) -> ClusterConfig:
    """How a controller behaves that cannot start nodes itself."""
    return ClusterConfig(nodes=settings.nodes, spares=0, procs_per_node=settings.procs_per_node, backend="docker",
                         share=(settings.share,) if settings.share else (), replace=False, replenish=False,
                         heartbeat_s=min(ClusterConfig.heartbeat_s, settings.dead_s / 4), suspect_s=settings.dead_s / 2,
                         dead_s=settings.dead_s, lease_s=_LEASE_S)


def own_address() -> str:
    """This container's address on its network."""
    return socket.gethostbyname(socket.gethostname())


def node_name(address: str) -> str:
    """A name that no other node of the same network has: the host's part of the address as a number."""
    return f"node-{int(IPv4Address(address)) & 0xFFFF}"


def own_folder(state: Path, container: str, boot: Path = _BOOT) -> Path:
    """Where this container keeps its journal; what others left is removed. The journal's times count from the start of
    the machine, so one from before that means nothing any more."""
    name = f"{container}-{boot.read_text().strip()[:8]}"
    try:
        for other in state.iterdir():
            if other.name != name:
                shutil.rmtree(other, ignore_errors=True)
        (state / name).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{state} cannot be used for the controller's journal: {error}",
                          hint="mount a volume there that this user can write to") from None
    return state / name


def _attend(controller: Connection) -> bool:
    """Hear a controller until it ends; whether it was asked to. Nodes are not ours to start or to remove."""
    while True:
        try:
            request = json.loads(controller.recv_bytes())
        except (EOFError, OSError):
            return False
        if request.get("do") == "close":
            return True


if __name__ == "__main__":
    sys.exit(main())
