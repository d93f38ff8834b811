"""Pauses between two steps that clients ask for: all ranks pause, or nobody does."""

from __future__ import annotations

import pytest

from ftlab import messages
from ftlab.recovery.restore import restore
from tests.unit.recovery.harness import World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch, nodes=2, spares=1)


def says(world: World, name: str, asked: int, step: int, missed: bool = False) -> None:
    assert world.job is not None
    world.nodes[name].worker_says(messages.Held(generation=world.job.generation, asked=asked, step=step, missed=missed))


def kinds(world: World) -> list[str]:
    return [event.kind for event in world.log.events if event.kind.startswith("hold.")]


def test_a_step_is_reached_when_all_ranks_pause_there(world):
    job = world.start(steps=3)
    assert world.controller.holds.place(job, "aa", 5) is None
    assert all(node.last(messages.Hold).steps == [5] for node in world.members())
    says(world, "node-0", 5, 5)
    assert kinds(world) == ["hold.placed"]
    says(world, "node-1", 5, 5)
    assert kinds(world) == ["hold.placed", "hold.reached"]
    world.controller.holds.release(job, "aa")
    assert all(node.last(messages.Hold).steps == [] for node in world.members())


def test_a_step_that_the_journal_is_beyond_is_refused_at_once(world):
    job = world.start(steps=7)
    assert world.controller.holds.place(job, "aa", 5) == 7 and kinds(world) == []


def test_if_one_rank_is_beyond_the_step_nobody_pauses(world):
    job = world.start(steps=3)
    world.controller.holds.place(job, "aa", 3)
    says(world, "node-0", 3, 3)
    says(world, "node-1", 3, 4, missed=True)
    (missed,) = world.events("hold.missed")
    assert missed.data["reason"] == "step 3 has passed: the job is at step 4"
    assert all(node.last(messages.Hold).steps == [] for node in world.members())


def test_two_holds_at_one_step_are_let_go_one_by_one(world):
    job = world.start(steps=3)
    for name in ("aa", "bb"):
        world.controller.holds.place(job, name, 5)
    for name in ("node-0", "node-1"):
        says(world, name, 5, 5)
    assert len(world.events("hold.reached")) == 2
    world.controller.holds.release(job, "aa")
    assert world.nodes["node-0"].last(messages.Hold).steps == [5]
    world.controller.holds.release(job, "bb")
    assert world.nodes["node-0"].last(messages.Hold).steps == []


def test_a_new_generation_learns_what_was_not_reached_yet(world):
    job = world.start(steps=3)
    for name, step in (("aa", 3), ("bb", 9)):
        world.controller.holds.place(job, name, step)
    for name in ("node-0", "node-1"):
        says(world, name, 3, 3)
    world.controller.node_exited("node-1", "killed by SIGKILL")
    world.decide()
    assert job.table.nodes == ("node-0", "node-2")
    assert world.nodes["node-2"].last(messages.Join).holds == [9], "step 3 was reached: nobody waits there again"


def test_a_rank_that_paused_in_the_last_generation_does_not_count_in_this_one(world):
    job = world.start(steps=3)
    world.controller.holds.place(job, "aa", 5)
    says(world, "node-0", 5, 5)
    world.controller.node_exited("node-1", "killed by SIGKILL")
    world.decide()
    world.seat()
    says(world, "node-2", 5, 5)
    assert not world.events("hold.reached")
    says(world, "node-0", 5, 5)
    assert world.events("hold.reached")


def test_when_the_job_ends_its_holds_are_missed(world):
    job = world.start(steps=3)
    world.controller.holds.place(job, "aa", 50)
    for node in world.members():
        node.finishes()
    (missed,) = world.events("hold.missed")
    assert missed.data["reason"] == "the job ended at step 3, before step 50 was reached"


def test_a_hold_that_is_placed_before_the_job_is_there_waits_for_it(world):
    world.controller.holds.place(None, "aa", 0)
    world.join("node-0", "node-1")
    world.submit()
    for node in world.nodes.values():
        node.parks()
    assert world.nodes["node-0"].last(messages.Join).holds == [0]


def test_a_controller_that_comes_back_knows_them(world, monkeypatch, tmp_path):
    world = World(monkeypatch, nodes=2, spares=1, path=tmp_path / "journal")
    job = world.start(steps=3)
    for name, step in (("aa", 5), ("bb", 9), ("cc", 12)):
        world.controller.holds.place(job, name, step)
    for name in ("node-0", "node-1"):
        says(world, name, 5, 5)
    world.controller.holds.release(job, "cc")
    again = World(monkeypatch, nodes=2, spares=1, path=tmp_path / "journal", clock=world.clock)
    restore(again.controller, lambda job: job.policy if False else None)
    assert again.controller.holds.waiting() == [9], "who waited at step 5 went on when the controller died"
