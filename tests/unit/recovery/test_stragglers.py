"""When is a slow rank told of, and with which cause? A clock that is passed in, and views filled by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ftlab import messages
from ftlab.config import HealthConfig, JobConfig
from ftlab.events import EventLog
from ftlab.membership import RankTable, Seat
from ftlab.recovery.job import RECOVERING, RUNNING, Job
from ftlab.recovery.stragglers import StragglerWatch, find_slow_rank

STEPS = 5


@pytest.fixture
def worker():
    return SimpleNamespace(slow="")


@pytest.fixture
def roster(worker):
    node = SimpleNamespace(workers={0: worker}, sent=[], send=lambda message: node.sent.append(message))
    return SimpleNamespace(get=lambda name: node if name == "node-1" else None)


@pytest.fixture
def job():
    made = Job(id="j", name="j", config=JobConfig(health=HealthConfig(straggler_steps=STEPS)), wanted=2, path=[],
               status=RUNNING)
    made.table = RankTable(generation=1, seats=tuple(
        Seat(rank=rank, node=f"node-{rank}", address=f"127.0.0.{rank + 2}", local_rank=0) for rank in range(2)))
    return made


def take_steps(job: Job, first: int, slow_s: float) -> None:
    for step in range(first, first + STEPS):
        job.times.add(0, step, 0.01)
        job.times.add(1, step, slow_s)


def test_a_slow_rank_is_told_of_with_the_cause_that_its_node_has_seen_meanwhile(job, roster, worker):
    take_steps(job, 0, 0.04)
    worker.slow = "waits for a CPU"  # of the second before it was slow
    assert find_slow_rank(job, roster, 100.0) is None
    worker.slow = "stopped"
    assert find_slow_rank(job, roster, 101.4) is None
    assert roster.get("node-1").sent == [messages.Examine(local_rank=0, seconds=1.5)], "it was asked once"
    slow = find_slow_rank(job, roster, 101.6)
    assert (slow.found.rank, slow.node, slow.cause) == (1, "node-1", "stopped")
    assert slow.facts()["ratio"] == 4.0 and slow.failure().detail.endswith("the others 10 ms: stopped")


def test_it_is_told_again_only_after_as_many_steps(job, roster):
    take_steps(job, 0, 0.04)
    find_slow_rank(job, roster, 100.0)
    assert find_slow_rank(job, roster, 102.0) is not None
    assert find_slow_rank(job, roster, 110.0) is None
    take_steps(job, STEPS, 0.04)
    assert find_slow_rank(job, roster, 111.0) is None and find_slow_rank(job, roster, 113.0) is not None


def test_one_that_is_quick_again_is_not_told_of_and_its_time_counts_anew(job, roster):
    take_steps(job, 0, 0.04)
    find_slow_rank(job, roster, 100.0)
    take_steps(job, STEPS, 0.01)
    assert find_slow_rank(job, roster, 102.0) is None and job.slow_since is None
    take_steps(job, 2 * STEPS, 0.04)
    assert find_slow_rank(job, roster, 103.0) is None


def test_nobody_is_slow_while_the_world_recovers(job, roster):
    take_steps(job, 0, 0.04)
    job.status = RECOVERING
    assert find_slow_rank(job, roster, 100.0) is None and job.slow_since is None


def test_a_node_that_is_gone_gives_no_cause(job, worker):
    take_steps(job, 0, 0.04)
    nobody = SimpleNamespace(get=lambda name: None)
    find_slow_rank(job, nobody, 100.0)
    slow = find_slow_rank(job, nobody, 102.0)
    assert slow.cause == "" and slow.failure().detail == slow.detail


def test_the_watch_looks_four_times_a_second_and_records_what_it_finds(job, roster):
    log = EventLog()
    watch = StragglerWatch(log)
    take_steps(job, 0, 0.04)
    assert watch.look(job, roster, 100.0) is None and job.slow_since == 100.0
    job.slow_since = None
    assert watch.look(job, roster, 100.2) is None and job.slow_since is None, "too early: it has not looked"
    assert watch.look(job, roster, 100.3) is None and job.slow_since == 100.3
    assert watch.look(job, roster, 102.0).node == "node-1"
    assert [(event.kind, event.rank, event.source) for event in log.events] == [("straggler.found", 1, "node-1")]
