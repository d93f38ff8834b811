"""cluster/compose.yaml for real: a controller and nodes that nobody launched, and a Prometheus that watches them.

Grafana cannot be had here and is not started: its dashboard's queries are asked of the real Prometheus instead.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import ftlab
from ftlab import CheckpointConfig, faults
from ftlab.cluster import engine
from ftlab.errors import BadToken, FaultUnavailable
from ftlab.metrics import Exporter
from tests import trains
from tests.conftest import require
from tests.docker.built import BASE, TAG, built
from tests.limits import COMMAND_S, JOB_S, SOON_S, START_S

pytestmark = [pytest.mark.docker]
ASSETS = Path(__file__).parents[2] / "cluster"
PROMETHEUS = "ftlab-test-prometheus"
DASHBOARD = ASSETS / "grafana/dashboards/ftlab.json"


def compose_program() -> list[str]:
    """The compose that is installed: the engine's plugin, or the older program."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    return ["docker", "compose"] if plugin else ["docker-compose"] if shutil.which("docker-compose") else []


@dataclass
class Stack:
    """A project that is up."""

    project: str
    environment: dict[str, str]
    token: str

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [*compose_program(), "-p", self.project, "-f", str(ASSETS / "compose.yaml"), *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=COMMAND_S,
                              check=check)

    def up(self) -> None:
        """Start whatever does not run; Grafana cannot be had here."""
        self.run("up", "-d", "controller", "node", "prometheus")

    def containers(self, service: str) -> list[dict[str, Any]]:
        """The running containers of a service, as the engine sees them."""
        filters = {"label": [f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}"]}
        with contextlib.closing(engine.connect()) as client:
            return [client.inspect_container(each["Id"]) for each in client.containers(filters=filters)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.environment['FTLAB_PORT']}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What Prometheus answers; raises if it cannot parse the expression."""
        address = f"http://127.0.0.1:{self.environment['FTLAB_PROMETHEUS_PORT']}/api/v1/query"
        request = urllib.request.Request(address, data=urllib.parse.urlencode({"query": expression}).encode())
        with urllib.request.urlopen(request, timeout=SOON_S) as answer:
            return json.loads(answer.read())["data"]["result"]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack | None]:
    if isinstance(built(), str) or not compose_program() or not shutil.which("prometheus"):
        yield None  # the test is skipped before it asks
        return
    build_prometheus()
    token = secrets.token_hex(16)
    environment = {**os.environ, "FTLAB_TOKEN": token, "FTLAB_IMAGE": TAG, "FTLAB_DEAD_S": "8",
                   "FTLAB_PROMETHEUS_IMAGE": PROMETHEUS,
                   **{name: str(free_port()) for name in ("FTLAB_PORT", "FTLAB_PROMETHEUS_PORT")}}
    stack = Stack(f"ftlabtest{secrets.token_hex(3)}", environment, token)
    try:
        stack.up()
        wait_for(lambda: urllib.request.urlopen(f"{stack.url}/healthz", timeout=SOON_S), START_S, "the controller")
        yield stack
    finally:
        stack.run("down", "-v", "-t", "1", check=False)


@pytest.fixture(autouse=True)
def _parts(_with_engine: None) -> None:
    found = built()
    require("image", not isinstance(found, str), str(found))
    require("compose", bool(compose_program()), "neither `docker compose` nor docker-compose is installed")
    require("prometheus", bool(shutil.which("prometheus") and shutil.which("promtool")), "it is not installed")


@pytest.fixture
def cluster(stack: Stack) -> Iterator[ftlab.Cluster]:
    cloudpickle.register_pickle_by_value(trains)
    if len(stack.containers("node")) < 3:
        stack.up()  # also what an earlier test has killed
    cluster = ftlab.connect(stack.url, stack.token)
    try:
        wait_for(lambda: sum(node["joined"] and node["verdict"] == "ALIVE" for node in cluster.status()["nodes"]) >= 3,
                 START_S, "three nodes")
        yield cluster
    finally:
        cluster.close()
        cloudpickle.unregister_pickle_by_value(trains)


@functools.cache
def undisturbed() -> dict[int, str]:
    """How training ends on this machine's own processes, by the number of steps."""
    with ftlab.Cluster(nodes=2, spares=0, echo=None) as processes:
        return {steps: processes.submit(trains.everything, steps=steps).result(timeout=JOB_S).digest
                for steps in (150, 400)}


def build_prometheus() -> None:
    """An image like the official one, of Debian's program: nothing can be pulled here. Built once per program."""
    program = Path(os.path.realpath(shutil.which("prometheus") or ""))
    made_of = f"{program} {program.stat().st_size} {program.stat().st_mtime_ns}"
    with contextlib.closing(engine.connect()) as client:
        if client.images(PROMETHEUS, filters={"label": f"ftlab.test={made_of}"}):
            return
    text = (f"FROM {BASE}\nCOPY prometheus /bin/prometheus\nCOPY --chown=65534:65534 data /prometheus\n"
            f'USER 65534:65534\nLABEL ftlab.test="{made_of}"\nENTRYPOINT ["/bin/prometheus"]\n').encode()
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        recipe = tarfile.TarInfo("Dockerfile")
        recipe.size = len(text)
        tar.addfile(recipe, io.BytesIO(text))
        folder = tarfile.TarInfo("data")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
        tar.add(program, "prometheus")
    context.seek(0)
    with contextlib.closing(engine.connect(timeout_s=300.0)) as client:
        for line in client.build(fileobj=context, custom_context=True, tag=PROMETHEUS, rm=True, decode=True):
            assert "error" not in line, line


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        seen: Any = None
        with contextlib.suppress(OSError):
            seen = condition()
        if seen:
            return seen
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.2)


def address_of(container: dict[str, Any]) -> str:
    [network] = container["NetworkSettings"]["Networks"].values()
    return str(network["IPAddress"])


def kill_one_that_trains(stack: Stack, cluster: ftlab.Cluster) -> str:
    ranks = {node["address"]: node["name"] for node in cluster.status()["nodes"] if node["ranks"]}
    victim = next(each for each in stack.containers("node") if address_of(each) in ranks)
    subprocess.run(["docker", "kill", victim["Id"]], check=True, capture_output=True)
    return ranks[address_of(victim)]


def test_a_killed_node_is_replaced_by_the_spare_and_prometheus_sees_it(stack, cluster):
    job = cluster.submit(trains.everything, steps=150)
    job.wait_for_step(30)
    victim = kill_one_that_trains(stack, cluster)
    report = job.result(timeout=JOB_S)
    assert report.digest == undisturbed()[150] and set(report.facts["worlds"]) == {2}
    assert report.recoveries >= 1  # a very busy machine may add a false alarm of its own
    assert victim in [event.source for event in report.events if event.kind == "node.died"]

    def count(kind: str) -> int:
        return sum(event.kind == kind and event.data.get("cause") == "node" for event in cluster.events)

    def seen(name: str) -> float:
        return sum(float(row["value"][1]) for row in stack.query(name))

    wait_for(lambda: seen('up{job="ftlab"}') == 1, START_S, "the first scrape")
    wait_for(lambda: seen("ftlab_steps_total") == 150, START_S, "150 steps")
    wait_for(lambda: seen('ftlab_detections_total{cause="node"}') == count("recovery.started") > 0, START_S,
             "a detection")
    wait_for(lambda: seen('ftlab_recoveries_total{cause="node"}') == count("recovery.finished") > 0, START_S,
             "a recovery")
    wait_for(lambda: seen('increase(ftlab_detections_total{cause="node"}[5m])') > 0, START_S, "an increase")


def test_the_controllers_container_is_restarted_and_training_goes_on_in_the_same_world(stack, cluster):
    job = cluster.submit(trains.everything, steps=400)
    job.wait_for_step(50)
    [controller] = stack.containers("controller")
    subprocess.run(["docker", "restart", "-t", "1", controller["Id"]], check=True, capture_output=True)
    assert not job.done
    report = job.result(timeout=JOB_S)
    assert report.digest == undisturbed()[400] and report.worlds == [2] and report.recoveries == 0
    assert sum(event.kind == "controller.started" for event in cluster.events) >= 2, "it was away"


def test_checkpoints_go_to_the_volume_that_all_nodes_share(cluster):
    where = CheckpointConfig(directory="/checkpoints/run", every=10)
    report = cluster.submit(trains.everything, steps=40, checkpoint=where).result(timeout=JOB_S)
    assert any(event.kind == "checkpoint.committed" for event in report.events)
    assert not [event for event in report.events if event.kind == "checkpoint.failed"]


def test_everything_listens_on_the_loopback_only_and_is_locked_up(stack):
    for service in ("controller", "node", "prometheus"):
        for each in stack.containers(service):
            host = each["HostConfig"]
            ports = [bound["HostIp"] for bindings in (host["PortBindings"] or {}).values() for bound in bindings]
            assert set(ports) <= {"127.0.0.1"}
            assert host["CapDrop"] == ["ALL"] and not host["Privileged"]
            assert each["Config"]["User"].split(":")[0] not in ("", "0", "root")
            assert not any("docker.sock" in mount["Source"] for mount in each["Mounts"])
            assert service == "prometheus" or host["ReadonlyRootfs"]


def test_workers_do_not_inherit_the_token(stack, cluster):
    def look(ctx: Any) -> dict[str, str]:
        import os

        import torch

        ctx.protect(model=torch.nn.Linear(2, 2))
        for _ in ctx.steps(1):
            with ctx.step():
                pass
        return dict(os.environ)

    for found in cluster.submit(look).result(timeout=JOB_S).values.values():
        assert stack.token not in found.values()


def test_a_wrong_token_is_refused(stack):
    with pytest.raises(BadToken):
        ftlab.connect(stack.url, "wrong")


def test_faults_are_the_owners(cluster):
    with pytest.raises(FaultUnavailable, match="no launcher"):
        cluster.inject(faults.kill(cluster.status()["nodes"][0]["name"]))


def test_without_a_token_nothing_starts(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "FTLAB_TOKEN"}
    shutil.copytree(ASSETS, tmp_path / "cluster", ignore=shutil.ignore_patterns(".env"))
    done = subprocess.run([*compose_program(), "-f", "cluster/compose.yaml", "config"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode != 0 and "FTLAB_TOKEN" in done.stderr


# ---- Prometheus' rules and Grafana's dashboard --------------------------------------------------------------


def dashboard_queries() -> list[str]:
    page = json.loads(DASHBOARD.read_text())
    return [*(target["expr"] for panel in page["panels"] for target in panel["targets"]),
            *(each["expr"] for each in page["annotations"]["list"])]


def known_metrics() -> set[str]:
    """Every name that /metrics can show."""
    return {name for family in Exporter().registry.collect() for base in [family.name]
            for name in ([f"{base}_total"] if family.type == "counter" else
                         [f"{base}_bucket", f"{base}_sum", f"{base}_count"] if family.type == "histogram" else [base])}


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bftlab_[a-z_]+", expression))


def test_the_dashboard_shows_metrics_that_exist():
    queries = dashboard_queries()
    assert len(queries) > 15
    assert {name for each in queries for name in metrics_in(each)} <= known_metrics()
    shown = {name for each in queries for name in metrics_in(each)}
    missing = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known_metrics()} - \
        {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert not missing, "the dashboard does not show these"


def test_a_real_prometheus_understands_every_query_of_the_dashboard(stack):
    for expression in dashboard_queries():
        wait_for(lambda: isinstance(stack.query(expression), list), START_S, expression)  # noqa: B023
    with pytest.raises(urllib.error.HTTPError):
        stack.query("sum by (cause (ftlab_detections_total)")


def test_grafana_would_find_its_data_source_and_its_dashboard():
    page = json.loads(DASHBOARD.read_text())
    source = (ASSETS / "grafana/provisioning/datasources/ftlab.yaml").read_text()
    assert {panel["datasource"]["uid"] for panel in page["panels"]} == {"ftlab"} and "uid: ftlab" in source
    services = (ASSETS / "compose.yaml").read_text()
    folder = re.search(r"path: ([^}]+)}", (ASSETS / "grafana/provisioning/dashboards/ftlab.yaml").read_text())
    assert folder and f"./grafana/dashboards:{folder[1]}:ro" in services and "http://prometheus:9090" in source


def test_the_rules_name_metrics_that_exist_and_promtool_has_nothing_to_object():
    rules = ASSETS / "prometheus/rules.yml"
    assert metrics_in(rules.read_text()) <= known_metrics()
    checked = subprocess.run(["promtool", "check", "config", str(rules.parent / "prometheus.yml")], capture_output=True,
                             text=True, timeout=SOON_S)
    assert checked.returncode == 0, checked.stdout + checked.stderr


RULES_TEST = """
rule_files: [{rules}]
evaluation_interval: 1s
tests:
  - interval: 1s
    input_series:
      - {{series: 'up{{job="ftlab"}}', values: '1x100 0x30'}}
      - {{series: 'ftlab_detections_total{{cause="node"}}', values: '0x9 1x200'}}
      - {{series: 'ftlab_recoveries_total{{cause="node"}}', values: '{recoveries}'}}
      - {{series: 'ftlab_nodes', values: '2x200'}}
      - {{series: 'ftlab_world_size', values: '2x200'}}
    alert_rule_test:
      - {{eval_time: 60s, alertname: FtlabNotRecovered, exp_alerts: [{not_recovered}]}}
      - {{eval_time: 90s, alertname: FtlabNoSpare, exp_alerts: [{{exp_labels: {{severity: warning}},
          exp_annotations: {{summary: "No spare is left: the next lost node shrinks the job, or ends it."}}}}]}}
      - {{eval_time: 90s, alertname: FtlabControllerDown, exp_alerts: []}}
      - {{eval_time: 90s, alertname: FtlabFailingOften, exp_alerts: []}}
      - eval_time: 120s
        alertname: FtlabControllerDown
        exp_alerts: [{{exp_labels: {{severity: critical, job: ftlab}},
          exp_annotations: {{summary: "The controller does not answer; training goes on until its lease runs out."}}}}]
"""
FIRES = ('{exp_labels: {severity: critical}, exp_annotations: {summary: "A failure was noticed, and no recovery has '
         'led to a step since."}}')


@pytest.mark.parametrize(("recoveries", "not_recovered"), [("0x200", FIRES), ("0x11 1x200", "")],
                         ids=["stuck", "recovered"])
def test_an_alert_comes_when_it_should(tmp_path, recoveries, not_recovered):
    file = tmp_path / "test.yml"
    file.write_text(RULES_TEST.format(rules=ASSETS / "prometheus/rules.yml", recoveries=recoveries,
                                      not_recovered=not_recovered))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, done.stdout + done.stderr
