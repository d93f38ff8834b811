"""A node's lookout: what it sees of a worker from outside, with real processes and a clock that is passed in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from ftlab.cluster.lookout import LOOK_S, Lookout
from ftlab.messages import Place
from ftlab.train.status import Progress
from tests.limits import SOON_S


@pytest.fixture
def worker() -> Iterator[subprocess.Popen]:
    """A process that computes."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


def progress(place: Place) -> Progress:
    return Progress(generation=1, rank=0, step=5, place=place, since=0.0, committed_at=0.0)


def look(lookout: Lookout, now: float, pid: int, place: Place = Place.COMPUTING) -> None:
    assert list(lookout.look(now, {0: (pid, progress(place))})) == []


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + SOON_S
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline


def test_a_worker_that_is_often_found_stopped_is_slowed_down_by_that_and_not_for_ever(worker):
    lookout = Lookout()
    look(lookout, 100.0, worker.pid)
    stop(worker.pid)
    for _ in range(7):
        lookout.glance(0, worker.pid)
    assert lookout.slow(0) == "", "a few glances prove nothing"
    os.kill(worker.pid, signal.SIGCONT)
    while psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED:
        pass
    for _ in range(7):
        lookout.glance(0, worker.pid)
    assert lookout.slow(0) == "stopped", "in every second glance"
    look(lookout, 100.0 + LOOK_S, worker.pid)
    assert lookout.slow(0) == "stopped", "it stands until the next look"
    look(lookout, 100.0 + 2 * LOOK_S, worker.pid)
    assert lookout.slow(0) == ""


def test_glances_at_a_worker_that_was_replaced_do_not_count(worker):
    lookout = Lookout()
    look(lookout, 100.0, os.getpid())
    stop(worker.pid)
    for _ in range(20):
        lookout.glance(0, worker.pid)
        lookout.glance(1, worker.pid)
    assert lookout.slow(0) == lookout.slow(1) == ""


def test_a_worker_that_is_mostly_found_between_its_steps_waits_for_data(worker):
    lookout = Lookout()
    look(lookout, 100.0, worker.pid)
    for number in range(1, 5):
        look(lookout, 100.0 + 0.2 * number, worker.pid, Place.OUTSIDE)
    look(lookout, 100.0 + LOOK_S, worker.pid, Place.OUTSIDE)
    assert lookout.slow(0) in ("data (time between steps)", "waits for a CPU"), "the latter on a busy machine"


def test_a_worker_that_is_stopped_or_computes_is_not_starved(worker):
    """Starvation itself takes a busy machine; `Turn.starves` is tried with numbers."""
    lookout = Lookout()
    look(lookout, 100.0, worker.pid)
    stop(worker.pid)
    look(lookout, 100.3, worker.pid)
    assert not lookout.starved(0)
    look(lookout, 100.6, worker.pid, Place.COMMUNICATING)
    assert not lookout.starved(0), "it waits for the others"
