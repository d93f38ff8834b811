"""A fault at a step fires at that step: with short steps, of every kind, on a cluster that was just started."""

from __future__ import annotations

import time

import pytest

import ftlab
from ftlab import faults
from ftlab.config import CheckpointConfig
from ftlab.errors import StepPassed
from ftlab.faults import Fault
from tests import trains
from tests.conftest import require
from tests.limits import JOB_S, START_S

AT = 25
AIMED = {"controller": (), "blackout": (), "corrupt": ()}
STOPS_ALL = ("kill", "crash", "hang", "stall", "blackout", "corrupt")  # the next step is not committed without recovery


@pytest.fixture(scope="module")
def cluster():
    with ftlab.Cluster(nodes=3, spares=1, echo=None) as cluster:
        yield cluster


def plan(kind: str) -> Fault:
    heal = {"heal_after": 1.0} if kind in ("hang", "partition", "straggler", "link") else {}
    return getattr(faults, kind)(*AIMED.get(kind, ("rank-1",)), at_step=AT, **heal)


def fired_at(report: ftlab.Report, injection: faults.Injection) -> int:
    """How many steps were committed when the fault fired, by the times in the log."""
    return max((event.step for event in report.events
                if event.kind == "step.committed" and event.at <= injection.at), default=0)


def test_the_first_fault_on_a_fresh_cluster_fires_between_two_saves(tmp_path):
    with ftlab.Cluster(nodes=3, spares=1, echo=None) as cluster:
        saving = CheckpointConfig(directory=str(tmp_path), every=10)
        job = cluster.submit(trains.plain, 40, step_s=0.0, checkpoint=saving)
        pending = cluster.inject(faults.blackout(at_step=AT))
        report = job.result(timeout=JOB_S)
        injection = pending.wait(5)
        assert injection.receipt["step"] == AT == fired_at(report, injection)
        assert report.facts["steps_lost"] == 5 and report.facts["steps"] == 40


@pytest.mark.parametrize("kind", ["kill", "crash", "hang", "stall", "nan", "oom", "straggler", "partition", "link",
                                  "controller", "corrupt"])
def test_every_kind_of_fault_fires_at_its_step(cluster, tmp_path, kind):
    fault = plan(kind)
    reason = cluster.missing(fault.needs)
    require("filters", not reason, reason)
    saving = CheckpointConfig(directory=str(tmp_path), every=10) if kind == "corrupt" else None
    step_s = 0.02 if saving else 0.0005  # two saves must be there when the newer one is damaged
    job = cluster.submit(trains.plain, 60, step_s=step_s, checkpoint=saving)
    pending = cluster.inject(fault)
    report = job.result(timeout=JOB_S)
    injection = pending.wait(30)
    assert injection.receipt["step"] == AT == fired_at(report, injection), fault.describe()
    if kind in STOPS_ALL:
        (began,) = [event for event in report.events if event.kind == "recovery.started"][:1]
        assert began.at > injection.at and report.recoveries >= 1
    assert report.facts["steps"] == 60 and report.digest is not None
    cluster_is_whole(cluster)


def cluster_is_whole(cluster: ftlab.Cluster) -> None:
    """Four nodes are up again, for the next test."""
    deadline = time.monotonic() + START_S
    while sum(node["joined"] and node["verdict"] == "ALIVE" for node in cluster.status()["nodes"]) < 4:
        assert time.monotonic() < deadline, cluster.status()["nodes"]
        time.sleep(0.05)


def test_long_steps_are_exact_too(cluster):
    job = cluster.submit(trains.plain, 4, step_s=1.0)
    injection = cluster.inject(faults.crash("rank-2", at_step=2)).wait(60)
    report = job.result(timeout=JOB_S)
    assert injection.receipt["step"] == 2 == fired_at(report, injection) and report.recoveries == 1


def test_a_step_that_has_passed_is_refused_with_the_place_where_the_job_is(cluster):
    job = cluster.submit(trains.plain, 200, step_s=0.01)
    job.wait_for_step(30)
    with pytest.raises(StepPassed, match=r"step 10 has passed: the job is at step \d+"):
        cluster.inject(faults.kill("rank-1", at_step=10)).wait(30)
    assert job.result(timeout=JOB_S).recoveries == 0


def test_a_fault_at_a_step_that_never_comes_says_so(cluster):
    job = cluster.submit(trains.plain, 20, step_s=0.0)
    pending = cluster.inject(faults.kill("rank-1", at_step=500))
    assert job.result(timeout=JOB_S).recoveries == 0
    with pytest.raises(StepPassed, match="the job ended at step 20, before step 500 was reached"):
        pending.wait(30)
    assert not pending.fired


def test_a_fault_at_the_last_step_comes_before_the_train_function_returns(cluster):
    job = cluster.submit(trains.plain, 20, step_s=0.0)
    injection = cluster.inject(faults.crash("rank-1", at_step=20)).wait(60)
    report = job.result(timeout=JOB_S)
    assert injection.receipt["step"] == 20 and report.recoveries == 1 and report.facts["steps"] == 20


def test_two_faults_at_one_step_and_one_right_after_it_all_fire(cluster):
    job = cluster.submit(trains.plain, 60, step_s=0.001)
    plans = [faults.crash("rank-0", at_step=10), faults.crash("rank-1", at_step=10), faults.crash("rank-2", at_step=11)]
    pending = [cluster.inject(fault) for fault in plans]
    report = job.result(timeout=JOB_S)
    assert [each.wait(5).receipt["step"] for each in pending] == [10, 10, 11]
    assert report.recoveries >= 2 and report.facts["steps"] == 60


def test_a_fault_while_the_controller_is_away_waits_for_it(cluster):
    job = cluster.submit(trains.plain, 60, step_s=0.005)
    pending = [cluster.inject(faults.controller(at_step=10)), cluster.inject(faults.crash("rank-1", at_step=14))]
    report = job.result(timeout=JOB_S)
    assert [each.wait(30).receipt["step"] for each in pending] == [10, 14]
    assert report.facts["steps"] == 60 and report.recoveries == 1
