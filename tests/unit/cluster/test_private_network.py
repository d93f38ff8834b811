"""Which network a cluster gets, what is said where it cannot have one, and how its socket file is reached."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ftlab.cluster import abilities, packets, private_network, socket_file
from ftlab.cluster.private_network import choose_network, forbidden_by
from ftlab.config import ClusterConfig
from ftlab.errors import ConfigError


@pytest.fixture
def machine(monkeypatch):
    """A machine that refuses socket filters, or private networks, for these reasons."""
    def set_up(filters: str, networks: str) -> None:
        monkeypatch.setattr(packets, "available", lambda: filters)
        monkeypatch.setattr(private_network, "why_not", lambda: networks)
    return set_up


@pytest.mark.parametrize(("filters", "networks", "chosen"), [
    ("", "", "host"), ("", "no", "host"), ("refused", "", "private"), ("refused", "no", "host")])
def test_auto_takes_a_private_network_only_where_packets_drop_nowhere_else(machine, filters, networks, chosen):
    machine(filters, networks)
    assert choose_network("auto") == chosen
    assert (choose_network("host"), choose_network("private")) == ("host", "private")


@pytest.mark.parametrize(("network", "filters", "networks", "said"), [
    ("auto", "", "no namespaces", []), ("auto", "refused", "", []), ("private", "refused", "", []),
    ("auto", "refused", "no namespaces", ["refused", "no namespaces"]), ("host", "", "no namespaces", []),
    ("host", "refused", "", ["refused", "without network='host'"]),
    ("host", "refused", "no namespaces", ["refused", "no namespaces"])])
def test_a_partition_that_cannot_be_says_why_on_each_network(machine, network, filters, networks, said):
    machine(filters, networks)
    reason = abilities.missing(["partition"], ClusterConfig(network=network))
    assert bool(reason) is bool(said) and all(words in reason for words in said)


@pytest.mark.parametrize(("name", "value", "culprit"), [
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=0"), ("user/max_user_namespaces", "9999", ""),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=0"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "apparmor_restrict_unprivileged_userns=1")])
def test_the_setting_that_forbids_namespaces_is_named(tmp_path, name, value, culprit):
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(f"{value}\n")
    assert (culprit in forbidden_by(tmp_path)) if culprit else forbidden_by(tmp_path) == ""


@pytest.mark.parametrize(("settings", "reason"), [
    ({"network": "public"}, "network must be one of auto, host, private"),
    ({"network": "private", "backend": "docker"}, "containers have a network of their own")])
def test_a_network_that_cannot_be_is_refused_with_the_reason(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        ClusterConfig(**settings)


@pytest.mark.parametrize("depth", [0, 40])
def test_a_socket_file_is_reached_however_deep_it_lies(tmp_path, depth):
    file = Path(tmp_path, *["deep"] * depth, "a.sock")
    file.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        with socket_file.reachable(file) as name:
            server.bind(name)
        server.listen()
        with socket_file.reachable(file) as name:
            client.connect(name)
        assert file.is_socket()


def test_a_socket_file_that_lies_too_deep_for_other_systems_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(socket_file.sys, "platform", "darwin")
    file = Path(tmp_path, *["deep"] * 40, "a.sock")
    with pytest.raises(ConfigError, match="too deep"), socket_file.reachable(file):
        pass
