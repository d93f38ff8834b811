"""Gates: the listening sockets of a controller. The launcher holds them, so that one who comes while the controller is
being restarted only waits a moment.

Clients come through a file in the cluster's private folder, and through a port of 127.0.0.1 only if somebody asked for
one. Nodes come through the last gate, at an address of theirs.
"""

from __future__ import annotations

import socket
from pathlib import Path

from tornado.netutil import bind_unix_socket

from ftlab.cluster.launcher_settings import CONTROLLER
from ftlab.cluster.socket_file import SCHEME, reachable
from ftlab.errors import ClusterError, PortInUse

_BACKLOG = 512


def file_gate(folder: Path) -> socket.socket:
    """The gate that only this user finds."""
    with reachable(folder / CONTROLLER) as name:
        return bind_unix_socket(name, mode=0o600, backlog=_BACKLOG)


def port_gate(port: int = 0) -> socket.socket:
    """A gate on the loopback of the network that this process is in; 0: at a free port. Raises PortInUse."""
    try:
        gate = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
    except OSError as error:
        raise PortInUse(f"port {port} on 127.0.0.1 cannot be used: {error.strerror}",
                        hint="take another port, or port=0 for a free one") from None
    gate.setblocking(False)
    return gate


def bridge_gate(gateway: str) -> socket.socket:
    """A gate for containers, at the host's end of their network; raises ClusterError."""
    try:
        gate = socket.create_server((gateway, 0), backlog=_BACKLOG)
    except OSError as error:  # Docker Desktop, or an engine on another machine
        raise ClusterError("the containers' network does not end on this machine, so its nodes could not reach the "
                           "controller", seen=f"{gateway}: {error.strerror}",
                           hint="docker compose -f cluster/compose.yaml up: there the controller is a container too"
                           ) from None
    gate.setblocking(False)
    return gate


def url_of(gate: socket.socket, folder: Path) -> str:
    """Where a gate is found; the one that is a file, by its path in the cluster's folder."""
    if gate.family == socket.AF_UNIX:
        return f"{SCHEME}{folder / CONTROLLER}"
    host, port = gate.getsockname()
    return f"http://{host}:{port}"
