"""What a train function's own code does wrong around a recovery is told as its author needs it, and at once."""

from __future__ import annotations

import pytest

import ftlab
from ftlab import faults
from ftlab.errors import StateLost, TrainingFailed
from tests import trains
from tests.limits import JOB_S


@pytest.fixture(scope="module")
def cluster():
    with ftlab.Cluster(nodes=3, spares=1, echo=None) as cluster:
        yield cluster


def test_an_exception_in_load_state_dict_ends_the_job_at_once_with_its_traceback(cluster):
    job = cluster.submit(trains.brittle)
    injection = cluster.inject(faults.kill("rank-1", at_step=10)).wait(60)
    with pytest.raises(TrainingFailed, match="ValueError: cannot go back to") as ended:
        job.result(timeout=JOB_S)
    took = next(event.at for event in job.events if event.kind == "job.finished") - injection.at
    assert took < 9, "it once took 10 s and ended in 'ranks lost each other'"
    assert "in load_state_dict" in ended.value.traceback and "trains.py" in ended.value.traceback
    assert "the protected part tally: Brittle.load_state_dict" in ended.value.seen and "node-" in ended.value.seen


def test_so_does_one_on_a_rank_that_undoes_its_own_step(cluster):
    job = cluster.submit(trains.brittle)
    cluster.inject(faults.crash("rank-1", at_step=10, after=0.003)).wait(60)
    with pytest.raises(TrainingFailed, match="ValueError: cannot go back to"):
        job.result(timeout=JOB_S)


def test_sharded_state_without_checkpoints_is_warned_of_and_its_loss_explained(cluster):
    job = cluster.submit(trains.sharded)
    warned = job.wait_for("state.unprotected")
    assert "losing one node will end this job" in warned.data["detail"] and "checkpoint=" in warned.data["hint"]
    cluster.inject(faults.kill("rank-1", at_step=10)).wait(60)
    with pytest.raises(StateLost, match="the part of the state that only it held") as ended:
        job.result(timeout=JOB_S)
    assert "checkpoint=CheckpointConfig" in ended.value.hint and "replica" in ended.value.hint
    assert [event.kind for event in job.events].count("state.unprotected") == 1


def test_an_endless_loop_between_two_steps_after_a_recovery_is_found_and_named(tmp_path):
    """It looked as if the rank still recovered, so nobody was accused for two minutes."""
    with ftlab.Cluster(nodes=3, spares=0, echo=None, outside_limit_s=2.0) as cluster:
        job = cluster.submit(trains.dawdles, str(tmp_path / "once"))
        cluster.inject(faults.crash("rank-2", at_step=10)).wait(60)
        report = job.result(timeout=JOB_S)
    stalled = [event for event in report.events if event.kind == "worker.failed" and event.data["cause"] == "stall"]
    assert "between step 10 and 11, in the train function's own code for 2" in stalled[0].data["detail"]
    (caught,) = [event for event in report.events if event.kind == "worker.caught"]
    assert "trains.py" in caught.data["detail"] and "dawdles" in caught.data["detail"]
    assert report.facts["steps"] == 40 and report.digest is not None


def test_a_rank_that_was_given_the_state_is_blamed_by_the_step_it_stands_at(cluster, tmp_path):
    """Its page said step 0 until it had committed one itself."""
    job = cluster.submit(trains.stuck, str(tmp_path / "once"))
    cluster.inject(faults.kill("rank-1", at_step=20)).wait(60)  # a spare takes this rank, and gets stuck at step 20
    report = job.result(timeout=JOB_S)
    (stalled,) = [event for event in report.events if event.kind == "worker.failed" and event.data["cause"] == "stall"]
    assert "computing step 21 for" in stalled.data["detail"]
