"""A cluster with a network of its own: packets are lost there whoever one is, and nobody outside can knock.

As root it is asked for by name, so that all of this is tried everywhere; the last tests are an ordinary user's.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

import ftlab
from ftlab import faults
from ftlab.cluster import private_network
from ftlab.cluster.runs import labelled
from ftlab.errors import ConfigError
from tests import ordinary, trains
from tests.conftest import require
from tests.limits import COMMAND_S, JOB_S, SOON_S
from tests.ordinary import run_as_ordinary

GENEROUS = {"node": 50, "crash": 50, "stall": 50, "link": 50}


@pytest.fixture(autouse=True)
def _networks():
    require("private", not private_network.why_not(), private_network.why_not())


@pytest.fixture(scope="module")
def cluster():
    require("private", not private_network.why_not(), private_network.why_not())
    with ftlab.Cluster(nodes=3, spares=2, network="private", echo=None) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster) -> str:
    return cluster.submit(trains.plain, steps=60).result(timeout=JOB_S).digest


@pytest.mark.parametrize("fault", [
    faults.partition("rank-1", heal_after=1.0, at_step=20),
    faults.partition(["rank-0", "rank-1"], heal_after=1.0, at_step=20),
    faults.partition("rank-2", way="sends", heal_after=1.0, at_step=20),
    faults.partition("rank-2", way="receives", heal_after=1.0, at_step=20),
], ids=["both ways", "a group", "sends", "receives"])
def test_a_cut_is_detected_and_ends_in_the_same_bits(cluster, undisturbed, fault):
    job = cluster.submit(trains.plain, steps=60, budgets=GENEROUS)
    receipt = cluster.inject(fault).wait(JOB_S).receipt
    report = job.result(timeout=JOB_S)
    assert receipt["filtered"] == receipt["sockets"] > 0
    assert report.detection_s is not None and report.recoveries >= 1
    assert (report.injected, report.digest, report.steps_lost) == (1, undisturbed, 0)
    job.wait_for("fault.healed")


def test_a_lossy_link_ends_in_the_same_bits(cluster, undisturbed):
    job = cluster.submit(trains.plain, steps=60, budgets=GENEROUS)
    receipt = cluster.inject(faults.link("rank-1", loss=0.2, heal_after=1.0, at_step=20)).wait(JOB_S).receipt
    report = job.result(timeout=JOB_S)
    assert receipt["filtered"] == receipt["sockets"] > 0
    assert (report.injected, report.digest) == (1, undisturbed)
    job.wait_for("fault.healed")


def test_nothing_that_listens_is_on_the_hosts_network(cluster):
    cluster.submit(trains.plain, steps=3).result(timeout=JOB_S)
    pids = labelled()[cluster.name]
    assert {os.readlink(f"/proc/{pid}/ns/net") for pid in pids} != {os.readlink("/proc/self/ns/net")}
    inside = _listening(Path(f"/proc/{pids[0]}/net"))
    assert len(inside) >= 2  # the controller's port, and its store's
    assert not inside & _listening(Path("/proc/net"))


def test_clients_come_through_a_file_that_only_its_owner_can_open(cluster):
    path = Path(cluster.url.removeprefix("unix://"))
    assert stat.S_ISSOCK(path.stat().st_mode) and path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    again = ftlab.connect(cluster.name)
    assert again.submit(trains.plain, steps=3).result(timeout=JOB_S).steps == 3
    again.close()


def test_the_controller_comes_back_behind_the_same_file(cluster):
    job = cluster.submit(trains.plain, steps=60)
    cluster.inject(faults.controller(at_step=20))
    assert job.result(timeout=JOB_S).steps == 60
    assert cluster.status()["nodes"]


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "https://example.org/run"])
def test_storage_that_needs_the_network_is_refused_at_once(cluster, url):
    with pytest.raises(ConfigError, match="cannot be reached") as refusal:
        cluster.submit(trains.plain, checkpoint=ftlab.CheckpointConfig(directory=url))
    assert "network='host'" in str(refusal.value)


def test_a_folder_needs_no_network(cluster, tmp_path):
    saving = ftlab.CheckpointConfig(directory=f"file://{tmp_path}", every=5)
    cluster.submit(trains.plain, steps=10, checkpoint=saving).result(timeout=JOB_S)
    assert list(tmp_path.iterdir())


def test_a_port_that_is_asked_for_is_the_hosts(tmp_path):
    with ftlab.Cluster(nodes=1, spares=0, network="private", port=0, echo=None) as cluster:
        assert cluster.url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{cluster.url}/healthz", timeout=SOON_S) as answer:
            assert json.loads(answer.read())["ok"]
        assert cluster.submit(trains.plain, steps=3).result(timeout=JOB_S).steps == 3


@pytest.mark.parametrize("network", ["host", "private"])
def test_a_folder_may_lie_deeper_than_a_sockets_name_may_be_long(tmp_path, monkeypatch, network):
    with tempfile.TemporaryDirectory(prefix="ftlab-test-") as folder:
        monkeypatch.setenv("FTLAB_RUNS", f"{folder}/{'deep/' * 25}runs")
        with ftlab.Cluster(nodes=1, spares=0, network=network, echo=None) as cluster:
            assert cluster.submit(trains.plain, steps=3).result(timeout=JOB_S).steps == 3
            cluster.inject(faults.kill("node-0"))  # the launcher's own socket
        assert not list(Path(os.environ["FTLAB_RUNS"]).iterdir())


def test_everything_that_is_tried_of_packets_holds_in_a_private_network():
    code = ("import sys, pytest; from ftlab.cluster.private_network import enter; enter(); "
            "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/unit/cluster/test_packets.py']))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ordinary.ROOT, capture_output=True, text=True,
                          timeout=COMMAND_S, env={**os.environ, "FTLAB_REQUIRE": "filters"})
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout


_PARTITION = """
import json, ftlab
from ftlab import faults
from ftlab.cluster import packets
from tests import trains
from tests.limits import JOB_S, SOON_S
def rights(ctx):
    return open("/proc/self/status").read().partition("CapEff:")[2].split()[0]
with ftlab.Cluster(nodes=2, spares=1, network="auto" if packets.available() else "private", echo=None) as cluster:
    rights = cluster.submit(rights).result(timeout=JOB_S).value
    wanted = cluster.submit(trains.plain, steps=60).result(timeout=JOB_S).digest
    job = cluster.submit(trains.plain, steps=60)
    pending = cluster.inject(faults.partition("rank-1", heal_after=1.0, at_step=20))
    report = job.result(timeout=JOB_S)
    receipt = pending.wait(SOON_S).receipt
print(json.dumps({"rights": rights, "network": cluster.config.network, "filtered": receipt["filtered"],
                  "same": report.digest == wanted, "recoveries": report.recoveries}))
"""


def test_an_ordinary_user_gets_partitions_and_his_code_no_rights(tmp_path):
    require("ordinary", not ordinary.why_not(), ordinary.why_not())
    said = json.loads(run_as_ordinary(_PARTITION, tmp_path))
    assert said["network"] == "private"
    assert said["filtered"] > 0 and said["same"] and said["recoveries"] >= 1
    assert int(said["rights"], 16) == 0
    assert not list(tmp_path.glob("ftlab-*/*"))


_FORBIDDEN = """
from pathlib import Path
from ftlab.cluster.jailed import unshare
unshare(0)  # only the user namespace: what is forbidden in it is forbidden to nobody else
Path("/proc/sys/user/max_user_namespaces").write_text("0")
import json, ftlab
from ftlab import faults
from ftlab.cluster import abilities, packets, private_network
from ftlab.errors import ClusterError, FaultUnavailable
from tests import trains
from tests.limits import JOB_S
said = {"why_not": private_network.why_not(), "loss": abilities.no_packet_loss(), "on_host": packets.available()}
with ftlab.Cluster(nodes=1, spares=0, echo=None) as cluster:
    said["steps"] = cluster.submit(trains.plain, steps=3).result(timeout=JOB_S).steps
    said["network"] = cluster.config.network
    try:
        cluster.inject(faults.partition("node-0"))
        said["fault"] = ""
    except FaultUnavailable as error:
        said["fault"] = error.message
try:
    ftlab.Cluster(nodes=1, spares=0, network="private", echo=None)
except ClusterError as error:
    said["private"] = str(error)
print(json.dumps(said))
"""


def test_where_namespaces_are_forbidden_the_cluster_runs_and_the_fault_says_why(tmp_path):
    require("ordinary", not ordinary.why_not(), ordinary.why_not())
    said = json.loads(run_as_ordinary(_FORBIDDEN, tmp_path))
    assert (said["network"], said["steps"]) == ("host", 3)
    assert "user.max_user_namespaces=0" in said["why_not"] and "user.max_user_namespaces=0" in said["private"]
    if said["on_host"]:  # else filters are allowed to everybody here
        assert "cutting a node off is not possible here" in said["fault"]
        assert said["on_host"] in said["fault"] and said["why_not"] in said["fault"]


def _listening(net: Path) -> set[int]:
    """The inodes of the sockets that listen on one network."""
    rows = [line.split() for table in ("tcp", "tcp6") if (net / table).exists()
            for line in (net / table).read_text().splitlines()[1:]]
    return {int(row[9]) for row in rows if row[3] == "0A"}
