"""Settings: what cannot work is refused when it is written down, with the reason."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ftlab import config
from ftlab.config import (
    CLUSTER_LABEL,
    DEFAULT_BUDGETS,
    FOLDER_LABEL,
    ClusterConfig,
    JobConfig,
    child_environment,
    runs_dir,
)
from ftlab.errors import ConfigError

BAD_CLUSTERS = [
    ({"nodes": 0}, "nodes must be at least 1: somebody has to train"),
    ({"nodes": 2.0}, "nodes must be a whole number: got 2.0"),
    ({"nodes": True}, "nodes must be a whole number: got True"),
    ({"nodes": "4"}, "nodes must be a whole number: got '4'"),
    ({"spares": -1}, "spares must not be negative"),
    ({"spares": None}, "spares must be a whole number"),
    ({"procs_per_node": 0}, "a node without a worker cannot train"),
    ({"nodes": 200, "spares": 1}, "at most 200"),
    ({"port": 65536}, "port must be between 0 and 65535"),
    ({"port": -1}, "port must be between 0 and 65535"),
    ({"heartbeat_s": 0.0}, "heartbeat_s must be positive"),
    ({"heartbeat_s": 0.4}, "one late heartbeat is no evidence"),
    ({"suspect_s": 0.7}, "suspect_s < dead_s"),
    ({"dead_s": 0.3}, "suspect_s < dead_s"),
    ({"lease_s": 0.5}, "lease_s must exceed dead_s"),
]
BAD_JOBS = [
    ({"min_nodes": 0}, "min_nodes must be at least 1"),
    ({"shards": 4}, "shards is only used with exact=True"),
    ({"shards": 0, "exact": True}, "shards must be at least 1"),
    ({"budgets": {"crsh": 1, "node": 2}}, "unknown budget ['crsh']: causes are ['crash', 'link', 'node', "
                                               "'numbers', 'oom', 'stall', 'straggler']"),
]


@pytest.mark.parametrize(("settings", "reason"), BAD_CLUSTERS)
def test_a_cluster_that_cannot_work_is_refused_with_the_reason(settings, reason):
    with pytest.raises(ConfigError) as refusal:
        ClusterConfig(**settings)
    assert reason in str(refusal.value)


@pytest.mark.parametrize(("settings", "reason"), BAD_JOBS)
def test_a_job_that_cannot_work_is_refused_with_the_reason(settings, reason):
    with pytest.raises(ConfigError) as refusal:
        JobConfig(**settings)
    assert reason in str(refusal.value)


@pytest.mark.parametrize("settings", [{}, {"nodes": 1, "spares": 0}, {"nodes": 150, "spares": 50}, {"port": 65535},
                                      {"heartbeat_s": 0.15, "suspect_s": 0.3, "dead_s": 0.31, "lease_s": 0.32}])
def test_settings_at_their_limits_are_accepted(settings):
    assert ClusterConfig(**settings).to_dict().items() >= settings.items()


def test_settings_survive_the_way_through_json():
    cluster = ClusterConfig(nodes=3, replace=False, dead_s=0.9)
    job = JobConfig(exact=True, shards=8, budgets={"crash": 1}, min_nodes=2, seed=7)
    assert ClusterConfig.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert JobConfig.from_dict(json.loads(json.dumps(job.to_dict()))) == job


@pytest.mark.parametrize("made", [ClusterConfig(), JobConfig()], ids=["cluster", "job"])
def test_settings_are_frozen_and_named(made):
    name = dataclasses.fields(made)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, 1)
    with pytest.raises(ConfigError, match="by name"):
        type(made)(1)


def test_budgets_are_given_over_the_defaults():
    assert JobConfig().all_budgets() == dict(DEFAULT_BUDGETS)
    assert JobConfig(budgets={"crash": 0}).all_budgets() == {**DEFAULT_BUDGETS, "crash": 0}


def test_the_run_folder_is_the_users_own_unless_the_environment_names_one(monkeypatch, tmp_path):
    monkeypatch.setenv("FTLAB_RUNS", str(tmp_path))
    assert runs_dir() == tmp_path
    monkeypatch.delenv("FTLAB_RUNS")
    monkeypatch.setattr(config.tempfile, "gettempdir", lambda: "/elsewhere")
    monkeypatch.setattr(config.os, "getuid", lambda: 17)
    assert runs_dir() == Path("/elsewhere/ftlab-17")


def test_a_clusters_processes_are_labelled_and_keep_the_users_environment(monkeypatch):
    monkeypatch.setenv("HOMEMADE", "yes")
    environment = child_environment("abc", Path("/runs/abc"))
    assert environment[CLUSTER_LABEL] == "abc" and environment[FOLDER_LABEL] == "/runs/abc"
    assert environment["HOMEMADE"] == "yes"
    assert environment["OMP_NUM_THREADS"] == "1"
