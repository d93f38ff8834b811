"""A checkpoint manager that a student wrote, in the real system: it travels with the job, saves, and loads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ftlab
from ftlab import faults
from ftlab.errors import ConfigError, StateLost, TrainingFailed
from tests.limits import JOB_S, SOON_S

GENEROUS = {"node": 50, "crash": 50}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ftlab.Cluster]:
    with ftlab.Cluster(nodes=3, spares=1, echo=None) as cluster:
        yield cluster


class Manager:
    """By hand: rank 0 writes, the others hear of it."""

    def __init__(self, folder) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.parts = {}

    def protect(self, **parts):
        self.parts = parts

    def save_checkpoint(self, model, optimizer, epoch, metrics):
        path = self.folder / f"{epoch:05}.pt"
        if dist.get_rank() == 0:
            state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                     "parts": {name: part.state_dict() for name, part in self.parts.items()}}
            torch.save(state, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
        dist.broadcast(torch.zeros(1), src=0, async_op=True).wait(timedelta(seconds=20))
        return path

    def load_checkpoint(self, model, optimizer, checkpoint_path=None):
        found = sorted(self.folder.glob("*.pt"))
        if not found:
            return None
        state = torch.load(found[-1], weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        return {"epoch": state["epoch"], "metrics": {}}


class OnlyWeights(Manager):
    """Knows nothing of other parts."""

    protect = None  # type: ignore[assignment]

    def __getattribute__(self, name):
        if name == "protect":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Failing(Manager):
    def save_checkpoint(self, model, optimizer, epoch, metrics):
        raise OSError("the disk is full")


class Disagreeing(Manager):
    def load_checkpoint(self, model, optimizer, checkpoint_path=None):
        return {"epoch": dist.get_rank(), "metrics": {}}


class Speechless(Manager):
    def load_checkpoint(self, model, optimizer, checkpoint_path=None):
        super().load_checkpoint(model, optimizer)
        return "loaded"


def train(ctx, steps=60, schedule=True):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
    ctx.protect(model=model, optimizer=optimizer, **({"scheduler": scheduler} if schedule else {}))
    x = torch.randn(96, 8)
    data = ctx.sampler(len(x), global_batch=24)
    for step in ctx.steps(steps):
        with ctx.step():
            ids = data.indices(step)
            ctx.backward(nn.functional.mse_loss(model(x[ids]), x[ids].sum(1, keepdim=True)))
            optimizer.step(); optimizer.zero_grad()
            if schedule:
                scheduler.step()
            time.sleep(0.01)


def _steps(report, kind):
    return [event.step for event in report.events if event.kind == kind]


def test_a_blackout_under_a_hand_written_manager_ends_in_the_bits_of_an_undisturbed_run(cluster, tmp_path):
    twin = cluster.submit(train).result(timeout=JOB_S)
    job = cluster.submit(train, checkpoint=Manager(tmp_path), save_every=10, budgets=GENEROUS)
    pending = cluster.inject(faults.blackout(at_step=25))
    report = job.result(timeout=JOB_S)
    assert pending.wait(timeout=SOON_S).receipt["pids"] and report.facts["source"] == "storage"
    assert report.digest == twin.digest
    assert _steps(report, "checkpoint.loaded") == [20] and report.facts["steps_lost"] <= 10
    assert set(_steps(report, "checkpoint.committed")) == {10, 20, 30, 40, 50, 60}


def test_one_dead_node_costs_no_load_and_saving_goes_on(cluster, tmp_path):
    twin = cluster.submit(train).result(timeout=JOB_S)
    job = cluster.submit(train, checkpoint=Manager(tmp_path), save_every=1, budgets=GENEROUS)
    job.wait_for_step(20)
    cluster.inject(faults.kill("rank-0"))  # most likely while it saves: it saves all the time
    report = job.result(timeout=JOB_S)
    assert report.digest == twin.digest and report.facts["steps_lost"] == 0
    assert not _steps(report, "checkpoint.loaded") and max(_steps(report, "checkpoint.committed")) == 60


def test_a_second_job_goes_on_where_the_first_one_ended(cluster, tmp_path):
    whole = cluster.submit(train).result(timeout=JOB_S)
    cluster.submit(train, steps=25, checkpoint=Manager(tmp_path), save_every=10).result(timeout=JOB_S)
    report = cluster.submit(train, checkpoint=Manager(tmp_path), save_every=10).result(timeout=JOB_S)
    assert _steps(report, "checkpoint.loaded") == [25] and report.digest == whole.digest


def test_a_manager_that_raises_ends_the_job_with_its_traceback(cluster, tmp_path):
    with pytest.raises(TrainingFailed, match="save_checkpoint of Failing raised OSError: the disk is full"):
        cluster.submit(train, checkpoint=Failing(tmp_path), save_every=5).result(timeout=JOB_S)


def test_ranks_that_load_different_steps_are_refused(cluster, tmp_path):
    with pytest.raises(StateLost, match="different steps on different ranks"):
        cluster.submit(train, checkpoint=Disagreeing(tmp_path)).result(timeout=JOB_S)


def test_a_manager_must_tell_what_it_loaded(cluster, tmp_path):
    with pytest.raises(ConfigError, match="must tell the epoch"):
        cluster.submit(train, checkpoint=Speechless(tmp_path)).result(timeout=JOB_S)


def test_a_part_that_the_manager_would_lose_is_named(cluster, tmp_path):
    with pytest.raises(ConfigError, match="scheduler would be lost"):
        cluster.submit(train, checkpoint=OnlyWeights(tmp_path)).result(timeout=JOB_S)
    cluster.submit(train, schedule=False, steps=5, checkpoint=OnlyWeights(tmp_path)).result(timeout=JOB_S)


def test_a_class_alone_uses_the_folder_of_the_environment(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("CHECKPOINT_DIR", str(tmp_path / "here"))
    cluster.submit(train, steps=5, checkpoint=Manager, save_every=5).result(timeout=JOB_S)
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["00005.pt"]


def test_what_is_no_manager_is_refused_at_once(cluster):
    with pytest.raises(ConfigError, match="must be a CheckpointConfig or a checkpoint manager"):
        cluster.submit(train, checkpoint="folder")
