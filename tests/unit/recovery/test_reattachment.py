"""A node whose link was made anew is told what it missed, and what it lost shows."""

from __future__ import annotations

import pytest

from ftlab import messages
from ftlab.recovery.job import RECOVERING, RESTORING, RUNNING
from tests.unit.recovery.harness import World


@pytest.fixture
def world(make_world) -> World:
    world = make_world(nodes=2, spares=1)
    world.start(steps=3)
    return world


def _lose_link(world: World, name: str) -> None:
    """Its link is gone, and so is what was sent on it lately; the node lives."""
    world.controller.node_unlinked(name, world.nodes[name].link)
    world.nodes[name].sent = []


def test_a_new_seat_that_was_lost_with_the_link_is_offered_again(world):
    """The job waited for its first step until `restore_limit_s`."""
    world.controller.node_exited("node-1", "gone")
    world.decide()
    assert world.job.status == RESTORING and world.job.generation == 2
    secret = world.nodes["node-2"].last(messages.Join).secret
    _lose_link(world, "node-0")
    world.nodes["node-0"].hello()
    assert world.nodes["node-0"].words() == ["Welcome", "Terminate", "Join"]
    assert world.nodes["node-0"].last(messages.Terminate).generation == 1
    assert world.nodes["node-0"].last(messages.Join).secret == secret
    world.seat()
    world.commit(4)
    assert world.job.status == RUNNING


def test_an_order_to_stop_that_was_lost_with_the_link_is_given_again(make_world):
    world = make_world(nodes=2, spares=0)
    world.start(steps=3)
    _lose_link(world, "node-0")
    world.controller.node_exited("node-1", "gone")
    world.nodes["node-0"].hello()
    assert world.job.status == RECOVERING
    assert world.nodes["node-0"].words() == ["Welcome", "Terminate"]


def test_a_worker_whose_end_was_told_on_a_link_that_was_gone_is_missed(world):
    _lose_link(world, "node-0")
    other = world.nodes["node-0"].places.pop(0)
    world.nodes["node-0"].places[1] = {**other}  # it runs something, but not that worker
    world.nodes["node-0"].runs[1], world.nodes["node-0"].pids[1] = "other", 5
    world.nodes["node-0"].hello()
    (failed,) = world.events("worker.failed")
    assert failed.source == "node-0" and failed.data["cause"] == "crash" and world.job.status == RECOVERING


def test_a_worker_that_was_never_started_because_the_order_was_lost_is_started(world):
    world.nodes["node-0"].fails()
    world.decide()
    run = world.controller.roster.get("node-0").workers[0].run
    _lose_link(world, "node-0")
    world.nodes["node-0"].places[1] = {"generation": 0, "rank": -1, "step": 0, "place": 0, "since": 0.0,
                                       "committed_at": 0.0}
    world.nodes["node-0"].runs[1], world.nodes["node-0"].pids[1] = "other", 5
    world.nodes["node-0"].hello()
    assert world.controller.roster.get("node-0").workers[0].run != run
    assert "RunJob" in world.nodes["node-0"].words()


def test_a_job_that_ended_while_a_node_had_no_link_ends_there_too(world):
    _lose_link(world, "node-0")
    world.controller.cancel(world.job)
    world.nodes["node-0"].hello()
    assert world.nodes["node-0"].words() == ["Welcome", "EndJob"]
