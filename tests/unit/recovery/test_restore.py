"""A controller that was killed: its journal and its nodes bring it back to where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftlab.config import DEFAULT_BUDGETS
from ftlab.messages import Place
from ftlab.policy import decide
from ftlab.recovery.job import FAILED, FINISHED, RECOVERING, RUNNING
from ftlab.recovery.restore import GRACE_S, restore
from tests.unit.recovery.harness import World


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture
def come_back(monkeypatch, journal):
    """The controller of a world dies, and a new one starts from its journal; the nodes live on."""

    def come_back(old: World, *, policies: list[str] | None = None, away: float = 0.3) -> World:
        old.log.close()
        old.clock.now += away
        new = World(monkeypatch, path=journal, clock=old.clock, **old.config.to_dict())
        new.nodes, new.job = old.nodes, old.job
        for node in new.nodes.values():
            node.world, node.sent = new, []

        def load_policy(job: str):
            if policies is not None:
                policies.append(job)
            return decide

        assert restore(new.controller, load_policy) is True
        new.job = new.controller.job
        return new

    return come_back


def test_an_empty_journal_restores_nothing(make_world, journal):
    world = make_world(path=journal)
    assert restore(world.controller, lambda job: decide) is False
    assert world.controller.job is None


def test_job_seats_generation_steps_and_verdicts_come_from_the_journal(make_world, come_back, journal):
    old = make_world(path=journal, nodes=3, spares=1)
    old.start(steps=3, min_nodes=2, budgets={"crash": 1})
    old.silent = {"node-1"}
    old.pass_time(0.8)
    old.seat()
    for step in (4, 5):
        old.commit(step)
    loaded: list[str] = []
    new = come_back(old, policies=loaded)
    job = new.controller.job
    assert job is not old.controller.job and job.to_dict() == old.controller.job.to_dict()
    assert job.config == old.controller.job.config and loaded == [job.id]
    assert job.plan == ["node-0", "node-3", "node-2"] and job.table == old.controller.job.table
    assert job.tables == old.controller.job.tables
    assert (new.controller.generation, job.ledger.step, job.status) == (2, 5, RUNNING)
    assert [new.verdict(f"node-{number}") for number in range(4)] == ["ALIVE", "DEAD", "ALIVE", "ALIVE"]
    assert job.budgets() == {**DEFAULT_BUDGETS, "node": 7, "crash": 1}


def test_nodes_that_say_hello_again_train_on_in_the_same_generation(make_world, come_back, journal):
    old = make_world(path=journal)
    old.start(steps=3)
    for node in old.members():  # one of them made another step meanwhile
        node.is_at(Place.COMPUTING)
    new = come_back(old)
    for node in new.nodes.values():
        node.hello()
        assert node.words() == ["Welcome"] and node.sent[0].fresh is False
    new.pass_time(0.2)
    assert (new.job.status, new.job.generation, new.job.reattaching) == (RUNNING, 1, False)
    assert new.events("recovery.started") == []
    new.commit(4)
    assert [event.step for event in new.events("step.committed")] == [1, 2, 3, 4]


def test_steps_that_were_made_while_it_was_away_are_entered(make_world, come_back, journal):
    old = make_world(path=journal)
    old.start(steps=2)
    new = come_back(old)
    for node in new.members():
        node.hello()
    for node in new.members():
        node.beat([node.record(step) for step in (1, 2, 3, 4, 5)])
    assert [event.step for event in new.events("step.committed")] == [1, 2, 3, 4, 5]
    assert new.job.ledger.step == 5


def test_a_member_that_does_not_come_back_is_dead_after_the_grace_and_replaced(make_world, come_back, journal):
    old = make_world(path=journal)
    old.start(steps=3)
    new = come_back(old)
    for name in ("node-0", "node-2"):
        new.nodes[name].hello()
    new.silent = {"node-1"}
    new.pass_time(GRACE_S)
    assert new.verdict("node-1") == "ALIVE" and new.job.reattaching
    new.pass_time(1.0)
    assert new.verdict("node-1") == "DEAD"
    assert new.tables()[-1] == ["node-0", "node-2"] and new.job.generation == 2


def test_a_member_whose_workers_are_gone_leads_to_a_recovery(make_world, come_back, journal):
    old = make_world(path=journal)
    old.start(steps=3)
    new = come_back(old)
    new.nodes["node-0"].hello()
    new.nodes["node-2"].hello()
    new.nodes["node-1"].places = {}  # its lease ran out: it started over
    new.nodes["node-1"].hello()
    assert new.job.status == RECOVERING
    new.decide()
    new.nodes["node-1"].restarts_worker()
    assert new.tables()[-1] == ["node-0", "node-1"] and new.job.generation == 2


def test_a_member_that_was_replaced_by_another_process_is_not_taken_for_the_old_one(make_world, come_back, journal):
    old = make_world(path=journal)
    old.start(steps=3)
    new = come_back(old)
    new.nodes["node-0"].hello()
    new.nodes["node-1"].instance, new.nodes["node-1"].places = "another", {}
    new.nodes["node-1"].hello()
    assert new.nodes["node-1"].words()[:2] == ["Welcome", "RunJob"] and new.nodes["node-1"].sent[0].fresh
    assert [event.source for event in new.events("node.died")] == ["node-1"] and new.job.status == RECOVERING
    new.decide()
    new.nodes["node-2"].hello()
    assert new.tables()[-1] == ["node-0", "node-2"] and new.job.generation == 2
    assert [(row["cause"], row["node"]) for row in new.job.history] == [("node", "node-1")]
    assert new.job.budgets() == {**DEFAULT_BUDGETS, "node": 7}, "its workers are not accused as well"
    assert new.events("worker.restarted") == []


def test_a_death_that_was_recorded_but_not_yet_acted_on_is_recovered_from(make_world, come_back, journal):
    old = make_world(path=journal)
    old.start(steps=3)
    old.controller.node_exited("node-1", "gone")
    assert old.log.events[-1].kind == "recovery.started"
    new = come_back(old)
    for name in ("node-0", "node-2"):
        new.nodes[name].hello()
    new.decide()
    assert new.tables()[-1] == ["node-0", "node-2"] and new.job.generation == 2
    new.nodes["node-0"].stops()
    new.seat()
    new.commit(4)
    assert new.job.status == RUNNING


def test_nothing_is_decided_before_those_who_hold_the_state_are_back(make_world, come_back, journal):
    """A node's end that the launcher tells at once made the new controller give up three that lived."""
    old = make_world(path=journal)
    old.start(steps=3)
    new = come_back(old)
    new.controller.node_exited("node-1", "killed")
    new.nodes["node-2"].hello()
    new.decide()
    assert not new.job.over and new.events("action.decided") == []
    new.nodes["node-0"].hello()
    new.decide()
    assert new.tables()[-1] == ["node-0", "node-2"] and new.job.generation == 2


def test_a_recovery_that_waited_for_a_new_node_is_taken_up_again(make_world, come_back, journal):
    old = make_world(path=journal, spares=0)
    old.start(steps=3)
    old.controller.node_exited("node-1", "gone")
    old.decide()
    assert old.provider.started == ["node-2"]
    new = come_back(old)
    new.nodes["node-0"].hello()
    new.join("node-2")
    new.decide()
    new.nodes["node-2"].parks()
    assert new.tables()[1:] == [["node-0", "node-2"]] and new.provider.started == []


def test_a_dead_node_that_stays_away_is_given_back_by_the_next_controller(make_world, come_back, journal):
    old = make_world(path=journal)
    old.start(steps=3)
    old.silent = {"node-1"}
    old.pass_time(0.8)
    old.seat()
    old.commit(4)
    new = come_back(old)
    for name in ("node-0", "node-2"):
        new.nodes[name].hello()
    new.pass_time(new.config.reclaim_s + 0.1)
    assert new.provider.removed == ["node-1"] and new.verdict("node-1") == "gone"


def test_a_job_that_had_not_started_yet_starts(make_world, come_back, journal):
    old = make_world(path=journal)
    old.join("node-0", "node-1", "node-2")
    old.submit()
    old.nodes["node-0"].parks()
    new = come_back(old)
    for node in new.nodes.values():
        node.hello()
        node.parks()
    assert new.tables() == [["node-0", "node-1"]] and new.job.history == []


def test_a_spare_that_comes_back_last_is_not_accused(make_world, come_back, journal):
    old = make_world(path=journal)
    old.start(steps=3)
    for node in old.members():
        node.is_at(Place.COMPUTING)
    new = come_back(old)
    for name in ("node-0", "node-1", "node-2"):
        new.nodes[name].hello()
    assert new.events("worker.restarted") == [] and not new.job.broken and new.job.retries == {}


@pytest.mark.parametrize("how", ["finished", "cancelled"])
def test_a_job_that_was_over_stays_over(make_world, come_back, journal, how):
    old = make_world(path=journal)
    job = old.start(steps=2)
    if how == "finished":
        for node in old.members():
            node.finishes()
    else:
        old.controller.cancel(job)
    new = come_back(old)
    assert new.job.status == (FINISHED if how == "finished" else FAILED) and not new.job.reattaching
    assert str(new.job.error) == str(job.error) and type(new.job.error) is type(job.error)
    for node in new.nodes.values():
        node.places = {}
        node.hello()
    assert all(node.words() == ["Welcome"] for node in new.nodes.values())


def test_a_node_that_was_asked_for_is_still_expected_and_its_name_not_used_again(make_world, come_back, journal):
    old = make_world(path=journal, nodes=2, spares=0)
    old.start(steps=2)
    old.controller.roster.start()
    new = come_back(old)
    assert new.controller.roster.get("node-2").joined is False
    assert new.controller.roster.start() == "node-3"


def test_a_node_that_was_given_back_is_forgotten(make_world, come_back, journal):
    old = make_world(path=journal)
    old.start(steps=2)
    old.silent = {"node-1"}
    old.pass_time(0.8)
    old.seat()
    old.commit(3)
    old.pass_time(10.2)
    assert old.verdict("node-1") == "gone"
    new = come_back(old)
    assert new.verdict("node-1") == "gone"


def test_a_torn_last_line_is_ignored(make_world, come_back, journal):
    old = make_world(path=journal)
    old.start(steps=3)
    with journal.open("ab") as file:
        file.write(b'{"kind":"step.committed","seq":99,"st')
    new = come_back(old)
    assert (new.job.ledger.step, new.job.generation, new.job.status) == (3, 1, RUNNING)


def test_a_controller_that_is_slow_to_come_up_leaves_its_nodes_their_grace(make_world, come_back, journal):
    """Time in which it did not look was added to their silence: the grace was gone at the first look."""
    old = make_world(path=journal, nodes=3, spares=0)
    old.start(steps=3)
    new = come_back(old)
    new.nodes["node-0"].hello()
    new.silent = {"node-1", "node-2"}
    new.clock.now += 0.3  # it was busy
    new.controller.tick()
    new.pass_time(GRACE_S)
    assert [new.verdict(f"node-{number}") for number in range(3)] == ["ALIVE"] * 3


def test_nobody_is_accused_before_all_are_back(make_world, come_back, journal):
    """Who is back waits for those who are not, and looks as if it held the others up."""
    old = make_world(path=journal, nodes=3, spares=0)
    old.start(steps=6)
    new = come_back(old)
    new.nodes["node-0"].is_at(Place.COMPUTING)
    new.nodes["node-1"].is_at(Place.COMMUNICATING)
    for name in ("node-0", "node-1"):
        new.nodes[name].hello()
    new.silent = {"node-2"}
    new.pass_time(1.6)
    assert new.events("worker.failed") == [] and new.job.reattaching


def test_a_journal_that_was_made_shorter_restores_the_same(make_world, come_back, journal):
    old = make_world(path=journal, nodes=3, spares=1)
    old.log._longest = old.log._limit = 200
    old.start(steps=3)
    old.silent = {"node-1"}
    old.pass_time(0.8)
    old.seat()
    old.silent = set()
    for step in range(4, 1000):
        old.commit(step)
    assert len(old.log.events) <= 200 < old.log.seq
    new = come_back(old)
    assert new.job.to_dict() == old.job.to_dict() and new.job.table == old.job.table
    assert new.job.budgets() == old.job.budgets() and new.controller.generation == old.controller.generation
    assert {name: node.verdict for name, node in new.controller.roster.nodes.items()} == {
        name: node.verdict for name, node in old.controller.roster.nodes.items()}
    assert new.log.seq == old.log.seq and new.log.events == old.log.events
