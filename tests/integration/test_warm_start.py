"""Launchers forked from a warm template: labelled and watched as if they had been started, and independent of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import ftlab
from ftlab.cluster import runs, warm_start
from ftlab.cluster.warm_start import ForkedLauncher
from tests.leaks import ended
from tests.limits import JOB_S, SOON_S

pytestmark = pytest.mark.skipif(not warm_start._possible(), reason="only Linux shows what a process was started with")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ftlab.Cluster]:
    with ftlab.Cluster(nodes=1, spares=0, echo=None) as made:
        yield made


def template() -> psutil.Process:
    return psutil.Process(warm_start._made[0]._process.pid)


def wait_until(holds) -> None:
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_its_processes_carry_the_clusters_labels_and_nobody_elses(cluster):
    assert isinstance(cluster._launcher, ForkedLauncher)
    pids = runs.labelled()[cluster.name]
    launcher = psutil.Process(cluster._launcher.pid)
    assert {launcher.pid, *(child.pid for child in launcher.children(recursive=True))} <= set(pids)
    assert launcher.environ()["FTLAB_FOLDER"] == str(cluster._folder)
    assert template().pid not in pids and "FTLAB_CLUSTER" not in template().environ()
    assert template().num_threads() == 1


def test_the_next_one_comes_from_the_same_template_with_the_environment_of_now(cluster, tmp_path, monkeypatch):
    def look(ctx):
        import os

        import torch

        ctx.protect(model=torch.nn.Linear(1, 1))
        for _ in ctx.steps(1):
            with ctx.step():
                pass
        return os.environ.get("COLOUR"), os.getcwd()

    before = template().pid
    monkeypatch.setenv("COLOUR", "green")
    monkeypatch.chdir(tmp_path)
    with ftlab.Cluster(nodes=1, spares=0, echo=None) as other:
        assert template().pid == before
        values = other.submit(look).result(timeout=JOB_S).values
        assert values[0] == ("green", str(tmp_path))


def test_what_a_launcher_would_inherit_in_vain_makes_another_template(cluster, monkeypatch):
    before = template().pid
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "0")
    with ftlab.Cluster(nodes=1, spares=0, echo=None) as other:
        assert template().pid != before and other.running and cluster.running
        assert not psutil.pid_exists(before)


def test_a_cluster_outlives_the_template_and_the_next_one_starts_all_the_same(cluster):
    template().kill()
    assert cluster.running and cluster.status()["nodes"]
    with ftlab.Cluster(nodes=1, spares=0, echo=None) as other:
        assert other.running


def test_an_end_of_the_launcher_is_seen(cluster):
    with ftlab.Cluster(nodes=1, spares=0, echo=None) as other:
        os.kill(other._launcher.pid, signal.SIGKILL)
        wait_until(lambda: not other.running)
        with pytest.raises(ftlab.errors.ClusterClosed, match="launcher has ended"):
            other.status()


def test_the_template_ends_with_its_owner_however_that_ends_and_also_if_a_fork_of_it_lives(tmp_path):
    code = """
import os, time
import ftlab
from ftlab.cluster import warm_start
cluster = ftlab.Cluster(nodes=1, spares=0, echo=None)
if os.fork() == 0:  # it holds all that its parent had open
    time.sleep(1000)
print(warm_start._made[0]._process.pid, flush=True)
time.sleep(1000)
"""
    program = tmp_path / "owner.py"
    program.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(Path(ftlab.__file__).parents[1])}
    owner = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environment)
    with ended(owner):
        line = owner.stdout.readline()
        assert line, "no template"
        pid = int(line)
        forked = [child for child in psutil.Process(owner.pid).children() if child.pid != pid]
        assert psutil.pid_exists(pid) and forked
        owner.kill()
        wait_until(lambda: not psutil.pid_exists(pid))
        for child in forked:
            child.kill()


def test_where_there_can_be_no_template_the_launcher_starts_by_itself(monkeypatch):
    monkeypatch.setattr(warm_start, "_possible", lambda: False)
    with ftlab.Cluster(nodes=1, spares=0, echo=None) as cluster:
        assert isinstance(cluster._launcher, subprocess.Popen) and cluster.running
