"""Ranks that go back to a checkpoint leave their group only when all have said so."""

from __future__ import annotations

import pytest

from ftlab import messages
from ftlab.recovery.job import RESTORING, RUNNING
from tests.unit.recovery.harness import World

WHY = "goes back to a checkpoint: the loss is NaN"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch, nodes=3, spares=0)


def stopped(world: World, name: str, rewind: bool, reason: str = WHY) -> None:
    assert world.job is not None
    world.nodes[name].worker_says(messages.Stopped(generation=world.job.generation, step=1, at=world.clock.now,
                                                   reason=reason, rewind=rewind))


def test_nobody_is_told_to_leave_before_all_have_said_that_they_go_back(world):
    job = world.start()
    stopped(world, "node-1", rewind=True)
    stopped(world, "node-2", rewind=True)
    assert job.status == RUNNING and job.generation == 1, "node-0 may still wait for what node-1 has to send"
    assert all("Terminate" not in node.words() for node in world.nodes.values())
    stopped(world, "node-0", rewind=True)
    assert job.status == RESTORING and job.generation == 2
    assert [event.data["cause"] for event in world.events("recovery.started")] == ["numbers"]


def test_one_that_lost_its_peers_before_it_heard_does_not_keep_the_others_waiting(world):
    job = world.start()
    stopped(world, "node-0", rewind=True)
    stopped(world, "node-1", rewind=True)
    stopped(world, "node-2", rewind=False, reason="RuntimeError: connection closed by peer")
    assert job.generation == 2
    assert [event.data["detail"] for event in world.events("recovery.started")] == [WHY]


def test_what_the_last_generation_decided_is_forgotten_in_the_next(world):
    job = world.start()
    for name in ("node-0", "node-1", "node-2"):
        stopped(world, name, rewind=True)
    world.seat()
    world.commit(2)
    stopped(world, "node-0", rewind=True)
    assert job.generation == 2 and job.status == RUNNING
