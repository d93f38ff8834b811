"""Faults in containers: each fired, was detected, ended in the bits of an undisturbed run, and left nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

import ftlab
from ftlab import faults
from ftlab.cluster import engine, netrules
from ftlab.cluster.abilities import why_not
from ftlab.drill import DRILLS, run_drill, run_random
from ftlab.errors import FaultUnavailable
from tests import trains
from tests.conftest import require
from tests.limits import BATCH_S, JOB_S

pytestmark = [pytest.mark.docker]  # a busy machine starts five containers in minutes
SETTINGS = {"backend": "docker"}
RECEIPTS = {"kill": ("engine_status", "exited"), "hang": ("engine_status", "paused"), "partition": ("networks", []),
            "crash": ("status", "gone"), "split": ("status", "cut"), "link": ("loss", 0.2), "disk": ("free_bytes", 0)}


def drill(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A drill on the command line, in containers."""
    command = [sys.executable, "-m", "ftlab.cli.main", "drill", name, "--backend", "docker", "--steps", "100", "--seed",
               "1", "--json", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=BATCH_S)


def test_a_drill_holds_on_the_command_line(nothing_of_ours_stays):
    """The one that only containers can do; the contract of backends tries the usual faults."""
    done = drill("disk", "--nodes", "2", "--spares", "0")
    facts = json.loads(done.stdout)
    assert (done.returncode, facts["failed_expectations"]) == (0, []), done.stderr[-2000:]
    assert facts["verdict"] == "identical"
    assert facts["injections"][0]["receipt"]["free_bytes"] == 0
    assert facts["unsaved"] and facts["checkpoints"], "some saves failed, and others did not"


@pytest.mark.full
def test_all_drills_hold_on_the_command_line(nothing_of_ours_stays):
    done = drill("all")
    body = json.loads(done.stdout)
    failed = {row["drill"]: (row["failed_expectations"], row["repeat"]) for row in body["drills"] if not row["held"]}
    assert (done.returncode, failed, body["broken"], body["held"]) == (0, {}, {}, True), done.stderr[-2000:]
    for name, reason in body["left_out"].items():
        require("rules", False, f"{name}: {reason}")
    rows = {row["drill"]: row for row in body["drills"]}
    assert set(rows) | set(body["left_out"]) == set(DRILLS)
    for name, (key, value) in RECEIPTS.items():
        if name in rows:
            assert rows[name]["injections"][0]["receipt"][key] == value, name
    loose = {"nan", "oom"}  # by their way: see below
    assert {name: row["verdict"] for name, row in rows.items() if name not in loose} == {
        name: "identical" for name in rows if name not in loose}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ftlab.Cluster | None]:
    if engine.available():
        yield None  # the test is skipped before it asks
        return
    with ftlab.Cluster(nodes=2, spares=1, backend="docker", echo=None) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def twins() -> dict:
    return {}


@pytest.mark.parametrize(("name", "way", "verdict"), [
    ("oom", "kernel", "equivalent"),
    *(pytest.param(*each, marks=pytest.mark.full) for each in (
        ("nan", "once", "identical"), ("nan", "again", "diverged"), ("oom", "allocation", "equivalent"),
        ("partition", "sends", "identical"), ("partition", "receives", "identical")))])
def test_every_way_of_a_fault_holds(name, way, verdict, twins, nothing_of_ours_stays):
    if name == "partition":
        require("rules", not why_not("split", "docker"), why_not("split", "docker"))
    size = {"nodes": 2, "spares": 0, "steps": 20} if way == "kernel" else {"steps": 100}  # it fills much memory
    report = run_drill(name, twin=twins.get("drill"), seed=1, way=way, settings=SETTINGS, **size)
    if way != "kernel":
        twins["drill"] = report.twin
    assert report.failed_expectations == [], report.repeat
    assert (report.injected, report.leaked, report.facts["verdict"]) == (1, 0, verdict)
    if way == "kernel":
        assert any(event.kind == "node.oom_killed" for event in report.events), "the kernel's kill was not read back"


def test_a_cut_in_one_way_drops_only_what_goes_that_way(cluster):
    require("rules", not why_not("split", "docker"), why_not("split", "docker"))
    wanted = cluster.submit(trains.everything, steps=60).result(timeout=JOB_S).digest
    pending = cluster.inject(faults.partition("rank-1", at_step=20, way="sends", heal_after=1.5))
    job = cluster.submit(trains.everything, steps=60)
    report = job.result(timeout=JOB_S)
    assert pending.wait().receipt["status"] == "cut" and report.detection_s is not None
    assert (report.digest, report.steps_lost) == (wanted, 0) and report.recoveries >= 1
    [counts] = job.wait_for("fault.healed").data["receipt"]["dropped"].values()
    assert set(counts) == {"sends"} and counts["sends"] > 0, "only this way, and the kernel has counted"


@pytest.mark.full
@pytest.mark.parametrize("seed", [2])
def test_a_random_schedule_holds(seed, nothing_of_ours_stays):
    report = run_random(seed=seed, settings=SETTINGS)
    assert report.failed_expectations == [], report.repeat


def test_what_the_kernel_cannot_do_is_refused_before_anything_starts(monkeypatch, nothing_of_ours_stays):
    monkeypatch.setattr("ftlab.cluster.abilities._CONTAINERS", {"split": lambda: "no rules here"})
    monkeypatch.setattr("ftlab.drill.drill.Cluster", lambda *args, **options: pytest.fail("a cluster was started"))
    with pytest.raises(FaultUnavailable, match="no rules here"):
        run_drill("split", settings=SETTINGS)


def test_a_slow_link_is_slow_and_a_late_one_is_refused_where_the_kernel_cannot(cluster):
    require("rules", not why_not("rate", "docker"), why_not("rate", "docker"))
    receipt = cluster.inject(faults.link("node-0", loss=0, rate_mbit=1)).receipt
    assert "tbf" in receipt["tc"] and "1Mbit" in receipt["tc"]
    healed = cluster.order(do="mend", node="node-0")
    assert "tbf" not in healed["tc"]
    if netrules.available("delay"):
        with pytest.raises(FaultUnavailable, match="a link with a delay is not possible here"):
            cluster.inject(faults.link("node-0", delay_ms=20, at_step=1000))
    with pytest.raises(FaultUnavailable, match="no small disk"):
        cluster.inject(faults.disk("node-0"))
