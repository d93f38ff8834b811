"""What a client keeps of a cluster's log, and what it costs to ask a job how far it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ftlab.cluster.client import Follower
from ftlab.cluster.job import Job
from ftlab.errors import ClusterClosed
from ftlab.events import LONGEST, Event


@pytest.fixture
def follower() -> Iterator[Follower]:
    follower = Follower("unix:///nowhere", "token")
    yield follower
    follower._loop.close()


def _frames(first: int, count: int) -> list[dict[str, Any]]:
    events = (Event(kind="step.committed", seq=seq, at=float(seq), generation=1, step=seq, data={"loss": 1.0})
              for seq in range(first, first + count))
    return [{"event": json.loads(event.to_json())} for event in events]


@pytest.mark.parametrize("steps", [60_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_a_client_of_a_long_job_keeps_a_short_log(follower, steps):
    job = Job(SimpleNamespace(follower=follower, events=follower.events), "j", "train", 0)
    for first in range(1, steps + 1, 500):
        follower._take(_frames(first, 500))
        job.cluster.events = follower.events
        assert job.step == first + 499
    assert len(follower.events) <= LONGEST and follower.seq == steps
    assert sum(event.stands_for for event in follower.events) == steps


def test_what_is_known_already_is_not_taken_twice_and_gaps_are_no_harm(follower):
    """A stream that begins anew may tell the last events again; a log that was made shorter has gaps."""
    follower._take(_frames(1, 3))
    follower._take(_frames(2, 3))
    follower._take(_frames(10, 1))
    assert [event.seq for event in follower.events] == [1, 2, 3, 4, 10] and follower.seq == 10
    follower.wait_for(10, timeout=0.0)
    with pytest.raises(ClusterClosed):
        follower.wait_for(11, timeout=0.0)


class _Counting(list):
    """A log that counts how many events were looked at."""

    looks = 0

    def __getitem__(self, where):
        found = super().__getitem__(where)
        type(self).looks += len(found) if isinstance(where, slice) else 1
        return found


def test_asking_a_job_looks_only_at_what_is_new():
    """It read the whole log each time: a wait of many steps cost the square of them."""
    log, follower = _Counting(), SimpleNamespace(seq=0)
    job = Job(SimpleNamespace(follower=follower, events=log), "j", "train", 2)
    for seq in range(1, 3001):
        log.append(Event(kind="step.committed", seq=seq, step=seq))
        follower.seq = seq
        assert job.step == (seq if seq > 2 else 0) and not job.done
    assert _Counting.looks < 3000 * 2 * 30
    log.append(Event(kind="job.finished", seq=3001, data={"job": "other"}))
    log.append(Event(kind="job.finished", seq=3002, data={"job": "j"}))
    log.append(Event(kind="step.committed", seq=3003, step=9999))
    follower.seq = 3003
    assert job.done and job.step == 3000
    assert [event.seq for event in job.events] == list(range(3, 3003)), "from its begin to its end, and no further"
