"""Wrong calls of the public surface: each is told as such, names its argument, and does nothing to the cluster."""

from __future__ import annotations

import pytest

import ftlab
from ftlab import faults
from ftlab.errors import ClusterClosed, FtlabError
from tests import trains
from tests.limits import JOB_S

NAN = float("nan")


@pytest.fixture(scope="module")
def cluster():
    with ftlab.Cluster(nodes=3, spares=0, echo=None) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def job(cluster):
    """One that runs while everybody calls wrongly."""
    job = cluster.submit(trains.plain, steps=100_000)
    job.wait_for_step(1)
    yield job
    job.cancel()
    job.wait_for_end()


WRONG = [  # a call, and what its error must name
    (lambda c, j: c.inject(faults.kill("rank-9")), "rank 9"),
    (lambda c, j: c.inject(faults.kill("rank-3")), "ranks are 0 to 2"),
    (lambda c, j: c.inject(faults.kill("rank-9", at_step=1)), "rank 9"),
    (lambda c, j: c.inject(faults.partition(["rank-0", "rank-7"])), "rank 7"),
    (lambda c, j: c.inject(faults.kill("rank-x")), "'rank-x'"),
    (lambda c, j: c.inject(faults.kill(2)), "got 2"),
    (lambda c, j: c.inject(faults.kill("")), "got ''"),
    (lambda c, j: c.inject(faults.kill(None)), "got None"),
    (lambda c, j: c.inject(faults.kill()), "needs a target"),
    (lambda c, j: c.inject(faults.kill("node-99")), "node-99"),
    (lambda c, j: c.inject(faults.kill("node-99", at_step=1)), "node-99"),
    (lambda c, j: c.inject(faults.crash("node-99")), "node-99"),
    (lambda c, j: c.inject(faults.hang("node-99", heal_after=1)), "node-99"),
    (lambda c, j: c.inject(faults.kill("spare")), "'spare'"),
    (lambda c, j: c.inject(faults.crash("node-1", local_rank=5)), "local_rank"),
    (lambda c, j: c.inject(faults.crash("node-1", local_rank="x")), "local_rank"),
    (lambda c, j: c.inject(faults.kill("node-1", at_step="x")), "at_step"),
    (lambda c, j: c.inject(faults.kill("node-1", at_step=-1)), "at_step"),
    (lambda c, j: c.inject(faults.kill("node-1", after=NAN)), "after"),
    (lambda c, j: c.inject(faults.kill("node-1", att_step=5)), "'at_step'"),
    (lambda c, j: c.inject(faults.kill("node-1", heal_after=5)), "heal_after"),
    (lambda c, j: c.inject(faults.make("meteor", "node-1")), "meteor"),
    (lambda c, j: c.inject(faults.make(7, "node-1")), "7"),
    (lambda c, j: c.inject("kill"), "'kill'"),
    (lambda c, j: c.inject(faults.kill), "function kill"),
    (lambda c, j: c.inject(faults.Fault), "Fault"),
    (lambda c, j: c.inject(None), "None"),
    (lambda c, j: c.inject([faults.kill("node-1")]), "takes a fault"),
    (lambda c, j: c.submit("train"), "'train'"),
    (lambda c, j: c.submit(None), "None"),
    (lambda c, j: c.submit(lambda: 1), "<lambda>()"),
    (lambda c, j: c.submit(trains.plain, stepz=3), "'steps'"),
    (lambda c, j: c.submit(trains.plain, 1, 2, 3, 4, 5, 6, 7, 8, 9), "too many positional"),
    (lambda c, j: c.submit(trains.plain, min_nods=2), "'min_nodes'"),
    (lambda c, j: c.submit(trains.plain, min_nodes="2"), "min_nodes"),
    (lambda c, j: c.submit(trains.plain, min_nodes=9), "min_nodes"),
    (lambda c, j: c.submit(trains.plain, config={"seed": 3}), "config"),
    (lambda c, j: c.submit(trains.plain, config=ftlab.JobConfig(), seed=3), "seed"),
    (lambda c, j: c.submit(trains.plain, policy="mine"), "policy"),
    (lambda c, j: c.submit(trains.plain, checkpoint="folder"), "checkpoint"),
    (lambda c, j: c.submit(trains.plain, checkpoint=int), "checkpoint"),
    (lambda c, j: c.submit(trains.plain, health=True), "health"),
    (lambda c, j: c.submit(trains.plain, budgets={"node": -1}), "budgets"),
    (lambda c, j: c.submit(trains.plain), "is still running"),
    (lambda c, j: j.wait_for_step("x"), "step"),
    (lambda c, j: j.wait_for_step(-1), "step"),
    (lambda c, j: j.wait_for_step(True), "step"),
    (lambda c, j: j.wait_for_step(NAN), "step"),
    (lambda c, j: j.wait_for_step(5, timeout="x"), "timeout"),
    (lambda c, j: j.wait_for_step(5, timeout=-1), "timeout"),
    (lambda c, j: j.wait_for_step(10**9, timeout=0.01), "did not come within 0.01 s"),
    (lambda c, j: j.wait_for(5), "kind"),
    (lambda c, j: j.wait_for("died"), "kind"),
    (lambda c, j: j.wait_for("node.died", count=0), "count"),
    (lambda c, j: j.result(timeout=NAN), "timeout"),
    (lambda c, j: j.result(timeout="soon"), "timeout"),
    (lambda c, j: c.logs("node-99"), "node-99"),
    (lambda c, j: c.logs(3), "3"),
    (lambda c, j: c.logs("node-1", local_rank=-1), "local_rank"),
]


def test_a_wrong_call_is_told_names_its_argument_and_does_nothing(cluster, job):
    wrong = [problem for call, named in WRONG if (problem := _problem(call, named, cluster, job))]
    assert wrong == []
    job.wait_for_step(job.step + 5)
    kinds = {event.kind for event in job.events}
    assert not kinds & {"fault.injected", "node.died", "worker.failed", "recovery.started"}
    assert {node["verdict"] for node in cluster.status()["nodes"]} == {"ALIVE"}


def _problem(call, named, cluster, job) -> str:
    try:
        given = call(cluster, job)
    except FtlabError as error:
        return "" if named in str(error) and len(str(error)) < 600 else f"{named!r} is not named, or too much: {error}"
    except Exception as error:
        return f"a raw error instead of one that names {named!r}: {error!r}"
    return f"no error that names {named!r}: {given!r}"


def test_a_closed_cluster_says_that_it_is_closed():
    with ftlab.Cluster(nodes=1, spares=0, echo=None) as cluster:
        known = cluster.submit(trains.plain, steps=3)
        report = known.result(timeout=JOB_S)
        pending = cluster.inject(faults.kill("node-0", at_step=10**9))
        for wrong, words in ((0.01, "has not happened within 0.01 s"), ("x", "timeout"), (-1, "timeout")):
            with pytest.raises(FtlabError, match=words):
                pending.wait(timeout=wrong)
        unknown = cluster.submit(trains.plain, steps=3)
        unknown.wait_for_end(timeout=JOB_S)
    assert "closed" in repr(cluster) and "closed" in cluster._repr_html_()
    assert cluster.events and not cluster.running
    assert known.result().digest == report.digest and known.done and "done" in repr(known)
    known.cancel()  # nothing is left to be cancelled
    assert known.wait_for_step(2) == 3
    for call in (lambda: cluster.submit(trains.plain), lambda: cluster.inject(faults.kill("node-0")), cluster.status,
                 lambda: cluster.logs("node-0"), cluster.__enter__, unknown.result, lambda: cluster.order(do="kill"),
                 lambda: cluster.inject(faults.kill("node-0", at_step=5)), lambda: cluster.record("lab.noted")):
        with pytest.raises(ClusterClosed, match=f"cluster {cluster.name} is closed") as refusal:
            call()
        assert "ftlab.Cluster(...)" in refusal.value.hint
