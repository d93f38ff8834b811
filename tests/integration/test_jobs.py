"""Jobs on a healthy cluster, and jobs that are themselves broken."""

from __future__ import annotations

import io
import threading

import pytest

import ftlab
from ftlab.errors import (
    ConfigError,
    JobCancelled,
    JobError,
    ModelMismatch,
    NotPicklable,
    RecoveryExhausted,
    WaitTimeout,
)
from tests import trains
from tests.limits import JOB_S


@pytest.fixture(scope="module")
def screen() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(scope="module")
def cluster(screen):
    with ftlab.Cluster(nodes=3, spares=1, echo=screen) as cluster:
        yield cluster


def test_a_function_from_a_closure_trains_and_returns_a_value_per_rank(cluster):
    factor = 10

    def train(ctx):
        import torch
        model = torch.nn.Linear(2, 2)
        ctx.protect(model=model)
        for _ in ctx.steps(3):
            with ctx.step():
                torch.distributed.barrier()
        return ctx.rank * factor

    report = cluster.submit(train).result(timeout=JOB_S)
    assert report.values == {0: 0, 1: 10, 2: 20}
    assert (report.recovered, report.steps, report.worlds, report.recoveries) == (True, 3, [3], 0)


def test_output_arrives_with_node_and_rank(cluster, screen):
    report = cluster.submit(trains.greets).result(timeout=JOB_S)
    cluster.show_output()
    for rank, node in report.values.items():
        assert f"[{node} rank={rank}] hello from rank {rank} of 3" in screen.getvalue()


def test_a_worker_that_prints_megabytes_floods_nobody_and_loses_nothing(cluster, screen):
    before = len(screen.getvalue().splitlines())
    cluster.submit(trains.chatty, lines=40_000).result(timeout=JOB_S)
    cluster.show_output()
    shown = screen.getvalue().splitlines()[before:]
    assert len(shown) < 2000
    assert any("lines not shown" in line for line in shown)
    assert "line 39999 " in cluster.logs("node-0")


def test_a_spare_is_hot_before_it_is_needed(cluster):
    job = cluster.submit(trains.plain, steps=60)
    job.wait_for_step(5)
    spare = next(node for node in cluster.status()["nodes"] if not node["ranks"])
    assert spare["workers"]["0"]["ready"] and spare["workers"]["0"]["generation"] == 0
    job.result(timeout=JOB_S)


def test_a_long_step_that_all_ranks_take_is_no_stall(cluster):
    report = cluster.submit(trains.pauses).result(timeout=JOB_S)
    assert (report.recoveries, report.steps) == (0, 30)


def test_one_job_at_a_time_and_cancel(cluster):
    job = cluster.submit(trains.plain, steps=10_000)
    job.wait_for_step(2)
    with pytest.raises(JobError, match="still"):
        cluster.submit(trains.plain)
    job.cancel()
    with pytest.raises(JobCancelled):
        job.result(timeout=JOB_S)
    assert cluster.submit(trains.plain, steps=3).result(timeout=JOB_S).recovered


def test_a_bug_on_every_attempt_ends_with_the_workers_own_traceback(cluster):
    with pytest.raises(RecoveryExhausted) as caught:
        cluster.submit(trains.raises_always).result(timeout=JOB_S)
    assert caught.value.cause == "crash" and len(caught.value.history) >= 3
    assert "ZeroDivisionError: a bug in step 0" in str(caught.value)
    assert "tests/trains.py" in caught.value.traceback and "ftlab/train" not in caught.value.traceback


def test_a_bug_of_all_ranks_at_once_after_some_steps_shows_the_traceback(cluster):
    with pytest.raises(JobError, match="a bug in step 5") as caught:
        cluster.submit(trains.raises_always, at=5).result(timeout=JOB_S)
    assert "raise ZeroDivisionError" in caught.value.traceback


def test_a_bug_that_one_rank_meets_once_is_survived(cluster, tmp_path):
    twin = cluster.submit(trains.raises_once, flag="").result(timeout=JOB_S)
    report = cluster.submit(trains.raises_once, flag=str(tmp_path / "flag")).result(timeout=JOB_S)
    assert (report.recoveries, report.steps_lost) == (1, 0)
    assert report.digest == twin.digest is not None


@pytest.mark.parametrize(("train", "error", "words"), [
    (trains.different_models, ModelMismatch, ["weight", "(3, 4)", "(4, 4)", "ctx.rank"]),
    (trains.no_step, ConfigError, ["with ctx.step()"]),
    (trains.nothing_protected, ConfigError, ["ctx.protect(model=model"]),
])
def test_a_mistake_in_the_train_function_is_explained(cluster, train, error, words):
    with pytest.raises(error) as caught:
        cluster.submit(train).result(timeout=JOB_S)
    for word in words:
        assert word in str(caught.value)


def test_what_cannot_be_pickled_is_named(cluster):
    lock = threading.Lock()

    def train(ctx):
        with lock:
            pass

    with pytest.raises(NotPicklable, match="'lock'"):
        cluster.submit(train)
    with pytest.raises(NotPicklable, match="callable"):
        cluster.submit("train")


def test_a_set_up_that_never_ends_is_named(cluster):
    def train(ctx):
        import time
        time.sleep(1000)

    with pytest.raises(WaitTimeout, match="0/3 nodes reached their first step"):
        cluster.submit(train, start_timeout_s=1.0).result(timeout=JOB_S)


def test_the_views_tell_what_is_there(cluster):
    assert "3 nodes + 1 spare" in repr(cluster)
    html = cluster._repr_html_()
    assert all(f"node-{number}" in html for number in range(4)) and html.count("ALIVE") == 4


@pytest.mark.parametrize(("settings", "words"), [
    ({"nodes": 0}, "nodes must be at least 1"),
    ({"spares": -1}, "spares"),
    ({"nodes": 2.5}, "whole number"),
    ({"procs_per_node": 0}, "procs_per_node"),
    ({"dead_s": 0.1}, "suspect_s < dead_s"),
    ({"heartbeat": 1}, "unknown setting"),
    ({"backend": "teapot"}, "backend"),
])
def test_bad_settings_are_refused_before_anything_starts(settings, words):
    with pytest.raises(ConfigError, match=words):
        ftlab.Cluster(**settings)


def test_an_impossible_minimum_is_refused(cluster):
    with pytest.raises(ConfigError, match="min_nodes=9"):
        cluster.submit(trains.plain, min_nodes=9)
