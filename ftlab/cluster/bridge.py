"""A cluster's own network: a bridge with a subnet that nobody else uses, and an address for each node.

The first host address is the gateway: the host itself, where the controller listens for its nodes. Nodes come after it,
by their number; an address is used again only when its node is gone.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Collection, Iterable, Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from ftlab.errors import ClusterError

_RANGE = IPv4Network("10.213.0.0/16")
_TRIES = 16  # subnets that the engine may refuse before something else is wrong
_OVERLAP = ("overlap", "no available network", "conflicts with")


def create_bridge(client: Any, name: str, labels: dict[str, str], seed: int) -> IPv4Network:
    """Create the cluster's network on a free subnet; raises ClusterError if there is none."""
    from docker.errors import APIError
    from docker.types import IPAMConfig, IPAMPool

    refused = ""
    taken = [*_routes(), *_networks(client)]
    for _, subnet in zip(range(_TRIES), free_subnets(taken, seed), strict=False):
        pool = IPAMPool(subnet=str(subnet), gateway=str(subnet[1]))
        try:
            client.create_network(name, driver="bridge", labels=labels, ipam=IPAMConfig(pool_configs=[pool]),
                                  check_duplicate=True)
            return subnet
        except APIError as error:
            refused = str(error.explanation or error)
            if not any(word in refused.lower() for word in _OVERLAP):
                break  # it is not the subnet
    raise ClusterError("the engine gives no network for this cluster", seen=refused or f"all of {_RANGE} is in use",
                       hint="docker network prune removes networks that nobody uses; `ftlab reap` removes ours")


def free_subnets(taken: Iterable[IPv4Network], seed: int) -> Iterator[IPv4Network]:
    """Subnets that overlap with none that is taken, beginning somewhere that depends on the seed."""
    used, subnets = list(taken), list(_RANGE.subnets(new_prefix=24))
    for number in range(len(subnets)):
        subnet = subnets[(seed + number) % len(subnets)]
        if not any(subnet.overlaps(other) for other in used):
            yield subnet


def pick_address(subnet: IPv4Network, number: int, used: Collection[str]) -> str:
    """The address of a node by its number; the next free one if somebody still has it."""
    places = subnet.num_addresses - 4  # not the network, the gateway, the broadcast
    for step in range(places):
        address = str(subnet[2 + (number + step) % places])
        if address not in used:
            return address
    raise ClusterError(f"all addresses of {subnet} are in use", hint="fewer nodes")


def _networks(client: Any) -> Iterator[IPv4Network]:
    for network in client.networks():
        for pool in (network.get("IPAM") or {}).get("Config") or []:
            with contextlib.suppress(ValueError, KeyError):
                yield IPv4Network(pool["Subnet"])


def _routes(table: Path = Path("/proc/net/route")) -> Iterator[IPv4Network]:
    """Where this machine already sends packets to, its default route aside."""
    with contextlib.suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            address, mask = (struct.unpack("<I", bytes.fromhex(fields[place]))[0] for place in (1, 7))
            if mask:
                yield IPv4Network((address, bin(mask).count("1")), strict=False)
