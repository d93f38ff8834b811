"""Who sits when a job starts."""

from __future__ import annotations

import pytest

from ftlab.recovery.job import RESTORING, STARTING
from ftlab.recovery.start_plan import PATIENCE_S, Muster, choose_seats
from tests.unit.recovery.harness import World


@pytest.mark.parametrize(("ready", "coming", "waited", "seats"), [
    ("abc", 0, 0.0, "abc"),
    ("abcd", 0, 0.0, "abc"),
    ("ab", 0, 0.0, "ab"),  # nobody else will come
    ("ab", 1, 0.0, ""),  # a moment's patience
    ("ab", 1, PATIENCE_S + 0.1, "ab"),
    ("a", 0, 99.0, ""),  # too few, however long it takes
])
def test_a_job_starts_on_all_it_wants_or_on_enough(ready, coming, waited, seats):
    muster = Muster(wanted=3, minimum=2, ready=tuple(ready), coming=coming, enough_for_s=waited)
    assert choose_seats(muster) == tuple(seats)


def test_a_job_whose_min_nodes_are_there_does_not_wait_for_more(monkeypatch):
    world = World(monkeypatch, nodes=3, spares=0, replace=False)
    world.join("node-0", "node-1")
    job = world.submit(min_nodes=2)
    for node in world.nodes.values():
        node.parks()
    assert job.status == RESTORING and job.plan == ["node-0", "node-1"]


def test_it_waits_a_moment_for_one_that_is_still_coming_and_then_goes_on_without_it(monkeypatch):
    world = World(monkeypatch, nodes=3, spares=0)
    world.join("node-0", "node-1", "node-2")
    job = world.submit(min_nodes=2)
    for name in ("node-0", "node-1"):
        world.nodes[name].parks()
    assert job.status == STARTING
    world.pass_time(PATIENCE_S + 1)
    assert job.status == RESTORING and job.plan == ["node-0", "node-1"]
    world.seat()
    world.commit(1)
    world.nodes["node-2"].parks()
    world.decide()
    assert job.plan == ["node-0", "node-1", "node-2"], "it is added when it comes"


def test_without_min_nodes_a_job_waits_for_all(monkeypatch):
    world = World(monkeypatch, nodes=3, spares=0)
    world.join("node-0", "node-1", "node-2")
    job = world.submit()
    for name in ("node-0", "node-1"):
        world.nodes[name].parks()
    world.pass_time(2 * PATIENCE_S)
    assert job.status == STARTING
