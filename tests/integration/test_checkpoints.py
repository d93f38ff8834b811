"""Jobs that save: what is lost with a worker, a node, all nodes, and what happens when storage fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ftlab
from ftlab import CheckpointConfig, faults
from ftlab.cluster.job import Job
from ftlab.errors import ConfigError, NoCheckpoint, StateLost, TrainingFailed
from tests import trains
from tests.conftest import require
from tests.contract.conftest import _CREDENTIALS, Server
from tests.limits import JOB_S, SOON_S

GENEROUS = {"node": 50, "crash": 50}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ftlab.Cluster]:
    with ftlab.Cluster(nodes=3, spares=1, port=0, echo=None) as cluster:
        yield cluster


def _saving(folder: Path, every: int | str = 5, **more: object) -> CheckpointConfig:
    return CheckpointConfig(directory=str(folder), every=every, **more)  # type: ignore[arg-type]


def _wait_for_replicas(job: Job) -> None:
    """Until each of three nodes has sent on its snapshots of three saves: a busy disk may hold that up, and a node
    keeps two of each only."""
    job.wait_for("checkpoint.replicated", count=9)


def _steps(job: Job, kind: str) -> list[int]:
    return [event.step or 0 for event in job.events if event.kind == kind]


# ---- what comes back from where ----------------------------------------------------------------------------


def test_the_agent_writes_the_snapshot_of_a_worker_that_is_killed_right_after_it(cluster, tmp_path):
    job = cluster.submit(trains.dies_after_a_snapshot, str(tmp_path), checkpoint=_saving(tmp_path / "run", 20))
    job.result(timeout=JOB_S)
    failed = next(event for event in job.events if event.kind == "worker.failed")
    committed = next(event for event in job.events if event.kind == "checkpoint.committed")
    assert committed.step == 20 and failed.step == 20
    assert _steps(job, "checkpoint.loaded") == [] and _steps(job, "checkpoint.recalled") == [], "the others live"


def test_when_all_workers_die_their_nodes_memory_brings_the_state_back(cluster, tmp_path):
    twin = cluster.submit(trains.everything, steps=60).result(timeout=JOB_S)
    job = cluster.submit(trains.everything, steps=60, checkpoint=_saving(tmp_path, 10), budgets=GENEROUS)
    job.wait_for_step(33)
    pids = [worker["pid"] for node in cluster.status()["nodes"] for worker in node["workers"].values()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    report = job.result(timeout=JOB_S)
    assert report.facts["source"] == "memory" and report.facts["steps_lost"] <= 12
    assert _steps(job, "checkpoint.recalled") and report.digest == twin.digest


@pytest.mark.parametrize("fault", ["kill", "crash", "hang", "blackout"])
def test_a_sharded_job_survives(cluster, tmp_path, fault):
    options = {"steps": 40, "step_s": 0.04, "budgets": GENEROUS}
    twin = cluster.submit(trains.sharded, checkpoint=_saving(tmp_path / "twin"), **options).result(timeout=JOB_S)
    job = cluster.submit(trains.sharded, checkpoint=_saving(tmp_path / "run"), **options)
    _wait_for_replicas(job)
    injection = cluster.inject(getattr(faults, fault)(*([] if fault == "blackout" else ["rank-1"])))
    report = job.result(timeout=JOB_S)
    assert injection.receipt["pids"] and report.facts["detection_s"] is not None
    assert report.facts["source"] == {"crash": "memory", "blackout": "storage"}.get(fault, "replica")
    assert report.facts["steps_lost"] <= 12 and report.digest == twin.digest
    if fault == "hang":
        cluster.order(do="resume", node=injection.target)


@pytest.mark.parametrize("way", ["truncate", "flip"])
def test_a_sharded_job_finds_its_newest_checkpoint_damaged_says_so_and_takes_the_older_one(cluster, tmp_path, way):
    options = {"steps": 40, "step_s": 0.02, "budgets": GENEROUS}
    twin = cluster.submit(trains.sharded, **options).result(timeout=JOB_S)
    job = cluster.submit(trains.sharded, checkpoint=_saving(tmp_path), **options)
    job.wait_for_step(18)
    receipt = cluster.inject(faults.corrupt(way)).receipt
    report = job.result(timeout=JOB_S)
    (damaged,) = [event for event in report.events if event.kind == "checkpoint.damaged"]
    assert damaged.data["name"] == receipt["checkpoint"] and damaged.data["marked"]
    assert (tmp_path / receipt["checkpoint"] / "DAMAGED").exists()
    (loaded,) = [event for event in report.events if event.kind == "checkpoint.loaded"]
    assert loaded.step < damaged.step and report.facts["source"] == "storage" and report.digest == twin.digest


def test_a_sharded_job_that_loses_two_neighbours_at_once_falls_back_to_storage(tmp_path):
    with ftlab.Cluster(nodes=3, spares=2, echo=None) as cluster:
        twin = cluster.submit(trains.sharded, checkpoint=_saving(tmp_path / "twin")).result(timeout=JOB_S)
        job = cluster.submit(trains.sharded, step_s=0.03, checkpoint=_saving(tmp_path / "run"), budgets=GENEROUS)
        job.wait_for_step(18)
        pids = {node["name"]: node["pid"] for node in cluster.status()["nodes"]}
        for name in ("node-1", "node-2"):  # which kept the replica of node-1's; at once, not one fault after the other
            os.killpg(pids[name], signal.SIGKILL)
        report = job.result(timeout=JOB_S)
        assert {event.source for event in report.events if event.kind == "node.died"} == {"node-1", "node-2"}
        assert report.facts["source"] == "storage" and report.digest == twin.digest
        assert _steps(job, "checkpoint.loaded")


def test_a_sharded_job_shrinks_and_its_shards_are_put_together_anew(tmp_path):
    with ftlab.Cluster(nodes=3, spares=0, replace=False, echo=None) as cluster:
        job = cluster.submit(trains.sharded, step_s=0.04, checkpoint=_saving(tmp_path), min_nodes=2, budgets=GENEROUS)
        _wait_for_replicas(job)
        cluster.inject(faults.kill("rank-2"))
        report = job.result(timeout=JOB_S)
        assert report.facts["worlds"] == [3, 2] and report.facts["source"] == "replica", job.events
        assert {row["world"] for row in report.values.values()} == {2} and report.digest is not None


def test_build_must_return_a_model_and_its_own_errors_end_the_job_with_their_traceback(cluster):
    with pytest.raises(ConfigError, match="must return a dict with a model"):
        cluster.submit(trains.sharded, wrong="name").result(timeout=JOB_S)
    job = cluster.submit(trains.sharded, wrong="raises")
    with pytest.raises(TrainingFailed, match=r"(?s)no such layer.*in build"):
        job.result(timeout=JOB_S)
    assert len(_steps(job, "recovery.started")) <= 1, "trying again would not mend it"


# ---- resuming ----------------------------------------------------------------------------------------------


def test_a_job_goes_on_where_an_earlier_one_stopped_in_another_cluster(cluster, tmp_path):
    whole = cluster.submit(trains.everything, steps=50).result(timeout=JOB_S)
    cluster.submit(trains.everything, steps=27, checkpoint=_saving(tmp_path, 10)).result(timeout=JOB_S)
    with ftlab.Cluster(nodes=3, spares=0, echo=None) as other:
        job = other.submit(trains.everything, steps=50, checkpoint=_saving(tmp_path, 10))
        report = job.result(timeout=JOB_S)
    assert _steps(job, "checkpoint.loaded") == [27] and _steps(job, "step.committed") == list(range(28, 51))
    assert report.digest == whole.digest


def test_a_job_resumes_from_a_chosen_step_or_not_at_all(cluster, tmp_path):
    whole = cluster.submit(trains.everything, steps=30, checkpoint=_saving(tmp_path, 10)).result(timeout=JOB_S)
    chosen = cluster.submit(trains.everything, steps=30, checkpoint=_saving(tmp_path, 10, resume=20))
    assert chosen.result(timeout=JOB_S).digest == whole.digest
    assert _steps(chosen, "checkpoint.loaded") == [20] and _steps(chosen, "step.committed")[0] == 21
    fresh = cluster.submit(trains.everything, steps=30, checkpoint=_saving(tmp_path, 10, resume=False))
    assert fresh.result(timeout=JOB_S).digest == whole.digest
    assert _steps(fresh, "checkpoint.loaded") == [] and _steps(fresh, "step.committed")[0] == 1


def test_a_checkpoint_that_is_not_there_is_named(cluster, tmp_path):
    with pytest.raises(NoCheckpoint, match="there is no checkpoint 7"):
        cluster.submit(trains.plain, checkpoint=_saving(tmp_path, resume=7)).result(timeout=JOB_S)


def test_a_blackout_before_the_first_checkpoint_loses_all_and_says_so(cluster, tmp_path):
    job = cluster.submit(trains.plain, steps=500, checkpoint=_saving(tmp_path, 400))
    job.wait_for_step(10)
    cluster.inject(faults.blackout())
    with pytest.raises(StateLost, match="no worker is left that holds step"):
        job.result(timeout=JOB_S)


@pytest.mark.parametrize(("settings", "words"), [
    ({"directory": "memory://x"}, "private to each process"), ({"directory": ""}, "no folder for checkpoints"),
])
def test_folders_that_cannot_work_are_refused(cluster, settings, words, monkeypatch):
    monkeypatch.delenv("CHECKPOINT_DIR", raising=False)
    with pytest.raises(ConfigError, match=words):
        cluster.submit(trains.plain, checkpoint=CheckpointConfig(**settings))


def test_the_folder_may_come_from_the_environment(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("CHECKPOINT_DIR", str(tmp_path / "run"))
    cluster.submit(trains.plain, steps=10, checkpoint=CheckpointConfig(every=5)).result(timeout=JOB_S)
    assert len(list((tmp_path / "run").glob("step-*/COMMIT"))) == 2


# ---- storage that fails ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of its own, too small for many checkpoints."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True,
                          text=True, check=False)
    require("mounts", done.returncode == 0, f"cannot mount a small file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_stops_checkpoints_but_not_training(cluster, small_disk):
    job = cluster.submit(trains.plain, steps=400, step_s=0.01, checkpoint=_saving(small_disk, 20))
    job.wait_for("checkpoint.committed", timeout=JOB_S)
    with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as ballast:
        while ballast.write(bytes(1 << 16)):
            pass
    failed = job.wait_for("checkpoint.failed", timeout=JOB_S)
    assert "cannot write" in failed.data["reason"] and "No space left" in failed.data["seen"]
    (small_disk / "ballast").unlink()
    before = len(_steps(job, "checkpoint.committed"))
    committed = job.wait_for("checkpoint.committed", count=before + 1, timeout=JOB_S)
    report = job.result(timeout=JOB_S)
    assert report.facts["steps"] == 400 and (committed.step or 0) > (failed.step or 0)
    assert report.facts["recoveries"] == 0, "training did not even stop"


def test_storage_that_goes_read_only_stops_checkpoints_but_not_training(cluster, small_disk):
    job = cluster.submit(trains.plain, steps=400, step_s=0.01, checkpoint=_saving(small_disk, 20))
    job.wait_for("checkpoint.committed", timeout=JOB_S)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    failed = job.wait_for("checkpoint.failed", timeout=JOB_S)
    assert "Read-only" in failed.data["seen"]
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    before = len(_steps(job, "checkpoint.committed"))
    job.wait_for("checkpoint.committed", count=before + 1, timeout=JOB_S)
    assert job.result(timeout=JOB_S).facts["recoveries"] == 0


def test_storage_that_stops_answering_delays_checkpoints_but_not_training(tmp_path, monkeypatch):
    server = Server(tmp_path / "log")
    try:
        for name, value in {**_CREDENTIALS, "AWS_ENDPOINT_URL": server.url}.items():
            monkeypatch.setenv(name, value)
        import s3fs
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("ftlab-stuck")
        with ftlab.Cluster(nodes=2, spares=0, network="host", echo=None) as cluster:
            saving = CheckpointConfig(directory="s3://ftlab-stuck/run", every=20)
            job = cluster.submit(trains.plain, steps=600, step_s=0.01, checkpoint=saving)
            first = job.wait_for("checkpoint.committed", timeout=JOB_S)
            server.process.send_signal(signal.SIGSTOP)
            delayed = job.wait_for("checkpoint.delayed", timeout=JOB_S)
            job.wait_for_step((delayed.step or 0) + 30)
            server.process.send_signal(signal.SIGCONT)
            report = job.result(timeout=JOB_S)
            assert report.facts["steps"] == 600 and report.facts["recoveries"] == 0
            assert max(_steps(job, "checkpoint.committed")) == 600 > (first.step or 0)
    finally:
        server.process.send_signal(signal.SIGCONT)
        server.close()


def test_metrics_tell_of_checkpoints(cluster, tmp_path):
    import urllib.request

    cluster.submit(trains.plain, steps=20, checkpoint=_saving(tmp_path)).result(timeout=JOB_S)
    deadline = time.monotonic() + SOON_S
    while True:
        text = urllib.request.urlopen(f"{cluster.url}/metrics", timeout=SOON_S).read().decode()
        if "ftlab_checkpoint_step 20.0" in text or time.monotonic() > deadline:
            break
    assert "ftlab_checkpoint_step 20.0" in text and 'ftlab_checkpoints_total{result="committed"}' in text
    assert "ftlab_checkpoint_blocking_seconds_count" in text
