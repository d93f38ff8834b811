"""Ways into a new generation that once took minutes. `python -m tests.generations` runs all of them many times."""

from __future__ import annotations

import time

import ftlab
from ftlab import faults
from tests import trains
from tests.limits import JOB_S


def test_a_rank_that_is_deaf_in_a_collective_of_its_own_is_given_up_at_once():
    """Its step time is not known yet, and its page says that it computes."""
    with ftlab.Cluster(nodes=3, spares=1, echo=None) as cluster:
        job = cluster.submit(trains.receives)
        job.wait_for("membership.changed")
        while not any(worker["place"] == 3 for node in cluster.status()["nodes"] if 1 in node["ranks"]
                      for worker in node["workers"].values()):
            time.sleep(0.02)
        injection = cluster.inject(faults.kill("rank-1"))
        report = job.result(timeout=JOB_S)
        failed = [event for event in report.events if event.kind == "worker.failed"]
        assert injection.receipt["status"] and [event.data["cause"] for event in failed] == ["stall"]
        assert "did not stop" in failed[0].data["detail"] and failed[0].at - injection.at < 15
        assert report.facts["steps"] == 20 and report.digest is not None


def test_faults_may_kill_the_controller_as_often_as_they_like():
    """The eleventh kill within a minute was taken for a broken machine, and ended the cluster without a word."""
    with ftlab.Cluster(nodes=2, spares=0, echo=None) as cluster:
        job = cluster.submit(trains.plain, steps=100_000)
        for _ in range(12):
            step = job.step
            receipt = cluster.inject(faults.controller()).receipt
            job.wait_for_step(step + 1)
        job.cancel()
        assert receipt["restarted"] and cluster.running
