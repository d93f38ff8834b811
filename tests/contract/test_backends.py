"""What every backend owes its users: the same cases for nodes that are processes and for nodes that are containers.

Each case is what a notebook does: start, train, break something, and end in the bits of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ftlab
from ftlab import faults
from ftlab.cluster import engine, image
from ftlab.cluster.abilities import no_packet_loss
from ftlab.errors import UnknownNode
from tests import trains
from tests.conftest import require
from tests.leaks import look, wait_until_gone
from tests.limits import JOB_S, START_S

STEPS = 60
GENEROUS = {"node": 50, "crash": 50, "stall": 50, "link": 50, "numbers": 50}
_digests: dict[tuple[str, str], str] = {}  # by train function and backend: of the undisturbed run


@pytest.fixture(scope="module", params=[pytest.param("process"), pytest.param("docker", marks=pytest.mark.docker)])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "docker":
        reason = image.possible() or engine.available()
        require("docker", not reason, reason)
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(backend: str) -> Iterator[ftlab.Cluster]:
    """One cluster for all cases of a backend; when it ends, nothing of it is left anywhere. Spares are not made up for,
    which takes containers long: a lost node is replaced by the spare, by one that came back, or by a new one."""
    before, running = look(), {each.cluster for each in engine.look()}
    with ftlab.Cluster(nodes=2, spares=1, replenish=False, backend=backend, start_timeout_s=START_S,
                       echo=None) as cluster:
        yield cluster
    assert wait_until_gone(before) == []
    assert [each for each in engine.look() if each.cluster == cluster.name and each.cluster not in running] == []


def undisturbed(cluster: ftlab.Cluster, train) -> str:
    """The digest of an undisturbed run on this backend; trained once."""
    key = (train.__name__, cluster.backend)
    if key not in _digests:
        _digests[key] = cluster.submit(train, steps=STEPS).result(timeout=JOB_S).digest
    assert _digests[key], "the ranks of the undisturbed run disagree"
    return _digests[key]


def test_it_trains_and_says_what_it_is(cluster, backend):
    report = cluster.submit(trains.everything, steps=10).result(timeout=JOB_S)
    assert (report.backend, report.worlds, report.steps, report.recoveries) == (backend, [2], 10, 0)
    addresses = [event.data["address"] for event in cluster.events if event.kind == "node.joined"]
    assert len(set(addresses)) == len(addresses) == 3, "each node has its own address"


@pytest.mark.parametrize("kind", ["kill", "crash", "hang", "partition", "nan"])
def test_a_fault_ends_in_the_bits_of_an_undisturbed_run(cluster, kind):
    if kind == "partition" and cluster.backend == "process":
        require("filters", not no_packet_loss(), no_packet_loss())
    heal = {"heal_after": 1.5} if kind in ("hang", "partition") else {}
    train = trains.network if kind == "nan" else trains.everything  # a GradScaler would take care of it itself
    wanted = undisturbed(cluster, train)
    job = cluster.submit(train, steps=STEPS, budgets=GENEROUS)
    way = {"way": "once"} if kind == "nan" else {}
    pending = cluster.inject(faults.make(kind, "rank-1", at_step=20, **heal, **way))
    report = job.result(timeout=JOB_S)
    assert pending.wait().receipt["at"] > 0 and report.injected == 1
    assert report.detection_s is not None
    assert (report.digest, report.steps, report.steps_lost) == (wanted, STEPS, 0)
    if kind == "kill":
        assert pending.wait().receipt["status"] == "killed by SIGKILL" and pending.wait().receipt["left"] == []
    if heal:
        job.wait_for("fault.healed")


def test_it_is_whole_again_after_each_fault(cluster):
    """Runs after the others: nodes were replaced, and the next job knows nothing of it."""
    wanted = undisturbed(cluster, trains.everything)
    report = cluster.submit(trains.everything, steps=STEPS).result(timeout=JOB_S)
    assert (report.digest, report.worlds, report.injected) == (wanted, [2], 0)


def test_what_is_not_there_cannot_be_broken(cluster):
    with pytest.raises(UnknownNode, match="node-99"):
        cluster.inject(faults.kill("node-99"))


def test_it_ends_in_the_bits_of_the_backend_before(cluster):
    """The first backend has none before it: its own bits are what the next one is held to."""
    mine = undisturbed(cluster, trains.everything)
    assert {digest for (name, _), digest in _digests.items() if name == "everything"} == {mine}
