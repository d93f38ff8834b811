"""A writer that is stopped at any system call of a save, replaced, and continued, harms nothing: with real stops."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import ftlab
from ftlab import CheckpointConfig
from ftlab.checkpoint.fence import COMMIT, attempt_of
from ftlab.checkpoint.storage import open_storage
from ftlab.checkpoint.vault import Vault
from tests import groups, stops, trains, zombies
from tests.contract.conftest import Server, serve_s3
from tests.limits import JOB_S, SOON_S


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from serve_s3(tmp_path_factory)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """In memory where that is possible: a test makes thousands of files durable."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield f"{folder}/run"


def stopped_at(call: int, url: str, steps: Sequence[int]) -> bool | None:
    """Stop the writer after so many system calls, replace it, continue it; whether it had committed in time. None: it
    came to its end before."""
    ours, theirs = groups.pipe()
    child = groups.start(zombies.save_when_told, url, theirs)
    try:
        assert ours.poll(SOON_S) and ours.recv() == "ready" and child.pid
        stops.seize(child.pid)
        ours.send("go")
        if not stops.stop_after(child.pid, call):
            return None
        writer, found = zombies.replace(url, steps)
        before = writer.good()
        os.kill(child.pid, signal.SIGCONT)
        assert ours.poll(SOON_S)
        return zombies.check(writer, found, before, ours.recv(), steps)
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("steps", [pytest.param((4, 5), id="goes on"),
                                   pytest.param((3,), id="saves that step again", marks=pytest.mark.full),
                                   pytest.param((), id="only takes over", marks=pytest.mark.full)])
def test_stopped_at_every_system_call_of_a_save_it_commits_in_time_or_never(folder: str, steps):
    outcomes: list[bool] = []
    for call in range(1, 2000):
        shutil.rmtree(folder, ignore_errors=True)
        zombies.first_generation(folder)
        in_time = stopped_at(call, folder, steps)
        if in_time is None:
            break
        outcomes.append(in_time)
    print(f"{len(outcomes)} stops: {outcomes.count(False)} refused, {outcomes.count(True)} had committed in time")
    assert not any(outcomes[:30]) and all(outcomes[-10:]), "stops before the marker, and after it"
    first, last = outcomes.index(True), len(outcomes) - outcomes[::-1].index(False)
    assert last - first < 20, "one border; the calls of two threads come in no fixed order, so it is not quite sharp"


# ---- on S3


def s3_stopped_at(moment: int, url: str, steps: Sequence[int], changes: bool) -> bool | None:
    """Stop the writer before or after one of its requests, replace it, continue it, as above."""
    ours, theirs = groups.pipe()
    seen = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    child = groups.start(zombies.save_on_s3, url, theirs, seen, moment, changes)
    try:
        assert child.pid
        stops.wait_until_stopped(child.pid, or_else=ours.poll)
        if ours.poll():
            return None
        writer, found = zombies.replace(url, steps)
        before = writer.good()
        os.kill(child.pid, signal.SIGCONT)
        assert ours.poll(SOON_S)
        return zombies.check(writer, found, before, ours.recv(), steps)
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("changes", [pytest.param(True, id="that change something"),
                                     pytest.param(False, id="all", marks=pytest.mark.full)])
def test_stopped_before_and_after_requests_to_s3_it_commits_in_time_or_never(s3_server, tmp_path: Path, changes):
    outcomes: list[bool] = []
    for moment in range(1, 500):
        url = f"s3://ftlab-tests/{tmp_path.name}-{moment}"
        zombies.first_generation(url)
        in_time = s3_stopped_at(moment, url, (4, 5), changes)
        if in_time is None:
            break
        outcomes.append(in_time)
    print(f"{len(outcomes)} stops: {outcomes.count(False)} refused, {outcomes.count(True)} had committed in time")
    assert outcomes == sorted(outcomes) and {*outcomes} == {False, True}


# ---- a node of a cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[ftlab.Cluster]:
    with ftlab.Cluster(nodes=2, spares=2, port=0, echo=None) as cluster:
        yield cluster


def wait_for_attempt(folder: Path) -> Path:
    """The folder of a save that is being written."""
    deadline = time.monotonic() + JOB_S
    while True:
        known = [path for path in folder.glob("step-*") if any(path.iterdir()) and not (path / COMMIT).exists()]
        if known:
            return known[0]
        assert time.monotonic() < deadline, "no save was caught while it was being written"
        time.sleep(0.0005)


def test_a_node_that_is_stopped_while_its_agent_writes_commits_nothing_when_it_goes_on(cluster, tmp_path):
    settings = {"steps": 24, "megabytes": 64}
    twin = cluster.submit(trains.large, **settings).result(timeout=JOB_S)
    for turn in range(3):
        folder = tmp_path / f"{turn}"
        job = cluster.submit(trains.large, checkpoint=CheckpointConfig(directory=str(folder), every=5), **settings)
        attempt = wait_for_attempt(folder)
        victim = next(node for node in cluster.status()["nodes"] if 0 in node["ranks"])
        os.killpg(victim["pid"], signal.SIGSTOP)
        try:
            in_time = (attempt / COMMIT).exists()
            died = job.wait_for("node.died")
            job.wait_for("recovery.finished")
            wait_for_fence(folder, attempt)
        finally:
            os.killpg(victim["pid"], signal.SIGCONT)
        assert job.wait_for("node.fenced").source == victim["name"]
        report = job.result(timeout=JOB_S)
        late = [event for event in job.events if event.kind.startswith("checkpoint.") and event.seq > died.seq
                and event.source == victim["name"]]
        assert late == [], "the controller records no save of a node that was given up"
        good = [entry for entry in Vault(open_storage(str(folder))).entries() if entry.good]
        assert good[0].step == settings["steps"] and report.digest == twin.digest
        assert (attempt.name in [entry.name for entry in good]) <= in_time


def wait_for_fence(folder: Path, attempt: Path) -> None:
    """Until a later generation has taken over from the one that makes this attempt."""
    deadline, known = time.monotonic() + SOON_S, attempt_of(attempt.name)
    assert known is not None
    while not any(int(path.name.rpartition("g")[2], 16) > known.generation for path in (folder / "fences").iterdir()):
        assert time.monotonic() < deadline, "nobody has taken over in storage"
        time.sleep(0.01)
