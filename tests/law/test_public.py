"""The public names, listed a second time on purpose: changing them is a decision, not a side effect."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ftlab
from tests.limits import COMMAND_S

ROOT = Path(__file__).parents[2]
PUBLIC = [
    "CheckpointConfig",
    "CheckpointManager",
    "Cluster",
    "ClusterConfig",
    "DistributedCheckpointManager",
    "Event",
    "FtlabError",
    "HealthConfig",
    "HealthMonitor",
    "JobConfig",
    "Report",
    "connect",
    "drill",
    "faults",
    "train_with_auto_recovery",
]


def test_the_public_names_are_these():
    assert sorted(ftlab.__all__) == sorted(PUBLIC)


def test_dir_shows_the_public_names():
    assert set(PUBLIC) <= set(dir(ftlab))


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_resolves_to_the_same_thing_twice(name):
    assert getattr(ftlab, name) is getattr(ftlab, name)


def test_names_are_not_loaded_before_they_are_used():
    code = f"import ftlab; print([name for name in {PUBLIC} if name in vars(ftlab)])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ftlab.no_such_name
