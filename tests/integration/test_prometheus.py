"""A real Prometheus scrapes a real cluster while it is broken and heals."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request

import pytest

import ftlab
from ftlab import faults
from tests import trains
from tests.conftest import require
from tests.limits import JOB_S, SOON_S

pytestmark = pytest.mark.prometheus


@pytest.fixture(autouse=True)
def _programs():
    require("prometheus", bool(shutil.which("prometheus") and shutil.which("promtool")), "it is not installed")


@pytest.fixture(scope="module")
def cluster():
    with ftlab.Cluster(nodes=2, spares=1, port=0, echo=None) as cluster:
        yield cluster


@pytest.fixture
def prometheus(cluster, tmp_path):
    """A Prometheus that scrapes the cluster twice a second; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    target = cluster.url.removeprefix("http://")
    (tmp_path / "prometheus.yml").write_text(
        f"scrape_configs: [{{job_name: ftlab, scrape_interval: 500ms, scrape_timeout: 500ms, "
        f"static_configs: [{{targets: ['{target}']}}]}}]\n")
    with subprocess.Popen(["prometheus", f"--config.file={tmp_path}/prometheus.yml",
                           f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"],
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        yield f"http://127.0.0.1:{port}"
        server.terminate()


def _query(address: str, expression: str) -> float | None:
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=SOON_S) as answer:
            found = json.loads(answer.read())["data"]["result"]
    except OSError:
        return None  # still starting
    return float(found[0]["value"][1]) if found else None


def test_what_prometheus_sees_is_what_happened(cluster, prometheus):
    job = cluster.submit(trains.plain, steps=120)
    cluster.inject(faults.kill("rank-1", at_step=40))
    report = job.result(timeout=JOB_S)
    wanted = {
        "ftlab_steps_total": 120, "ftlab_world_size": 2, "ftlab_generation": report.events[-1].generation,
        'ftlab_detections_total{cause="node"}': 1, 'ftlab_recovery_seconds_count{cause="node"}': 1,
        'ftlab_faults_injected_total{fault="kill"}': 1, "up": 1}
    deadline = time.monotonic() + SOON_S
    while (seen := {name: _query(prometheus, name) for name in wanted}) != wanted:
        assert time.monotonic() < deadline, seen
        time.sleep(0.2)


def test_promtool_has_nothing_to_object(cluster):
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=SOON_S) as answer:
        text = answer.read()
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=SOON_S)
    assert checked.returncode == 0, checked.stdout.decode() + checked.stderr.decode()
