"""Imports between the rooms point down, third parties stay behind their fences; and the checker can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.law.import_rules import violations

ROOT = Path(__file__).parents[2]


def test_the_rooms_of_ftlab_keep_the_rules():
    found = violations(ROOT / "ftlab")
    assert not found, "\n" + "\n".join(found)


def tree(tmp_path: Path, **files: str) -> Path:
    """A package `ftlab` with these files; `train__worker="..."` is train/worker.py."""
    package = tmp_path / "ftlab"
    package.mkdir()
    for name, source in files.items():
        file = package / (name.replace("__", "/") + ".py" if not name.startswith("__") else f"{name}.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return package


GOOD = {
    "points down": {"cluster__node": "from ftlab.policy import decide\nimport docker, tornado"},
    "same room": {"train__worker": "from .context import Context\nfrom ftlab.train import data\nimport torch"},
    "relative and down": {"train__worker": "from ..elastic.group import build\nfrom .. import errors"},
    "base imports errors": {"config": "import os\nfrom ftlab.errors import ConfigError"},
    "base without a circle": {"messages": "import ftlab.config", "config": "import ftlab.errors", "errors": ""},
    "recovery serves metrics": {"recovery__controller": "from ftlab.metrics import names\nimport tornado.web"},
    "metrics": {"metrics__names": "import prometheus_client"},
    "lazy surface": {"__init__": "def __getattr__(name):\n    from ftlab.cluster import Cluster\n    return Cluster"},
    "typed surface": {
        "__init__": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ftlab.cluster import Cluster"
    },
    "main": {"__main__": "from ftlab.cli.main import main"},
    "a client of the surface": {"cli__main": "import ftlab\nfrom ftlab import Cluster, __version__"},
}

BAD = {
    "upwards": ({"train__worker": "import ftlab.cluster.node"}, "cluster, which stands above"),
    "upwards from the base": ({"events": "from ftlab.train import worker"}, "train, which stands above"),
    "sibling": ({"recovery__policy": "from ftlab.train.context import Context"}, "sibling train"),
    "inside a function": ({"train__worker": "def f():\n    import ftlab.drill"}, "drill, which stands above"),
    "for types only": (
        {"train__worker": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ftlab.cli import main"},
        "cli, which stands above",
    ),
    "relative": ({"train__worker": "from ..cluster.node import Node"}, "cluster, which stands above"),
    "relative room": ({"train__worker": "from .. import cluster"}, "cluster, which stands above"),
    "deep relative": ({"train__deep__worker": "from ...cluster import node"}, "cluster, which stands above"),
    "from the package": ({"train__worker": "from ftlab import cluster"}, "cluster, which stands above"),
    "by name": ({"train__worker": "import importlib\nimportlib.import_module('ftlab.drill')"}, "drill, which stands"),
    "base is not plain": ({"events": "import numpy"}, "standard library only"),
    "circle in the base": (
        {"events": "import ftlab.membership", "membership": "import ftlab.events"}, "in a circle: events"
    ),
    "docker": ({"faults__net": "import docker"}, "docker, which belongs to cluster only"),
    "prometheus": ({"recovery__web": "from prometheus_client import Counter"}, "belongs to metrics only"),
    "ray": ({"bench__peers": "def f():\n    import ray.train"}, "belongs to engines only"),
    "ipywidgets": ({"drill__report": "import ipywidgets as w"}, "belongs to widgets only"),
    "tornado": ({"cli__main": "from tornado.ioloop import IOLoop"}, "belongs to cluster, recovery only"),
    "torch in recovery": ({"recovery__policy": "import torch.distributed"}, "recovery imports torch"),
    "torch in metrics": ({"metrics__names": "import torch"}, "metrics imports torch"),
    "torch in faults": ({"faults__kill": "from torch import nn"}, "faults imports torch"),
    "torch in the base": ({"config": "import torch"}, "config imports torch"),
    "eager surface": ({"__init__": "from ftlab.cluster import Cluster"}, "the room cluster at module level"),
    "eager relative surface": ({"__init__": "from .errors import FtlabError"}, "the room errors at module level"),
    "through the surface": ({"drill__run": "from ftlab import Cluster"}, "not from the public surface"),
    "no such room": ({"utils__misc": ""}, "utils is no room"),
}


@pytest.mark.parametrize("files", GOOD.values(), ids=GOOD.keys())
def test_good_trees_pass(tmp_path, files):
    assert violations(tree(tmp_path, **files)) == []


@pytest.mark.parametrize("files, message", BAD.values(), ids=BAD.keys())
def test_each_rule_can_fail(tmp_path, files, message):
    found = violations(tree(tmp_path, **files))
    assert any(message in line for line in found), found
    assert all(line.startswith(("ftlab/", "the base")) for line in found)
