"""A detector of the user's own in a real controller: it gives the verdicts, and a broken one does no harm."""

from __future__ import annotations

import pytest

import ftlab
from ftlab import faults
from ftlab.errors import ConfigError, NotPicklable
from tests import trains
from tests.limits import JOB_S

pytestmark = pytest.mark.usefixtures("no_leaks")
LONG_S = 2.0  # of silence, far beyond the cluster's own 0.55 s


class Patient:
    """Accuses nobody before LONG_S."""

    def __init__(self):
        self.last = None

    def heard(self, at):
        self.last = at

    def judge(self, now):
        return "DEAD" if self.last is not None and now - self.last > LONG_S else "ALIVE"


class Raises(Patient):
    def judge(self, now):
        raise ZeroDivisionError("no intervals yet")


class Mumbles(Patient):
    def judge(self, now):
        return "perhaps"


def died(cluster) -> list[float]:
    """How long each node that was given up for its silence had been silent."""
    return [event.at - event.data["evidence"] for event in cluster.events
            if event.kind == "node.died" and "no heartbeat" in event.data["reason"]]


def test_the_verdict_on_a_silent_node_is_the_detectors_own():
    with ftlab.Cluster(nodes=2, spares=1, echo=None, detector=Patient) as cluster:
        job = cluster.submit(trains.plain, steps=60)
        job.wait_for_step(5)
        cluster.inject(faults.hang("node-1"))
        job.result(timeout=JOB_S)
        assert min(died(cluster)) >= LONG_S
        assert not [event for event in cluster.events if event.kind == "detector.failed"]


@pytest.mark.parametrize(("detector", "words"), [(Raises, "no intervals yet"), (Mumbles, "perhaps")])
def test_a_detector_that_fails_is_told_of_and_the_fixed_timeout_takes_over(detector, words):
    with ftlab.Cluster(nodes=2, spares=1, echo=None, detector=detector) as cluster:
        job = cluster.submit(trains.plain, steps=60)
        job.wait_for_step(5)
        cluster.inject(faults.hang("node-1"))
        job.result(timeout=JOB_S)
        assert died(cluster)
        told = [event for event in cluster.events if event.kind == "detector.failed"]
        assert {event.source for event in told} >= {"node-0", "node-1"} and words in told[0].data["reason"]
        assert len({event.source for event in told}) == len(told)  # once per node


def test_what_is_no_detector_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="handed in itself"):
        ftlab.Cluster(nodes=1, spares=0, detector="own")
    with pytest.raises(NotPicklable, match="must be a class"):
        ftlab.Cluster(nodes=1, spares=0, detector=5)
