"""The controller's port: who may enter, what it tells, and where it listens."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request

import psutil
import pytest

import ftlab
from ftlab import faults
from ftlab.errors import BadToken, FtlabError, PortInUse
from tests import trains
from tests.limits import JOB_S, SOON_S


@pytest.fixture(scope="module")
def cluster():
    with ftlab.Cluster(nodes=2, spares=1, port=0, echo=None) as cluster:
        yield cluster


def _get(url: str, token: str = "") -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=SOON_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("path", ["/api/status", "/api/jobs/00ff", "/api/jobs/00ff/code", "/api/events", "/nowhere"])
@pytest.mark.parametrize("token", ["", "wrong"])
def test_nothing_is_told_without_the_token(cluster, path, token):
    status, body = _get(cluster.url + path, token)
    assert status == 401 and json.loads(body)["error"] == "BadToken"


def test_a_wrong_token_opens_no_link_and_runs_no_code(cluster):
    for path in ("/node", "/api/stream"):
        request = urllib.request.Request(cluster.url + path, headers={
            "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Authorization": "Bearer wrong"})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=SOON_S)
    stranger = ftlab.cluster.client.ApiClient(cluster.url, "wrong", cluster._folder)
    with pytest.raises(BadToken):
        stranger.post("/api/jobs", b"code", X_Ftlab_Job="{}")
    with pytest.raises(BadToken):
        stranger.order(do="close")
    assert cluster.status()["nodes"]


def test_health_and_metrics(cluster):
    before = _metric(cluster, "ftlab_steps_total")
    job = cluster.submit(trains.plain, steps=40)
    cluster.inject(faults.kill("rank-1", at_step=10))
    report = job.result(timeout=JOB_S)
    assert json.loads(_get(cluster.url + "/healthz")[1])["ok"]
    assert _metric(cluster, "ftlab_steps_total") - before == 40
    assert _metric(cluster, "ftlab_world_size") == 2
    assert _metric(cluster, "ftlab_generation") == report.events[-1].generation
    assert _metric(cluster, 'ftlab_detections_total{cause="node"}') == 1
    assert _metric(cluster, 'ftlab_recovery_seconds_count{cause="node"}') == 1
    assert _metric(cluster, 'ftlab_recovery_phase_seconds_count{phase="connect"}') == 1
    assert _metric(cluster, 'ftlab_faults_injected_total{fault="kill"}') == 1


def test_counters_go_on_after_the_controller_was_killed(cluster):
    cluster.submit(trains.plain, steps=10).result(timeout=JOB_S)
    before = _metric(cluster, "ftlab_steps_total")
    cluster.inject(faults.controller())
    cluster.submit(trains.plain, steps=10).result(timeout=JOB_S)
    assert _metric(cluster, "ftlab_steps_total") == before + 10


def test_all_that_listens_listens_on_loopback_only(cluster):
    cluster.submit(trains.plain, steps=3).result(timeout=JOB_S)
    pids = {process.pid for process in psutil.process_iter()
            if _label(process) == cluster.name}
    listening = [conn for conn in psutil.net_connections("tcp") if conn.pid in pids and conn.status == "LISTEN"]
    assert listening
    assert all(conn.laddr.ip.startswith("127.") or conn.laddr.ip == "::1" for conn in listening), listening


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port}"):
            ftlab.Cluster(nodes=1, spares=0, port=port)


def test_clients_may_not_forge_the_log(cluster):
    with pytest.raises(FtlabError, match="may record fault"):
        cluster.record("step.committed", data={"step": 99})


def test_unknown_jobs_and_bad_bodies_get_an_answer(cluster):
    with pytest.raises(FtlabError, match="no job"):
        cluster.api.get("/api/jobs/00ff00ff")
    with pytest.raises(FtlabError, match="not JSON"):
        cluster.api.post("/api/watch", b"{")
    with pytest.raises(FtlabError, match="needs an id"):
        cluster.api.post("/api/jobs", b"code", X_Ftlab_Job="{}")


def _metric(cluster, name: str) -> float:
    for line in _get(cluster.url + "/metrics")[1].splitlines():
        if line.startswith(f"{name} "):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def _label(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("FTLAB_CLUSTER")
    except psutil.Error:
        return None
