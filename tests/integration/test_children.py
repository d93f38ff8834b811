"""Processes that a train function starts end with the job and with the cluster, however they try to stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import ftlab
from ftlab import faults
from tests.limits import JOB_S, SOON_S

WAYS = ("plain", "own_session", "double_fork", "no_environment")


def starts_children(ctx, folder, steps=10_000, ways=WAYS):
    """Each rank starts one child in each way; each leaves its pid in a file."""
    import torch

    hide = "import os; (os.fork() or os.setsid() or os.fork()) and os._exit(0); " if "double_fork" in ways else ""
    for way in ways:
        note = f"open({str(folder)!r} + f'/{ctx.node}-{way}-{{os.getpid()}}', 'w').close(); time.sleep(1000)"
        code = f"import os, time; {hide if way == 'double_fork' else ''}{note}"
        subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=way != "plain",
                         env={} if way == "no_environment" else None)
    model = torch.nn.Linear(2, 2)
    ctx.protect(model=model)
    for _ in ctx.steps(steps):
        with ctx.step():
            time.sleep(0.01)


def loads_in_children(ctx):
    """A data loader has worker processes of its own."""
    import torch

    model = torch.nn.Linear(1, 1)
    ctx.protect(model=model)
    loader = torch.utils.data.DataLoader(torch.arange(64).float(), batch_size=4, num_workers=2)
    seen = 0
    for _, batch in zip(ctx.steps(12), loader, strict=False):
        with ctx.step():
            ctx.backward(model(batch[:, None]).mean())
        seen = max(seen, len(psutil.Process().children()))
    return seen


def _children(folder: Path, count: int, node: str = "") -> list[psutil.Process]:
    """The children that have left their pids, once there are so many."""
    deadline = time.monotonic() + SOON_S
    while len(found := list(folder.glob(f"{node or 'node-*'}-*-*"))) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} children have started"
        time.sleep(0.02)
    return [psutil.Process(int(path.name.rsplit("-", 1)[1])) for path in found]


def _end(processes: list[psutil.Process]) -> bool:
    _, left = psutil.wait_procs(processes, timeout=SOON_S)
    return not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def cluster():
    with ftlab.Cluster(nodes=2, spares=0, echo=None) as cluster:
        yield cluster


def test_they_end_when_the_job_is_cancelled(cluster, tmp_path):
    job = cluster.submit(starts_children, tmp_path)
    children = _children(tmp_path, 8)
    job.wait_for_step(2)
    assert all(child.is_running() for child in children)  # as long as the job does
    job.cancel()
    assert _end(children)


def test_they_end_when_the_job_has_finished(cluster, tmp_path):
    job = cluster.submit(starts_children, tmp_path, steps=150)
    children = _children(tmp_path, 8)
    job.result(timeout=JOB_S)
    assert _end(children)


def test_they_end_with_a_worker_that_crashes_and_the_other_nodes_stay(cluster, tmp_path):
    job = cluster.submit(starts_children, tmp_path)
    mine, others = _children(tmp_path, 4, "node-0"), _children(tmp_path, 4, "node-1")
    job.wait_for_step(2)
    receipt = cluster.inject(faults.crash("node-0"))
    assert receipt.receipt["status"] == "gone"
    assert _end(mine)
    job.wait_for("recovery.finished")
    assert all(child.is_running() for child in others)
    job.cancel()
    job.wait_for_end()
    assert _end(others)


def test_a_stopped_node_stops_them_and_they_go_on_with_it(cluster, tmp_path):
    job = cluster.submit(starts_children, tmp_path)
    children = _children(tmp_path, 4, "node-1")
    job.wait_for_step(2)
    receipt = cluster.inject(faults.hang("node-1"))
    assert receipt.receipt["status"] == "stopped"
    assert {child.status() for child in children} == {psutil.STATUS_STOPPED}
    job.wait_for("node.died")
    cluster.order(do="resume", node="node-1")
    job.wait_for("node.fenced")  # it is back as a new node, without what it ran before
    assert _end(children)
    job.cancel()
    job.wait_for_end()


def test_they_end_with_a_node_that_is_killed(cluster, tmp_path):
    job = cluster.submit(starts_children, tmp_path)
    job.wait_for_step(2)
    name = cluster.status()["nodes"][0]["name"]
    children = _children(tmp_path, 4, name)
    receipt = cluster.inject(faults.kill(name)).receipt
    assert {child.pid for child in children} <= set(receipt["pids"]) and receipt["left"] == []
    assert _end(children)
    job.wait_for("recovery.finished")
    job.cancel()
    job.wait_for_end()


def test_a_data_loader_keeps_its_workers_during_a_job(cluster):
    report = cluster.submit(loads_in_children, rehearse=False).result(timeout=JOB_S)  # a plain loader does not go back
    assert report.recoveries == 0 and report.steps == 12 and set(report.values.values()) == {2}


def test_they_end_with_the_cluster(tmp_path):
    with ftlab.Cluster(nodes=1, spares=0, echo=None) as cluster:
        cluster.submit(starts_children, tmp_path)
        children = _children(tmp_path, 4)
    assert _end(children)


def test_they_end_with_a_kernel_that_is_killed(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", "import ftlab, sys, time\n"
                              "from tests.integration.test_children import starts_children\n"
                              "cluster = ftlab.Cluster(nodes=1, spares=0, echo=None)\n"
                              f"cluster.submit(starts_children, {str(tmp_path)!r})\n"
                              "time.sleep(1000)"])
    try:
        children = _children(tmp_path, 4)
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    assert _end(children)
