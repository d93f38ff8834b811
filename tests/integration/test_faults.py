"""Faults: each fired (receipt), was detected (event), ended in the bits of an undisturbed run, and left nothing."""

from __future__ import annotations

import time

import pytest

import ftlab
from ftlab import faults
from ftlab.cluster.abilities import no_packet_loss
from ftlab.cluster.cgroups import available as cages_available
from ftlab.drill import DRILLS, run_drill, run_random
from ftlab.errors import FaultError, FaultUnavailable, StateLost, UnknownFault, UnknownNode
from ftlab.faults.catalogue import WAYS
from tests import trains
from tests.conftest import require
from tests.limits import JOB_S

GENEROUS = {"node": 50, "crash": 50, "stall": 50, "link": 50}


@pytest.fixture(scope="module")
def twins() -> dict:
    return {}


VERDICTS = {("oom", "allocation"): "equivalent", ("oom", "kernel"): "equivalent", ("nan", "again"): "diverged"}


ONLY_CONTAINERS = ("disk",)


@pytest.mark.parametrize("name", ONLY_CONTAINERS)
def test_a_drill_that_processes_cannot_do_is_refused_before_anything_starts(name):
    with pytest.raises(FaultUnavailable, match="needs containers"):
        run_drill(name)


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in DRILLS if name not in ONLY_CONTAINERS
                                           for way in (WAYS[name] if name in ("nan", "oom") else ("",))])
def test_every_drill_holds(name, way, twins):
    if name in ("partition", "split", "link"):
        require("filters", not no_packet_loss(), no_packet_loss())
    if way == "kernel":
        require("cgroups", not cages_available(), cages_available())
    report = run_drill(name, twin=twins.get("drill"), steps=60 if way == "kernel" else 100, seed=1, way=way)
    twins["drill"] = report.twin
    assert report.failed_expectations == [], report.repeat
    assert report.injected == 1 and report.leaked == 0
    assert report.facts["verdict"] == VERDICTS.get((name, way), "identical")


@pytest.mark.parametrize("seed", [8, 28, 68, 153])  # each of these once found a bug
def test_random_schedules_hold(seed):
    require("filters", not no_packet_loss(), no_packet_loss())
    report = run_random(faults=4 if seed == 68 else 3, seed=seed)
    assert report.failed_expectations == [], report.repeat


@pytest.fixture(scope="module")
def cluster():
    with ftlab.Cluster(nodes=4, spares=2, echo=None) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def digest_of(cluster):
    """The digest of an undisturbed run with the same arguments; trained once."""
    known: dict[tuple, str] = {}

    def look_up(train, **options) -> str:
        key = (train.__name__, *sorted(options.items()))
        if key not in known:
            known[key] = cluster.submit(train, **options).result(timeout=JOB_S).digest
        assert known[key] is not None, "the ranks of the undisturbed run disagree"
        return known[key]

    return look_up


@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_all_that_is_protected_survives_a_kill(cluster, digest_of, ddp, rank):
    wanted = digest_of(trains.everything, ddp=ddp)
    job = cluster.submit(trains.everything, ddp=ddp, budgets=GENEROUS)
    pending = cluster.inject(faults.kill(f"rank-{rank}", at_step=21))  # between the two halves of an update
    report = job.result(timeout=JOB_S)
    assert pending.wait().receipt["status"] == "killed by SIGKILL"
    assert (report.digest, report.source, report.value["seen"]) == (wanted, "live", 60)
    stuck = [event.data["detail"] for event in report.events if event.kind == "worker.failed"]
    assert len(stuck) <= ddp and all("did not stop within" in each for each in stuck), stuck  # docs/recovery.md: gloo
    assert report.worlds == [4] * (2 + len(stuck)), "may lose a send under DDP, and that worker is started again"


@pytest.mark.parametrize("kind", ["kill", "hang", "partition"])
@pytest.mark.parametrize("where", ["inside", "between"])
def test_a_fault_inside_and_between_collectives(cluster, digest_of, kind, where):
    """The victim comes 50 ms late to each collective: the others are inside it when it is hit; rank 2 is hit too."""
    if kind == "partition":
        require("filters", not no_packet_loss(), no_packet_loss())
    wanted = digest_of(trains.slow_victim)
    job = cluster.submit(trains.slow_victim, budgets=GENEROUS)
    heal = 1.0 if kind != "kill" else None
    cluster.inject(faults.make(kind, "rank-1" if where == "inside" else "rank-2", at_step=10, after=0.02,
                               heal_after=heal))
    report = job.result(timeout=JOB_S)
    assert (report.injected, report.digest, report.steps_lost) == (1, wanted, 0)
    assert report.detection_s is not None and report.recoveries >= 1
    if heal:
        job.wait_for("fault.healed")


def test_healthy_processes_are_never_restarted(cluster):
    job = cluster.submit(trains.plain, steps=60, budgets=GENEROUS)
    job.wait_for_step(10)
    before = {worker["pid"] for node in cluster.status()["nodes"] for worker in node["workers"].values()}
    victim = next(node for node in cluster.status()["nodes"] if 1 in node["ranks"])
    cluster.inject(faults.kill(victim["name"]))
    job.wait_for("recovery.finished")
    seated = [node for node in cluster.status()["nodes"] if node["ranks"]]
    after = {worker["pid"] for node in seated for worker in node["workers"].values()}
    assert after < before and len(after) == 4
    job.result(timeout=JOB_S)


def test_the_replacement_takes_the_dead_nodes_rank(cluster):
    job = cluster.submit(trains.plain, steps=50, budgets=GENEROUS)
    job.wait_for_step(10)
    cluster.inject(faults.kill("rank-2"))
    report = job.result(timeout=JOB_S)
    first, second = [event.data["table"]["seats"] for event in report.events if event.kind == "membership.changed"]
    changed = [seat["rank"] for seat, other in zip(first, second, strict=True) if seat["node"] != other["node"]]
    assert changed == [2]


@pytest.mark.parametrize(("second", "when", "generations"), [
    ("rank-0", "recovery.started", (2, 3)),  # another dies while the first is replaced: before or after the new table
    ("rank-1", "membership.changed", (3,)),  # the replacement dies: a table that names it is of no use any more
    ("controller", "recovery.started", (2, 3)),
])
def test_a_failure_during_recovery_leads_to_a_world_without_the_dead(cluster, digest_of, second, when, generations):
    wanted = digest_of(trains.everything)
    job = cluster.submit(trains.everything, budgets=GENEROUS)
    job.wait_for_step(15)
    cluster.inject(faults.kill("rank-1"))
    job.wait_for(when, count=1 if when == "recovery.started" else 2)
    cluster.inject(faults.controller() if second == "controller" else faults.kill(second))
    report = job.result(timeout=JOB_S)
    assert (report.injected, report.digest, report.steps_lost) == (2, wanted, 0)
    dead = {event.source for event in report.events if event.kind == "node.died"}
    tables = [event.data["table"]["seats"] for event in report.events if event.kind == "membership.changed"]
    assert len(dead) == (1 if second == "controller" else 2) and len(tables) in generations
    assert not dead & {seat["node"] for seat in tables[-1]}


def test_the_sender_dies_in_mid_transfer(cluster, digest_of):
    wanted = digest_of(trains.large)
    job = cluster.submit(trains.large, budgets=GENEROUS)
    job.wait_for_step(3)
    cluster.inject(faults.kill("rank-1"))
    job.wait_for("membership.changed", count=2)
    time.sleep(0.25)  # 200 MB take longer than this to send; rank 0 is the first holder, so it sends
    cluster.inject(faults.kill("rank-0"))
    report = job.result(timeout=JOB_S)
    assert any(event.kind == "recovery.abandoned" for event in report.events)
    assert (report.digest, report.steps) == (wanted, 8)


def test_a_stalled_worker_is_replaced_and_its_node_only_the_second_time(cluster):
    job = cluster.submit(trains.plain, steps=150, budgets=GENEROUS)
    job.wait_for_step(20)
    victim = next(node["name"] for node in cluster.status()["nodes"] if 1 in node["ranks"])
    cluster.inject(faults.stall(victim))
    job.wait_for("recovery.finished")
    assert victim in [node["name"] for node in cluster.status()["nodes"] if 1 in node["ranks"]]
    cluster.inject(faults.stall(victim))
    report = job.result(timeout=JOB_S)
    kinds = [event.data["action"] for event in report.events if event.kind == "action.decided"]
    assert "Restart" in kinds and "Replace" in kinds


def test_two_workers_per_node_die_and_come_back_together():
    with ftlab.Cluster(nodes=2, spares=1, procs_per_node=2, echo=None) as cluster:
        wanted = cluster.submit(trains.everything).result(timeout=JOB_S).digest
        job = cluster.submit(trains.everything)
        cluster.inject(faults.kill("rank-2", at_step=20))
        report = job.result(timeout=JOB_S)
        assert (report.digest, report.worlds) == (wanted, [4, 4])
        job = cluster.submit(trains.everything)
        cluster.inject(faults.crash("rank-0", local_rank=1, at_step=20))
        report = job.result(timeout=JOB_S)
        assert (report.digest, report.injected, report.recoveries) == (wanted, 1, 1)
        assert [event.rank for event in report.events if event.kind == "worker.failed"] == [1]


def test_without_a_spare_a_new_node_is_started():
    with ftlab.Cluster(nodes=2, spares=0, echo=None) as cluster:
        wanted = cluster.submit(trains.everything).result(timeout=JOB_S).digest
        job = cluster.submit(trains.everything)
        cluster.inject(faults.kill("node-1", at_step=20))
        report = job.result(timeout=JOB_S)
        assert (report.digest, report.worlds) == (wanted, [2, 2])
        assert [event.source for event in report.events if event.kind == "node.requested"] == ["node-2"]


def test_shrinks_to_the_survivors_and_grows_again_in_the_same_bits():
    with ftlab.Cluster(nodes=4, spares=0, replace=False, echo=None) as cluster:
        options = {"exact": True, "min_nodes": 2, "steps": 300}
        wanted = cluster.submit(trains.everything, **options).result(timeout=JOB_S).digest
        job = cluster.submit(trains.everything, **options)
        cluster.inject(faults.hang("node-1", at_step=20, heal_after=1.5))
        report = job.result(timeout=JOB_S)
        assert report.worlds == [4, 3, 4]
        assert report.digest == wanted is not None
        actions = [event.data["action"] for event in report.events if event.kind == "action.decided"]
        assert actions == ["Shrink", "Grow"]


def test_below_its_minimum_the_job_ends_with_a_reason():
    with ftlab.Cluster(nodes=2, spares=0, replace=False, echo=None) as cluster:
        job = cluster.submit(trains.plain, steps=500)
        job.wait_for_step(5)
        cluster.inject(faults.kill("node-0"))
        with pytest.raises(ftlab.FtlabError, match="1 of 2 nodes are left, the job needs 2"):
            job.result(timeout=JOB_S)


def test_when_all_who_hold_the_state_die_the_error_says_so(cluster):
    job = cluster.submit(trains.plain, steps=500)
    job.wait_for_step(10)
    cluster.inject(faults.blackout())
    with pytest.raises(StateLost, match="no worker is left that holds step"):
        job.result(timeout=JOB_S)
    assert cluster.submit(trains.plain, steps=5).result(timeout=JOB_S).recovered  # the cluster itself lives on


def test_a_step_that_cannot_be_undone_is_not_passed_off_as_committed(cluster):
    job = cluster.submit(trains.changes_too_early, rehearse=False)  # else copies are kept for such a loop: tests/zoo
    job.wait_for_step(5)
    cluster.inject(faults.kill("rank-3"))  # comes last to the barrier: the others have changed and wait
    with pytest.raises(StateLost, match="only after its last collective"):
        job.result(timeout=JOB_S)


def test_unknown_faults_and_nodes_are_named(cluster):
    with pytest.raises(UnknownFault, match="faults are kill"):
        faults.make("meteor", "node-0")
    with pytest.raises(UnknownNode, match="node-99"):
        cluster.inject(faults.kill("node-99"))
    with pytest.raises(FaultError):
        cluster.inject(faults.crash("node-99"))
    with pytest.raises(UnknownFault, match="no drill is called"):
        run_drill("teatime")
