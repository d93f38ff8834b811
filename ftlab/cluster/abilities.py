"""What faults need, and whether this machine has it: asked before anything is started or broken.

A fault names its needs; `missing` says, for a cluster's backend, which of them cannot be had here and what would help.
Each need is tried for real: a filter on a socket, on the network that the cluster has or would have, a rule in a
throw-away network namespace, a cgroup.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from ftlab.cluster import delegation, netrules, packets, private_network
from ftlab.config import ClusterConfig

_ONLY_CONTAINERS = "needs containers (backend='docker')"
NEEDS: dict[str, str] = {  # by need: what cannot be done without it
    "partition": "cutting a node off",
    "split": "cutting off a group of nodes, or one way only",
    "loss": "a link that loses packets",
    "rate": "a slow link",
    "delay": "a link with a delay",
    "disk": "a disk that fills up",
    "cage": "having the kernel kill for memory",
}
_PACKETS = ("partition", "split", "loss")  # what needs packets to be dropped between processes
_PROCESSES: dict[str, Callable[[], str]] = {
    "rate": lambda: _ONLY_CONTAINERS, "delay": lambda: _ONLY_CONTAINERS, "disk": lambda: _ONLY_CONTAINERS,
    "cage": delegation.why_no_cages,
}
_CONTAINERS: dict[str, Callable[[], str]] = {
    "split": partial(netrules.available, "cut"), "loss": partial(netrules.available, "loss"),
    "rate": partial(netrules.available, "rate"), "delay": partial(netrules.available, "delay"),
}


def why_not(need: str, backend: str, network: str = "auto") -> str:
    """Empty if nodes of this kind, on this network, can have a need met on this machine, else why not."""
    if need in _PACKETS and backend == "process":
        return no_packet_loss(network)
    look = (_CONTAINERS if backend == "docker" else _PROCESSES).get(need)
    return look() if look else ""


def no_packet_loss(network: str = "auto") -> str:
    """Empty if packets between processes can be dropped on this network, else why not."""
    on_host = packets.available() if network != "private" else ""
    if network == "host" and on_host and not private_network.why_not():
        return f"{on_host} on the host's network; without network='host' this cluster would get a private one"
    in_private = private_network.why_not() if on_host or network == "private" else ""
    return f"{on_host}; and there is no private network: {in_private}" if on_host and in_private else in_private


def missing(needs: Collection[str], config: ClusterConfig) -> str:
    """Why a fault with these needs cannot be done to a cluster; empty if it can."""
    for need in needs:
        reason = why_not(need, config.backend, config.network)
        if need == "disk" and not reason and not config.disk_mb:
            reason = "this cluster has no small disk: Cluster(disk_mb=64, ...) gives it one"
        if reason:
            return f"{NEEDS[need]} is not possible here: {reason}"
    return ""


def gaps(backend: str) -> list[str]:
    """All that faults could need and cannot have here, one line each."""
    found = ((words, why_not(need, backend)) for need, words in NEEDS.items())
    return [f"{words} ({reason})" for words, reason in found if reason]
