"""Nodes as processes."""

from __future__ import annotations

import sys
from ipaddress import IPv4Address

import pytest

from ftlab.cluster.processes import node_address


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has only one loopback address")
def test_every_node_has_an_address_of_its_own_however_many_came_before_it():
    """The 255th node of a cluster, and every later one, never came up: it had 127.0.7.256."""
    addresses = [IPv4Address(node_address(7, number)) for number in range(1000)]
    assert len(set(addresses)) == 1000 and all(address.is_loopback for address in addresses)
    assert not {address.packed[-1] for address in addresses} & {0, 1, 255}
    assert node_address(7, 0) == "127.0.7.2"
