"""The links of containers: partitions of several nodes, or one way only, and links that lose or delay packets.

Packets are lost by rules in each container's own network namespace: everything but what goes between the nodes of one
side. Nodes that are started later are on the other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftlab.cluster import netrules
from ftlab.cluster.container import Container
from ftlab.errors import FaultUnavailable


def lose_packets(nodes: Sequence[Container], way: str) -> dict[str, Any]:
    """Cut some containers off from all others; what the kernel counts from then on."""
    _check("cut")
    addresses = {node.address for node in nodes}
    for node in nodes:
        if node.rules is None:
            netrules.apply(node.pid, netrules.drop_rules(netrules.CUT, way, addresses - {node.address}))
            node.rules = way or "both"
    return {"nodes": [node.name for node in nodes], "dropped": {node.name: _count(node) for node in nodes}}


def let_pass(nodes: Sequence[Container]) -> dict[str, Any]:
    """End a partition made by rules; how many packets each container has lost."""
    lost = {}
    for node in nodes:
        if node.rules is not None:
            lost[node.name] = _count(node)
            netrules.apply(node.pid, netrules.lift_rules(netrules.CUT, _way(node)))
            node.rules = None
    return {"nodes": [node.name for node in nodes], "dropped": lost}


def spoil_link(node: Container, loss: float, delay_ms: float, rate_mbit: float) -> dict[str, Any]:
    """Lose a share of a container's packets, both ways; slow down or delay what it sends."""
    for what, wanted in (("loss", loss), ("delay", delay_ms), ("rate", rate_mbit)):
        if wanted:
            _check(what)
    restore_link(node)
    told: dict[str, Any] = {}
    if loss:
        netrules.apply(node.pid, netrules.drop_rules(netrules.LOSS, loss=loss))
        node.lossy = True
        told |= {"loss": loss, "dropped": netrules.dropped(node.pid, netrules.LOSS)}
    if delay_ms or rate_mbit:
        told["tc"] = netrules.shape(node.pid, netrules.Shape(delay_ms, rate_mbit))
        node.shaped = True
    return told


def restore_link(node: Container) -> dict[str, Any]:
    """Make a container's link as good as it was; how many packets were lost."""
    told: dict[str, Any] = {}
    if node.lossy:
        told["dropped"] = netrules.dropped(node.pid, netrules.LOSS)
        netrules.apply(node.pid, netrules.lift_rules(netrules.LOSS))
        node.lossy = False
    if node.shaped:
        told["tc"] = netrules.shape(node.pid, None)
        node.shaped = False
    return told


def _count(node: Container) -> dict[str, int]:
    return netrules.dropped(node.pid, netrules.CUT, _way(node))


def _way(node: Container) -> str:
    return "" if node.rules in (None, "both") else str(node.rules)


def _check(what: str) -> None:
    reason = netrules.available(what)
    if reason:
        raise FaultUnavailable(f"packets of a container cannot be lost, slowed down or delayed here: {reason}",
                               hint="`ftlab doctor` tells what this machine can do")
