"""However a cluster ends, nothing of it stays: no process, no shared memory, no folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import ftlab
from ftlab import faults
from ftlab.cluster.runs import find_leftovers, labelled, reap
from ftlab.config import runs_dir
from tests import trains
from tests.limits import COMMAND_S, JOB_S, SOON_S

OWNER = """
import os, sys, time
import ftlab
from ftlab import faults
from tests import trains
cluster = ftlab.Cluster(nodes=2, spares=1, echo=None)
job = cluster.submit(trains.plain, steps=100_000)
job.wait_for_step(3)
for kind in {faults!r}:
    cluster.inject(faults.make(kind, "node-1"))
print(cluster.name, cluster._launcher.pid, flush=True)
{then}
"""


def _start(then: str = "time.sleep(1000)", broken: tuple[str, ...] = ()) -> tuple[subprocess.Popen, str, int]:
    code = OWNER.format(then=then, faults=list(broken))
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    name, launcher = owner.stdout.readline().split()
    return owner, name, int(launcher)


def _gone(name: str, seconds: float = 8.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not labelled().get(name) and not (runs_dir() / name).exists():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("broken", [(), ("hang",)])  # a stopped process cannot notice anything by itself
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_owner_is_ended(number, broken):
    owner, name, _ = _start(broken=broken)
    assert len(labelled()[name]) > 5
    owner.send_signal(number)
    owner.communicate(timeout=COMMAND_S)
    assert _gone(name)


@pytest.mark.parametrize("then", ["raise RuntimeError('a bug in the notebook')", "sys.exit(3)", "cluster.close()"])
def test_the_owner_ends_by_itself(then):
    owner, name, _ = _start(then)
    owner.communicate(timeout=COMMAND_S)
    assert _gone(name)


def test_an_exception_in_the_with_block():
    with pytest.raises(RuntimeError, match="mine"), ftlab.Cluster(nodes=1, spares=0, echo=None) as cluster:
        name = cluster.name
        raise RuntimeError("mine")
    assert _gone(name)
    assert "closed" in repr(cluster)
    cluster.close()  # may be called twice


def test_the_launcher_is_killed_while_a_node_is_stopped():
    owner, name, launcher = _start(broken=("hang",))
    os.kill(launcher, signal.SIGKILL)
    deadline = time.monotonic() + SOON_S
    while labelled().get(name) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not labelled().get(name)
    owner.kill()
    owner.communicate(timeout=COMMAND_S)
    assert name in [each.cluster for each in find_leftovers()]  # only the folder: nobody was left to remove it
    assert name in [each.cluster for each in reap()]
    assert _gone(name)


def test_the_controller_is_killed_with_its_owner():
    owner, name, _ = _start(broken=("controller",))
    owner.kill()
    owner.communicate(timeout=COMMAND_S)
    assert _gone(name)


def test_an_agent_or_a_fork_server_that_dies_takes_its_node_with_it():
    with ftlab.Cluster(nodes=2, spares=1, echo=None) as cluster:
        for which in ("agent", "fork server"):
            job = cluster.submit(trains.plain, steps=80)
            job.wait_for_step(5)
            node = next(node for node in cluster.status()["nodes"] if 1 in node["ranks"])
            agent = psutil.Process(node["pid"])
            family = [agent, *agent.children(recursive=True)]
            (agent if which == "agent" else agent.children()[0]).kill()
            assert job.result(timeout=JOB_S).recoveries == 1
            _, alive = psutil.wait_procs(family, timeout=SOON_S)
            assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_an_agent_survives_a_worker_that_does_not_read():
    """Writing to a worker that is just gone is an error, not the end of the node."""
    with ftlab.Cluster(nodes=2, spares=0, echo=None) as cluster:
        for _ in range(5):
            with pytest.raises(ftlab.FtlabError, match="a bug in step"):
                cluster.submit(trains.raises_always).result(timeout=JOB_S)
        assert not [event for event in cluster.events if event.kind == "node.died"]


def test_two_clusters_do_not_disturb_each_other():
    with ftlab.Cluster(nodes=2, spares=0, echo=None) as one, ftlab.Cluster(nodes=2, spares=0, echo=None) as two:
        first, second = one.submit(trains.plain, steps=40), two.submit(trains.plain, steps=40)
        one.inject(faults.kill("node-1", at_step=10))
        assert first.result(timeout=JOB_S).recoveries == 1
        assert second.result(timeout=JOB_S).recoveries == 0


def test_reap_spares_what_is_alive():
    with ftlab.Cluster(nodes=1, spares=0, echo=None) as cluster:
        assert cluster.name not in [each.cluster for each in reap()]
        assert cluster.submit(trains.plain, steps=3).result(timeout=JOB_S).recovered
