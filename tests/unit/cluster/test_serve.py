"""A controller and nodes that nobody launches: their settings, names and folders."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ftlab.cluster import serve
from ftlab.cluster.client import ApiClient
from ftlab.config import ServeConfig
from ftlab.errors import ConfigError, FaultUnavailable
from tests.limits import COMMAND_S

TOKEN = "a-token-of-enough-length"


def test_the_token_is_taken_out_of_the_environment(monkeypatch):
    monkeypatch.setenv("FTLAB_TOKEN", TOKEN)
    monkeypatch.setenv("FTLAB_NODES", "5")
    settings = ServeConfig.from_environment()
    assert (settings.token, settings.nodes, settings.port) == (TOKEN, 5, 7070)
    assert "FTLAB_TOKEN" not in os.environ


@pytest.mark.parametrize(("name", "value", "words"), [
    ("FTLAB_TOKEN", "", "at least 16"), ("FTLAB_TOKEN", "short", "at least 16"), ("FTLAB_NODES", "two", "whole number"),
    ("FTLAB_CONTROLLER", "controller:7070", "must be a URL"), ("FTLAB_PORT", "99999", "between 1 and 65535"),
    ("FTLAB_DEAD_S", "soon", "must be a number"), ("FTLAB_DEAD_S", "25", "between 0.5 and 20")])
def test_settings_that_cannot_work_are_refused_with_their_name(monkeypatch, name, value, words):
    monkeypatch.setenv("FTLAB_TOKEN", TOKEN)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words) as caught:
        ServeConfig.from_environment()
    assert name in caught.value.message


def test_nodes_of_one_network_have_different_names():
    addresses = [f"172.18.{high}.{low}" for high in (0, 1, 255) for low in (2, 3, 254)]
    assert len({serve.node_name(each) for each in addresses}) == len(addresses)
    assert serve.node_name("172.18.0.3") == "node-3"


def test_such_a_controller_starts_no_nodes():
    config = serve.cluster_config(ServeConfig(token=TOKEN, nodes=3))
    assert (config.nodes, config.spares, config.replace, config.replenish) == (3, 0, False, False)
    assert config.share == ("/checkpoints",)


@pytest.mark.parametrize("dead_s", [0.5, 2.0, 20.0])
def test_whatever_silence_is_deadly_heartbeats_come_often_enough(dead_s):
    config = serve.cluster_config(ServeConfig(token=TOKEN, dead_s=dead_s))
    assert config.dead_s == dead_s and 4 * config.heartbeat_s <= dead_s


def test_a_container_finds_its_own_journal_again_and_removes_those_of_others(tmp_path):
    boot = tmp_path / "boot"
    boot.write_text("12345678-9abc\n")
    state = tmp_path / "state"
    (state / "other-12345678").mkdir(parents=True)
    mine = serve.own_folder(state, "mine", boot)
    (mine / "journal.jsonl").write_text("x")
    assert serve.own_folder(state, "mine", boot) == mine and (mine / "journal.jsonl").exists()
    assert [each.name for each in state.iterdir()] == ["mine-12345678"]
    boot.write_text("87654321-9abc\n")  # the machine was restarted: its clock began anew
    assert serve.own_folder(state, "mine", boot) != mine and not mine.exists()


def test_a_folder_that_is_not_there_is_told_of(tmp_path):
    with pytest.raises(ConfigError, match="cannot be used for the controller's journal"):
        serve.own_folder(tmp_path / "none", "mine")


def test_a_cluster_without_a_launcher_takes_no_orders():
    with pytest.raises(FaultUnavailable, match="has no launcher"):
        ApiClient("http://127.0.0.1:1", TOKEN, None).order(do="kill", node="node-0")


def test_a_controller_is_there_before_torch_is_imported():
    """A container that is restarted must answer before its nodes' lease runs out, also on a busy machine."""
    code = "import sys, ftlab.cluster.serve, ftlab.cluster.control; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=COMMAND_S).returncode == 0
