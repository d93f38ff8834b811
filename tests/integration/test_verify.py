"""`job.result(verify=True)`: the job is trained once more without faults, and the report carries the verdict."""

from __future__ import annotations

import pytest

import ftlab
from ftlab import faults
from ftlab.errors import ClusterError, JobError
from tests import trains
from tests.limits import JOB_S


@pytest.fixture(scope="module")
def cluster():
    with ftlab.Cluster(nodes=2, spares=1, echo=None) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _nothing_stays() -> None:
    """The cluster is the module's: what it leaves is looked for elsewhere."""


def test_a_killed_run_is_identical_to_its_twin(cluster, tmp_path):
    checkpoint = ftlab.CheckpointConfig(directory=str(tmp_path), every=10)
    job = cluster.submit(trains.everything, steps=40, record_samples=True, checkpoint=checkpoint)
    pending = cluster.inject(faults.kill("rank-1", at_step=10))
    report = job.result(timeout=JOB_S, verify=True)
    assert pending.wait(5).fault == "kill" and report.injected == 1 and report.detection_s is not None
    assert (report.verdict, report.samples_lost, report.samples_repeated) == ("identical", 0, 0)
    assert report.twin is not None and (report.twin.injected, report.twin.checkpoints) == (0, 0)
    assert report.checkpoints > 0, "the run itself does save"


def test_a_run_that_went_another_way_is_called_diverged(cluster):
    """NaN each time the step is tried: the batch is passed over, which leaves another state."""
    job = cluster.submit(trains.network, steps=40, record_samples=True)
    cluster.inject(faults.nan("rank-1", at_step=10, way="again"))
    report = job.result(timeout=JOB_S, verify=True)
    assert report.verdict == "diverged" and report.samples_lost == len(report.skipped) > 0


def test_without_verify_the_report_says_that_nobody_compared(cluster):
    report = cluster.submit(trains.plain, steps=5).result(timeout=JOB_S)
    assert report.verdict is None
    for text in (str(report), report._repr_html_()):
        assert "not compared" in text and "verify=True" in text


def test_a_twin_that_is_disturbed_is_no_twin(cluster, monkeypatch):
    job, send = cluster.submit(trains.everything, steps=40), cluster.send

    def disturbed(sent):
        twin = send(sent)
        twin.wait_for_step(5)
        cluster.inject(faults.crash("rank-1"))
        return twin

    monkeypatch.setattr(cluster, "send", disturbed)
    with pytest.raises(JobError, match="disturbed as well"):
        job.result(timeout=JOB_S, verify=True)


def test_a_job_that_began_from_a_checkpoint_has_no_twin(cluster, tmp_path):
    saving = ftlab.CheckpointConfig(directory=str(tmp_path), every=5)
    cluster.submit(trains.everything, steps=20, checkpoint=saving).result(timeout=JOB_S)
    job = cluster.submit(trains.everything, steps=30, checkpoint=saving)
    assert job.result(timeout=JOB_S).steps == 30
    with pytest.raises(JobError, match="from a checkpoint"):
        job.result(verify=True)


def test_too_few_nodes_are_an_error_and_no_verdict(cluster, monkeypatch):
    from ftlab.cluster import twin

    job = cluster.submit(trains.plain, steps=5)
    job.result(timeout=JOB_S)
    monkeypatch.setattr(twin, "_NODES_S", 0.0)
    monkeypatch.setattr(twin, "_count", lambda cluster: 1)
    with pytest.raises(ClusterError, match="needs 2 nodes, and 1 are left"):
        job.result(verify=True)
