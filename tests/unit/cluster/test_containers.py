"""What containers see, as whom they run, where they live: decided without an engine."""

from __future__ import annotations

import os
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from ftlab.cluster import image, recipe
from ftlab.cluster.bridge import _routes, free_subnets, pick_address
from ftlab.cluster.containers import check_memory, is_a_cluster
from ftlab.cluster.engine import Owned
from ftlab.cluster.identity import NodeIdentity, read_identity, write_identity
from ftlab.cluster.image import environment_binds, outermost
from ftlab.config import ClusterConfig
from ftlab.errors import ClusterError, ConfigError


def test_folders_inside_others_and_the_containers_own_are_left_out(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "ab").mkdir()
    paths = [str(tmp_path / "a" / "b"), str(tmp_path / "a"), str(tmp_path / "ab"), str(tmp_path / "none"), "", "/",
             "/tmp", "/etc"]
    assert outermost(paths) == [str(tmp_path / "a"), str(tmp_path / "ab")]


def test_the_environment_of_this_process_is_seen(tmp_path):
    seen = environment_binds([str(tmp_path)])
    for wanted in (os.path.dirname(recipe.__file__), os.__file__, str(tmp_path), "/usr/bin"):
        assert any(wanted == each or wanted.startswith(f"{each}/") for each in seen), wanted


@pytest.mark.parametrize(("host", "words"), [("", ""), ("unix:///x.sock", ""), ("tcp://far:2375", "on this machine")])
def test_the_host_can_only_be_bound_by_an_engine_that_runs_on_it(monkeypatch, host, words):
    monkeypatch.setattr(image, "docker_host", lambda: host)
    assert words in image.possible() and bool(words) == bool(image.possible())


def test_another_system_needs_an_image(monkeypatch):
    monkeypatch.setattr(image.sys, "platform", "darwin")
    assert "needs Linux" in image.possible()


def test_another_architecture_needs_an_image(monkeypatch):
    monkeypatch.setattr(image.platform, "machine", lambda: "x86_64")
    assert image._wrong_architecture("amd64") == image._wrong_architecture("") == ""
    assert "arm64" in image._wrong_architecture("arm64")


def test_a_subnet_that_overlaps_is_passed_over():
    first, second = (next(free_subnets([], seed)) for seed in (7, 8))
    assert (str(first), str(second)) == ("10.213.7.0/24", "10.213.8.0/24")
    assert next(free_subnets([IPv4Network("10.213.7.128/25")], 7)) == second
    assert list(free_subnets([IPv4Network("10.0.0.0/8")], 7)) == []


def test_the_machines_own_routes_are_known(tmp_path):
    table = tmp_path / "route"
    table.write_text("Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
                     "eth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0\n"
                     "docker0 000011AC 00000000 0001 0 0 0 0000FFFF 0 0 0\n")
    assert list(_routes(table)) == [IPv4Network("172.17.0.0/16")]
    assert list(_routes(tmp_path / "none")) == []


def test_a_node_has_the_address_of_its_number_or_the_next_free_one():
    subnet = IPv4Network("10.213.7.0/24")
    assert pick_address(subnet, 0, ()) == "10.213.7.2"
    assert pick_address(subnet, 0, {"10.213.7.2"}) == "10.213.7.3"
    assert pick_address(subnet, 252, ()) == "10.213.7.2", "numbers grow for ever, addresses come round"
    with pytest.raises(ClusterError, match="in use"):
        pick_address(subnet, 0, {str(each) for each in subnet})


def test_root_never_runs_containers_as_root(monkeypatch):
    monkeypatch.setattr(recipe.os, "getuid", lambda: 0)
    assert recipe.node_user() == recipe.NOBODY
    monkeypatch.setattr(recipe.os, "getuid", lambda: 1000)
    assert recipe.node_user() == 1000


def test_a_folder_that_nodes_cannot_write_is_refused_with_the_command_that_helps(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ClusterError, match="cannot write") as caught:
        recipe.check_writable(str(tmp_path), tmp_path.stat().st_uid + 1)
    assert caught.value.hint.startswith("chown")
    recipe.check_writable(str(tmp_path), tmp_path.stat().st_uid)
    tmp_path.chmod(0o777)
    recipe.check_writable(str(tmp_path), tmp_path.stat().st_uid + 1)
    with pytest.raises(ClusterError, match="no such folder"):
        recipe.check_writable(str(tmp_path / "none"), 0)


def test_memory_is_counted_over_all_nodes():
    config = ClusterConfig(nodes=3, spares=1, backend="docker", memory_mb=1000)
    check_memory(config, 4000 << 20)
    with pytest.raises(ClusterError, match="4 nodes with 1000 MB each need 4000 MB, and the engine has 3999 MB"):
        check_memory(config, 3999 << 20)
    check_memory(ClusterConfig(nodes=100, backend="docker"), 1 << 20)


def test_an_identity_survives_its_file_which_only_its_owner_reads(tmp_path):
    identity = NodeIdentity(name="node-1", address="10.213.7.3", controller="http://10.213.7.1:1", token="secret",
                            logs=Path("/logs"), orphan_s=15.0)
    write_identity(tmp_path / "node.json", identity, 2, os.getuid())
    assert read_identity(tmp_path / "node.json") == (identity, 2)
    assert (tmp_path / "node.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("settings", "words"), [
    ({"backend": "teapot"}, "backend"), ({"memory_mb": 500}, "backend='docker'"), ({"share": ["/x"]}, "docker"),
    ({"backend": "docker", "memory_mb": 100}, "at least 256"), ({"backend": "docker", "cpus": 0.001}, "at least 0.05"),
    ({"backend": "docker", "gpus": 0}, "gpus"), ({"backend": "docker", "share": "/x"}, "share must be a list"),
    ({"backend": "docker", "share": ["x"]}, "absolute"),
])
def test_settings_that_cannot_work_say_why(settings, words):
    with pytest.raises(ConfigError, match=words):
        ClusterConfig(**settings)


@pytest.mark.parametrize(("folder", "ours"), [("/tmp/ftlab-0/ft-1", True), ("/tmp/ftlab-stage-x", False), ("", False)])
def test_only_what_has_a_run_folder_is_taken_for_a_leftover_cluster(folder, ours):
    """A sandbox with our labels has no launcher: it was once removed while it ran."""
    assert is_a_cluster(Owned("ft-1", Path(folder), ["ft-1-node-0"])) is ours
