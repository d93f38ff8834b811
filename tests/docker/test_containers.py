"""Clusters of containers: what a node is, what it may do, how it ends, and that nothing stays."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

import ftlab
from ftlab import CheckpointConfig, faults
from ftlab.cluster import engine
from ftlab.cluster.image import ensure_empty
from ftlab.cluster.runs import reap
from ftlab.config import runs_dir
from ftlab.errors import ClusterError, ConfigError
from tests import trains
from tests.limits import JOB_S, SOON_S, START_S

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def cluster() -> Iterator[ftlab.Cluster]:
    if engine.available():
        yield None  # the test is skipped before it asks
        return
    with ftlab.Cluster(nodes=2, spares=0, backend="docker", memory_mb=1500, cpus=1.5, echo=None) as cluster:
        yield cluster


@pytest.fixture
def client():
    with engine.connect() as client:
        yield client


def containers(client, cluster) -> list[dict]:
    [things] = engine.owned(client, cluster.name)
    return [client.inspect_container(name) for name in things.containers]


def test_a_node_is_locked_up(cluster, client):
    for each in containers(client, cluster):
        host = each["HostConfig"]
        assert each["Config"]["User"].split(":")[0] not in ("", "0", "root")
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["CapAdd"] and not host["Privileged"]
        assert "no-new-privileges" in host["SecurityOpt"]
        assert host["Memory"] == host["MemorySwap"] == 1500 << 20
        assert host["CpuQuota"] / host["CpuPeriod"] == 1.5
        assert not any("docker.sock" in bind for bind in host["Binds"])
        assert cluster.token not in json.dumps(each), "whoever may inspect a container would hold the token"
        writable = [mount["Destination"] for mount in each["Mounts"] if mount["RW"]]
        assert len(writable) == 1 and writable[0].endswith("/logs")


def test_a_train_function_sees_its_own_container(cluster):
    def look(ctx):
        import os
        import socket

        import torch

        ctx.protect(model=torch.nn.Linear(2, 2))
        for _ in ctx.steps(1):
            with ctx.step():
                pass
        try:
            open("/usr/written", "w").close()
        except OSError as error:
            return socket.gethostname(), os.getuid(), type(error).__name__

    values = cluster.submit(look).result(timeout=JOB_S).values.values()
    assert len({name for name, _, _ in values}) == 2
    assert all(uid != 0 and problem in ("OSError", "PermissionError") for _, uid, problem in values)


def test_the_controller_listens_on_the_bridge_only(cluster, client):
    [things] = engine.owned(client, cluster.name)
    [network] = things.networks
    gateway = client.inspect_network(network)["IPAM"]["Config"][0]["Gateway"]
    pid = next(event.data["pid"] for event in reversed(cluster.events) if event.kind == "controller.started")
    listening = subprocess.run(["cat", f"/proc/{pid}/net/tcp"], capture_output=True, text=True, check=True).stdout
    inodes = {os.readlink(f"/proc/{pid}/fd/{fd}")[8:-1] for fd in os.listdir(f"/proc/{pid}/fd")
              if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:[")}
    rows = [line.split() for line in listening.splitlines()[1:]]
    found = {".".join(str(byte) for byte in reversed(bytes.fromhex(row[1].split(":")[0])))
             for row in rows if row[3] == "0A" and row[9] in inodes}
    assert found == {gateway}, "clients come through a socket file"


def test_an_unshared_folder_for_checkpoints_is_refused(cluster, tmp_path):
    with pytest.raises(ConfigError, match="do not see"):
        cluster.submit(trains.plain, checkpoint=CheckpointConfig(directory=str(tmp_path)))


def test_two_clusters_side_by_side_and_a_new_container_when_there_is_no_spare(cluster, client, nothing_of_ours_stays,
                                                                              tmp_path):
    tmp_path.chmod(0o777)
    wanted = cluster.submit(trains.everything, steps=60).result(timeout=JOB_S).digest
    with ftlab.Cluster(nodes=1, spares=0, backend="docker", echo=None, share=[str(tmp_path)]) as other:
        pending = cluster.inject(faults.kill("rank-0", at_step=20))
        saving = CheckpointConfig(directory=str(tmp_path), every=10)
        jobs = [cluster.submit(trains.everything, steps=60),
                other.submit(trains.everything, steps=60, checkpoint=saving)]
        reports = [job.result(timeout=JOB_S) for job in jobs]
        assert (reports[0].digest, reports[0].recoveries, reports[1].recoveries) == (wanted, 1, 0)
        assert any(tmp_path.iterdir()), "nothing was saved to the shared folder"
        addresses = [{event.data["address"] for event in each.events if event.kind == "node.joined"}
                     for each in (cluster, other)]
        assert not addresses[0] & addresses[1]
    receipt = pending.wait().receipt
    assert (receipt["status"], receipt["exit_code"], receipt["engine_status"]) == ("killed by SIGKILL", 137, "exited")
    assert receipt["left"] == []
    created = [event for event in cluster.events if event.kind == "node.created"]
    assert len(created) == 3 and all(event.data["start_s"] > 0 for event in created)
    victim = f"{cluster.name}-{pending.wait().target}"
    wait_for(lambda: not any(victim in things.containers for things in engine.owned(client, cluster.name)), SOON_S,
             lambda: f"{victim} was not removed")


_OWNER = """
import sys, time, ftlab
cluster = ftlab.Cluster(nodes=1, spares=0, backend="docker", echo=None)
print(cluster.name, cluster._launcher.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner() -> Iterator[tuple[subprocess.Popen, str, int]]:
    process = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        name, launcher = process.stdout.readline().split()
        yield process, name, int(launcher)
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


@contextlib.contextmanager
def left_alone(cluster: str) -> Iterator[None]:
    """Nobody else removes what this cluster left, though its launcher is gone: every other test that starts
    containers would, and so would `ftlab reap`."""
    with (runs_dir() / f"{cluster}.lock").open("xb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        os.unlink(lock.name)


@pytest.fixture
def stranger(client) -> Iterator[str]:
    """A container that is not ours."""
    name = client.create_container(ensure_empty(client), ["/none"], labels={"somebody": "else"})["Id"]
    yield name
    client.remove_container(name, force=True)


def test_an_owner_that_is_killed_leaves_nothing(owner, client):
    process, name, _ = owner
    assert engine.owned(client, name)
    process.kill()
    wait_for(lambda: not engine.owned(client, name), START_S,
             lambda: f"stayed: {engine.owned(client, name)}")


def test_nodes_end_themselves_when_the_launcher_is_killed_and_reap_removes_the_rest_and_nothing_else(
        stranger, owner, client):
    process, name, launcher = owner

    def states() -> list[tuple[str, int]]:
        found = [client.inspect_container(each)["State"] for things in engine.owned(client, name)
                 for each in things.containers]
        return [(each["Status"], each["ExitCode"]) for each in found]

    with left_alone(name):
        os.kill(launcher, signal.SIGKILL)
        wait_for(lambda: states() == [("exited", 0)], START_S, lambda: f"nodes without a launcher: {states()}")
        process.kill()
        process.wait()
    [row] = [row for row in reap() if row.cluster == name]
    assert row.things is not None and (len(row.things.containers), len(row.things.networks)) == (1, 1)
    assert engine.owned(client, name) == []
    assert client.inspect_container(stranger)["State"]["Status"] == "created"


def test_more_memory_than_there_is_is_refused_before_anything_starts(nothing_of_ours_stays):
    with pytest.raises(ClusterError, match="the engine has"):
        ftlab.Cluster(nodes=4, spares=1, backend="docker", memory_mb=10_000_000, echo=None)
