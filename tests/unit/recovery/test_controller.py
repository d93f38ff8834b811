"""The controller, driven by hand: every input is a plain call, so whole recoveries run without a socket or a sleep."""

from __future__ import annotations

import pytest

from ftlab import messages
from ftlab.config import DEFAULT_BUDGETS
from ftlab.errors import BadMessage, BadPolicy, ConfigError, JobCancelled, JobError, RecoveryExhausted, TrainingFailed
from ftlab.events import in_order_of_time
from ftlab.messages import Place
from ftlab.policy import Abort, Continue, Grow, Replace, Restart, Shrink, Wait, decide
from ftlab.recovery.job import FAILED, FINISHED, RECOVERING, RESTORING, RUNNING, STARTING
from tests.unit.recovery.harness import STORE, Node, World

DOUBTFUL = 0.65  # between suspect_s and dead_s
SILENCE = 0.95  # longer than dead_s, and time for the decision after it


# ---- the start -----------------------------------------------------------------------------------------------------


def test_the_first_rank_table_comes_when_all_members_are_parked(make_world):
    world = make_world(nodes=2, spares=1)
    world.join("node-0", "node-1", "node-2")
    job = world.submit()
    assert all(node.words() == ["Welcome", "RunJob"] for node in world.nodes.values())
    world.nodes["node-2"].parks()
    world.nodes["node-0"].parks()
    assert (job.status, world.tables()) == (STARTING, [])
    world.nodes["node-1"].parks()
    assert (job.status, world.tables()) == (RESTORING, [["node-0", "node-1"]])
    join = world.nodes["node-1"].last(messages.Join)
    assert join.store == list(STORE) and join.table == job.table.to_dict()
    assert "Join" not in world.nodes["node-2"].words(), "a spare has no seat"


def test_a_job_runs_once_every_rank_has_made_its_first_step(make_world):
    world = make_world()
    job = world.start(steps=0)
    world.nodes["node-0"].commits(1)
    assert job.status == RESTORING
    world.nodes["node-1"].commits(1)
    assert job.status == RUNNING
    assert [event.generation for event in world.events("job.started")] == [1]
    assert [event.step for event in world.events("step.committed")] == [1]


def test_every_worker_of_a_node_gets_a_rank(make_world):
    world = make_world(nodes=2, spares=0, procs_per_node=2)
    job = world.start(steps=2)
    assert [(seat.node, seat.local_rank) for seat in job.table.seats] == [
        ("node-0", 0), ("node-0", 1), ("node-1", 0), ("node-1", 1)]
    assert job.ledger.step == 2


def test_a_second_job_is_refused_while_the_first_one_runs(make_world):
    world = make_world()
    world.start()
    with pytest.raises(JobError, match="is still running"):
        world.submit()


def test_a_job_whose_workers_never_reach_their_first_step_ends_and_says_who_is_missing(make_world):
    world = make_world(nodes=2, spares=0)
    world.join("node-0", "node-1")
    job = world.submit(start_timeout_s=2.0)
    world.nodes["node-0"].parks()
    world.pass_time(2.2)
    assert job.status == FAILED
    assert "1/2 nodes reached their first step" in str(job.error) and "node-1 is running" in str(job.error)


def test_a_job_that_wants_more_nodes_than_there_are_says_so_and_not_that_its_set_up_is_slow(make_world):
    world = make_world(nodes=3, spares=0, replace=False)
    world.join("node-0", "node-1", "node-2")
    world.controller.node_exited("node-2", "exited (1)")
    job = world.submit(start_timeout_s=2.0)
    for name in ("node-0", "node-1"):
        world.nodes[name].parks()
    world.pass_time(2.2)
    assert job.status == FAILED and "min_nodes=2" in job.error.hint
    assert "only 2 of the 3 nodes that it wants are there" in str(job.error) and "set-up" not in str(job.error)


def test_a_member_that_dies_before_the_first_table_is_made_up_for(make_world):
    world = make_world(nodes=2, spares=1)
    world.join("node-0", "node-1", "node-2")
    job = world.submit()
    world.controller.node_exited("node-0", "exited (1)")
    for name in ("node-1", "node-2"):
        world.nodes[name].parks()
    assert world.tables() == [["node-1", "node-2"]] and job.status == RESTORING


# ---- a node dies ---------------------------------------------------------------------------------------------------


def test_a_silent_node_is_suspected_then_dead_and_the_spare_takes_its_very_seat(make_world):
    world = make_world(nodes=3, spares=1)
    job = world.start(steps=3)
    world.silent = {"node-1"}
    world.pass_time(DOUBTFUL)
    assert world.verdict("node-1") == "SUSPECT" and job.status == RUNNING
    assert [event.source for event in world.events("node.suspected")] == ["node-1"]
    world.pass_time(0.4)
    assert world.verdict("node-1") == "DEAD"
    assert world.tables() == [["node-0", "node-1", "node-2"], ["node-0", "node-3", "node-2"]]
    assert job.generation == 2 and job.table.ranks_of("node-3") == (1,)
    assert "declared dead" in world.nodes["node-1"].dropped
    for survivor in ("node-0", "node-2"):
        assert world.nodes[survivor].words() == ["Welcome", "RunJob", "Join", "Terminate", "Join"]
        assert world.nodes[survivor].last(messages.Terminate).generation == 1
    assert world.nodes["node-3"].words() == ["Welcome", "RunJob", "Join"], "a spare has nothing to stop"
    assert world.provider.started == []


def test_when_most_nodes_fall_silent_at_once_the_machine_is_suspected_first(make_world):
    world = make_world(nodes=3, spares=1)
    job = world.start(steps=3)
    world.silent = {"node-0", "node-1", "node-2"}
    world.pass_time(1.5)
    assert [world.verdict(name) for name in sorted(world.silent)] == ["SUSPECT"] * 3 and job.status == RUNNING
    world.silent = set()
    world.pass_time(0.3)
    assert job.status == RUNNING and job.generation == 1 and world.events("node.died") == []


def test_most_nodes_that_stay_silent_are_dead_in_the_end(make_world):
    world = make_world(nodes=3, spares=1)
    world.start(steps=3)
    world.silent = {"node-0", "node-1", "node-2"}
    world.job.saved = 2
    world.pass_time(2.7)
    assert {event.source for event in world.events("node.died")} == world.silent


def test_the_last_ones_that_hold_the_state_are_given_up_only_when_their_lease_has_run_out(make_world):
    world = make_world(nodes=3, spares=1)
    job = world.start(steps=3)
    world.silent = {"node-0", "node-1", "node-2"}
    world.pass_time(4.8)
    assert world.events("node.died") == [] and job.status == RUNNING
    world.pass_time(0.4)
    assert {event.source for event in world.events("node.died")} == world.silent
    assert type(job.error).__name__ == "StateLost"


def test_half_of_the_nodes_are_given_up_as_soon_as_one(make_world):
    world = make_world(nodes=3, spares=1)
    world.start(steps=3)
    world.silent = {"node-1", "node-2"}
    world.pass_time(0.85)
    assert {event.source for event in world.events("node.died")} == world.silent


def test_a_restored_world_runs_again_and_the_record_tells_how_it_got_there(make_world):
    world = make_world(nodes=2, spares=1)
    job = world.start(steps=3)
    world.silent = {"node-1"}
    world.pass_time(0.71)
    world.nodes["node-0"].stops()
    world.pass_time(0.1)
    world.seat()
    world.nodes["node-0"].worker_says(messages.Spans(generation=2, spans=[["connect", 1.0, 1.5]], complete=True,
                                                     source="live"))
    world.commit(4)
    assert job.status == RUNNING and job.recovery is None
    (finished,) = world.events("recovery.finished")
    assert (finished.generation, finished.data["cause"], finished.data["nodes"]) == (2, "node", ["node-1"])
    assert finished.data["rung"] == "live" and finished.data["attempts"] == 1
    assert list(finished.data["phases"]) == ["detect", "terminate", "replace", "ranktable", "continue", "connect"]
    (started,) = world.events("recovery.started")
    (died,) = world.events("node.died")
    assert started.at - died.data["evidence"] == pytest.approx(0.7, abs=0.05), "found when the silence was long enough"
    assert [event.step for event in world.events("step.committed")] == [1, 2, 3, 4]


def test_survivors_that_stop_before_the_verdict_are_not_waited_for(make_world):
    world = make_world(nodes=2, spares=1)
    world.start(steps=3)
    world.nodes["node-0"].stops()  # its peer's connection closed: it noticed before the controller did
    world.controller.node_exited("node-1", "killed by SIGKILL")
    world.decide()
    world.pass_time(0.1)
    world.seat()
    world.commit(4)
    [finished] = world.events("recovery.finished")
    assert "terminate" in finished.data["phases"]



def test_a_node_whose_process_ended_is_dead_at_once(make_world):
    world = make_world()
    job = world.start()
    world.controller.node_exited("node-0", "killed by SIGKILL")
    assert job.status == RECOVERING
    world.decide()
    assert world.tables()[-1] == ["node-2", "node-1"]
    assert world.events("node.died")[0].data["reason"] == "killed by SIGKILL"


def test_a_closed_link_alone_is_no_death(make_world):
    world = make_world()
    job = world.start()
    node = world.nodes["node-1"]
    world.controller.node_unlinked("node-1", node.link)
    world.pass_time(0.2)
    node.hello()
    world.pass_time(1.0)
    assert (world.verdict("node-1"), job.status, job.generation) == ("ALIVE", RUNNING, 1)
    assert node.last(messages.Welcome).fresh is False


def test_a_suspect_that_speaks_again_is_alive(make_world):
    world = make_world()
    job = world.start()
    world.silent = {"node-1"}
    world.pass_time(DOUBTFUL)
    assert world.verdict("node-1") == "SUSPECT"
    world.silent = set()
    world.beat()
    world.pass_time(0.8)
    assert (world.verdict("node-1"), job.generation) == ("ALIVE", 1)


def test_a_controller_that_was_away_accuses_nobody(make_world):
    world = make_world()
    job = world.start()
    world.pass_time(0.2)
    world.clock.now += 30.0  # it was stopped, or the machine was busy: the heartbeats wait in its sockets
    world.controller.tick()
    assert [world.verdict(name) for name in world.nodes] == ["ALIVE"] * 3
    assert world.events("node.suspected") == [] and job.status == RUNNING
    world.pass_time(0.6)
    assert [world.verdict(name) for name in world.nodes] == ["ALIVE"] * 3


def test_a_controller_that_was_away_blames_no_worker_for_what_it_was_doing_before(make_world):
    """A rank in the middle of its step looked as if it had been there all the time, and was started again."""
    world = make_world()
    job = world.start(steps=0)
    for step in range(1, 6):
        world.pass_time(0.02)
        world.commit(step)
    first, second = world.members()
    first.is_at(Place.COMPUTING)
    second.is_at(Place.COMMUNICATING)
    world.beat()
    world.clock.now += 1.6
    world.controller.tick()
    assert world.events("worker.failed") == [] and job.status == RUNNING
    first.beat()  # what it said meanwhile is read only now, one message after the other
    second.beat()
    world.controller.tick()
    assert world.events("worker.failed") == [] and job.status == RUNNING
    for step in (6, 7):
        world.commit(step)
    world.pass_time(1.0)
    assert world.events("worker.failed") == [] and world.events("recovery.started") == []


def test_a_controller_that_was_away_still_finds_the_worker_that_stalls(make_world):
    world = make_world()
    world.start(steps=0)
    for step in range(1, 6):
        world.pass_time(0.02)
        world.commit(step)
    first, second = world.members()
    first.is_at(Place.COMPUTING)
    second.is_at(Place.COMMUNICATING)
    world.clock.now += 30.0
    world.controller.tick()
    world.pass_time(1.0)
    assert [event.source for event in world.events("worker.failed")] == [first.name]


def test_a_controller_that_was_away_does_not_wait_longer_for_those_who_fall_silent_later(make_world):
    world = make_world()
    world.start()
    world.clock.now += 30.0
    world.beat()
    world.controller.tick()
    world.silent = {"node-1"}
    world.pass_time(SILENCE)
    assert world.verdict("node-1") == "DEAD"


def test_two_nodes_that_die_together_are_replaced_together(make_world):
    world = make_world(nodes=3, spares=2)
    job = world.start()
    world.controller.node_exited("node-0", "gone")
    world.controller.node_exited("node-2", "gone")
    world.decide()
    assert job.generation == 2 and world.tables()[-1] == ["node-3", "node-1", "node-4"]
    assert len(world.events("recovery.started")) == 1
    assert job.recovery.nodes == ["node-0", "node-2"]


def test_without_a_spare_the_provider_is_asked_and_the_new_node_gets_the_seat(make_world):
    world = make_world(nodes=2, spares=0)
    job = world.start()
    world.controller.node_exited("node-0", "gone")
    world.decide()
    assert world.provider.started == ["node-2"]
    assert [event.source for event in world.events("node.requested")] == ["node-2"]
    assert (job.status, len(world.tables())) == (RECOVERING, 1)
    world.join("node-2")
    world.pass_time(0.1)
    assert len(world.tables()) == 1, "it has not reached its first step yet"
    world.nodes["node-2"].parks()
    assert world.tables()[-1] == ["node-2", "node-1"]


def test_after_a_spare_was_promoted_a_new_one_is_started_behind_the_jobs_back(make_world):
    world = make_world(nodes=2, spares=1, replenish=True)
    job = world.start()
    world.controller.node_exited("node-0", "gone")
    world.decide()
    assert world.provider.started == [], "not while the job waits"
    world.seat()
    world.commit(2)
    assert world.provider.started == ["node-3"] and job.status == RUNNING


def test_a_spare_that_dies_disturbs_nobody(make_world):
    world = make_world()
    job = world.start()
    world.silent = {"node-2"}
    world.pass_time(SILENCE)
    assert world.verdict("node-2") == "DEAD"
    assert (job.status, job.generation) == (RUNNING, 1)
    assert "Terminate" not in world.nodes["node-0"].words()


def test_a_dead_node_that_stays_away_is_given_back(make_world):
    world = make_world()
    world.start()
    world.silent = {"node-1"}
    world.pass_time(SILENCE)
    assert world.provider.removed == []
    world.pass_time(10.0)
    assert world.provider.removed == ["node-1"] and world.verdict("node-1") == "gone"


# ---- a node that was given up comes back ---------------------------------------------------------------------------


def test_a_node_that_comes_back_from_the_dead_must_start_over(make_world):
    world = make_world()
    job = world.start(steps=3)
    world.silent = {"node-1"}
    world.pass_time(SILENCE)
    world.silent = set()
    old = world.nodes["node-1"]
    old.hello()
    assert old.last(messages.Welcome).fresh is True
    (fenced,) = world.events("node.fenced")
    assert fenced.source == "node-1" and fenced.data["refused"][0]["generation"] == 1
    assert job.table.ranks_of("node-1") == ()
    assert not any(worker.holds_state for worker in world.controller.roster.get("node-1").workers.values())
    assert old.words()[-1] == "RunJob", "it may be of use as a spare"
    world.pass_time(11.0)
    assert world.provider.removed == [], "and is not taken away any more"


def test_steps_from_a_generation_without_a_seat_are_refused_and_change_nothing(make_world):
    world = make_world()
    job = world.start(steps=3)
    world.silent = {"node-1"}
    world.pass_time(SILENCE)
    world.seat()
    world.nodes["node-0"].commits(4)  # of two
    old = world.nodes["node-1"]
    old.hello()
    for generation in (2, 9):
        old.beat([old.record(4, generation=generation)])
    assert [(event.generation, event.data["node"]) for event in world.events("message.refused")] == [
        (2, "node-1"), (9, "node-1")]
    assert job.ledger.step == 3 and job.status == RESTORING
    old.beat([old.record(step, generation=1) for step in (1, 2, 3)])
    assert [event.step for event in world.events("step.committed")] == [1, 2, 3]
    world.nodes["node-2"].commits(4)
    assert job.ledger.step == 4 and job.status == RUNNING


def test_a_dead_nodes_words_are_refused_and_change_nothing(make_world):
    world = make_world(nodes=1, spares=1)
    job = world.start(steps=0)
    world.silent = {"node-0"}
    world.pass_time(SILENCE)
    assert job.table.nodes == ("node-1",)
    world.seat()
    world.commit(1)
    dead, before = world.nodes["node-0"], len(world.log.events)
    heard = len(dead.sent)
    with pytest.raises(BadMessage, match="node-0 was declared dead: it must say hello again"):
        dead.beat([dead.record(step, generation=1) for step in (1, 2, 3)])
    with pytest.raises(BadMessage, match="declared dead"):
        dead.finishes()
    assert (len(world.log.events), len(dead.sent), world.verdict("node-0")) == (before, heard, "DEAD")
    assert (job.ledger.step, job.finished, job.status) == (1, {}, RUNNING)


def test_steps_that_a_node_made_before_it_was_given_up_do_not_count_when_it_comes_back(make_world):
    world = make_world(nodes=1, spares=1)
    job = world.start(steps=0)
    world.silent = {"node-0"}
    world.pass_time(SILENCE)
    world.seat()
    world.commit(1)
    old = world.nodes["node-0"]
    old.hello()
    old.beat([old.record(step, generation=1) for step in (1, 2, 3)])
    assert job.ledger.step == 1
    assert [(event.generation, event.step) for event in world.events("message.refused")] == [(1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize("event", ["checkpoint.committed", "checkpoint.snapshot", "checkpoint.retired"])
@pytest.mark.parametrize("generation", [1, 0, 7], ids=["its old one", "none", "one that is not there"])
def test_what_a_fenced_node_says_of_its_saves_is_refused_and_changes_nothing(make_world, event, generation):
    world = make_world()
    job = world.start(steps=3)
    world.nodes["node-1"].notes("checkpoint.snapshot", step=3, generation=1)
    assert job.kept == {"node-1": 3}
    world.silent = {"node-1"}
    world.pass_time(SILENCE)
    world.seat()
    world.commit(4)
    old = world.nodes["node-1"]
    old.hello()
    assert job.kept == {}, "its memory was lost with it"
    old.notes(event, step=3, generation=generation)
    assert (job.saved, job.kept) == (None, {})
    (refused,) = world.events("message.refused")
    assert (refused.generation, refused.step) == (generation, 3) and event in refused.data["reason"]
    assert [each.source for each in world.events(event)] == (["node-1"] if event == "checkpoint.snapshot" else [])


def test_a_node_that_lives_may_tell_of_a_save_of_an_earlier_generation(make_world):
    world = make_world(nodes=2, spares=1)
    job = world.start(steps=3)
    world.silent = {"node-1"}
    world.pass_time(SILENCE)
    world.seat()
    world.nodes["node-0"].notes("checkpoint.committed", step=3, generation=1)
    (committed,) = world.events("checkpoint.committed")
    assert committed.generation == 1 and job.saved == 3


def test_a_worker_of_the_past_cannot_finish_the_present(make_world):
    world = make_world()
    job = world.start(steps=3)
    world.silent = {"node-1"}
    world.pass_time(SILENCE)
    world.seat()
    world.commit(4)
    old = world.nodes["node-1"]
    old.hello()
    old.finishes()
    assert job.finished == {} and job.status == RUNNING


def test_a_second_process_with_a_live_nodes_name_is_refused(make_world):
    world = make_world()
    job = world.start()
    thief = Node(world, "node-1", instance="another")
    with pytest.raises(BadMessage, match="node-1 is already linked by another process"):
        thief.hello()
    assert thief.sent == []
    world.pass_time(1.0)
    assert (job.status, job.generation, world.verdict("node-1")) == (RUNNING, 1, "ALIVE")


def test_a_new_process_under_an_unlinked_members_name_buries_the_old_one_and_starts_fresh(make_world):
    world = make_world()
    job = world.start(steps=2)
    world.controller.node_unlinked("node-1", world.nodes["node-1"].link)
    new = world.nodes["node-1"] = Node(world, "node-1", instance="another")
    new.hello()
    (died,) = world.events("node.died")
    assert (died.source, died.data["reason"]) == ("node-1", "another process came under its name")
    assert new.last(messages.Welcome).fresh is True and job.status == RECOVERING
    world.decide()
    assert world.tables()[-1] == ["node-0", "node-2"] and job.generation == 2
    assert [(row["cause"], row["node"]) for row in job.history] == [("node", "node-1")]
    new.parks()
    assert world.controller.roster.get("node-1").ready(job.id, 1), "a spare like any other"


def test_a_node_may_not_say_what_only_the_controller_says(make_world):
    world = make_world()
    world.start()
    with pytest.raises(BadMessage, match="a node does not send Welcome"):
        world.controller.node_said("node-0", messages.Welcome(fresh=True, heartbeat_s=1.0, lease_s=1.0))


# ---- failures during recovery --------------------------------------------------------------------------------------


def test_a_failure_while_the_group_is_being_restored_leads_to_the_next_generation(make_world):
    world = make_world(nodes=3, spares=2)
    job = world.start()
    world.controller.node_exited("node-0", "gone")
    world.decide()
    world.seat()
    assert (job.generation, job.status) == (2, RESTORING)
    world.controller.node_exited("node-1", "gone too")
    assert len(world.events("recovery.abandoned")) == 1
    world.decide()
    assert world.tables()[1:] == [["node-3", "node-1", "node-2"], ["node-3", "node-4", "node-2"]]
    assert world.nodes["node-2"].words()[-4:] == ["Terminate", "Join", "Terminate", "Join"]
    assert world.nodes["node-2"].last(messages.Terminate).generation == 2
    world.seat()
    world.commit(2)
    assert job.status == RUNNING and world.events("recovery.finished")[0].data["attempts"] == 2


def test_a_failure_while_a_new_node_is_awaited_is_decided_on_as_well(make_world):
    world = make_world(nodes=3, spares=0)
    job = world.start()
    world.controller.node_exited("node-0", "gone")
    world.decide()
    assert (world.provider.started, job.status) == (["node-3"], RECOVERING)
    world.controller.node_exited("node-1", "gone too")
    world.decide()
    assert world.provider.started == ["node-3", "node-4"] and job.plan == ["node-3", "node-4", "node-2"]
    world.join("node-3", "node-4")
    for name in ("node-3", "node-4"):
        world.nodes[name].parks()
    assert world.tables()[1:] == [["node-3", "node-4", "node-2"]] and job.generation == 2


def test_a_replacement_that_dies_before_it_is_seated_is_replaced_itself(make_world):
    world = make_world(nodes=2, spares=0)
    job = world.start()
    world.controller.node_exited("node-1", "gone")
    world.decide()
    world.controller.node_exited("node-2", "did not even say hello")
    world.decide()
    assert world.provider.started == ["node-2", "node-3"]
    world.join("node-3")
    world.nodes["node-3"].parks()
    assert world.tables()[1:] == [["node-0", "node-3"]] and job.generation == 2


def test_a_replacement_that_never_comes_up_is_replaced_after_its_time(make_world):
    world = make_world(nodes=2, spares=0, start_timeout_s=3.0)
    job = world.start()
    world.controller.node_exited("node-1", "gone")
    world.pass_time(3.2)
    assert "did not come up in 3 s" in world.events("node.died")[-1].data["reason"]
    assert world.provider.started == ["node-2", "node-3"] and job.plan == ["node-0", "node-3"]


# ---- shrinking and growing -----------------------------------------------------------------------------------------


def test_the_world_shrinks_when_no_node_can_be_had(make_world):
    world = make_world(nodes=3, spares=0, replace=False)
    job = world.start(min_nodes=2)
    world.controller.node_exited("node-1", "gone")
    world.decide()
    assert world.provider.started == [] and world.tables()[-1] == ["node-0", "node-2"]
    assert [seat.rank for seat in job.table.seats] == [0, 1], "the ranks close up"
    world.seat()
    world.commit(2)
    assert job.status == RUNNING and world.events("step.committed")[-1].data["world"] == 2


def test_the_world_does_not_shrink_below_its_minimum(make_world):
    world = make_world(nodes=2, spares=0, replace=False)
    job = world.start()
    world.controller.node_exited("node-1", "gone")
    world.decide()
    assert job.status == FAILED and isinstance(job.error, RecoveryExhausted)
    assert "1 of 2 nodes are left, the job needs 2" in str(job.error)


def test_a_node_that_comes_back_makes_the_world_grow_again(make_world):
    world = make_world(nodes=2, spares=0, replace=False)
    job = world.start(min_nodes=1)
    world.silent = {"node-1"}
    world.pass_time(SILENCE)
    world.seat()
    world.commit(2)
    assert job.table.nodes == ("node-0",)
    world.silent = set()
    back = world.nodes["node-1"]
    back.hello()
    back.places = {}
    world.pass_time(0.2)
    assert job.generation == 2, "its worker has not parked yet"
    back.restarts_worker()
    assert job.generation == 3 and world.tables()[-1] == ["node-0", "node-1"]
    assert world.nodes["node-0"].words()[-2:] == ["Terminate", "Join"]
    world.seat()
    world.commit(3)
    assert job.status == RUNNING and world.events("recovery.finished")[-1].data["cause"] == "grow"
    assert "grow" not in job.spent


def test_the_world_grows_a_second_time_with_the_same_node(make_world):
    world = make_world(nodes=2, spares=0, replace=False)
    job = world.start(min_nodes=1)
    back = world.nodes["node-1"]
    for step in (2, 4):
        world.silent = {"node-1"}
        world.pass_time(SILENCE)
        assert job.table.nodes == ("node-0",)
        world.seat()
        world.commit(step)
        world.silent, back.places = set(), {}
        back.hello()
        back.restarts_worker()
        assert job.table.nodes == ("node-0", "node-1")
        world.seat()
        world.commit(step + 1)
    assert job.generation == 5 and job.status == RUNNING


def test_a_node_that_lost_its_seat_for_its_workers_gets_fresh_ones(make_world):
    world = make_world(nodes=2, spares=0, replace=False)
    job = world.start(min_nodes=1)
    node = world.nodes["node-1"]
    node.fails(cause="stall")
    world.decide()
    node.restarts_worker()
    world.seat()
    world.commit(2)
    node.fails(cause="stall")
    world.decide()
    assert job.plan == ["node-0"] and world.verdict("node-1") == "ALIVE"
    assert node.words()[-1] == "RunJob" and node.last(messages.RunJob).local_ranks is None


# ---- workers that fail ---------------------------------------------------------------------------------------------


def test_a_crashed_worker_is_started_again_on_its_node(make_world):
    world = make_world()
    job = world.start(steps=3)
    world.nodes["node-1"].fails("worker killed by SIGKILL")
    assert world.nodes["node-0"].words()[-1] == "Terminate"
    world.decide()
    assert world.nodes["node-1"].last(messages.RunJob).local_ranks == [0]
    assert len(world.tables()) == 1, "not before it has parked"
    world.nodes["node-1"].restarts_worker()
    assert world.tables()[-1] == ["node-0", "node-1"] and job.generation == 2


def test_last_words_of_a_replaced_worker_are_not_taken_for_its_successors(make_world):
    world = make_world()
    job = world.start(steps=3)
    node = world.nodes["node-1"]
    node.fails("killed")
    world.decide()
    node.worker_says(messages.Parked(seconds=0.1))  # still under its old name
    node.fails("killed again?")
    world.decide()
    assert len(world.events("worker.failed")) == 1 and len(world.tables()) == 1
    node.restarts_worker()
    assert job.generation == 2


def test_a_worker_that_computes_for_too_long_is_started_again(make_world):
    world = make_world(nodes=2, spares=0)
    job = world.start(steps=0)
    for step in range(1, 8):
        world.pass_time(0.02)
        world.commit(step)
    world.nodes["node-0"].is_at(Place.COMMUNICATING)
    world.nodes["node-1"].is_at(Place.COMPUTING)
    world.pass_time(0.9)
    assert job.status == RUNNING
    world.pass_time(0.2)
    assert [(event.source, event.data["cause"]) for event in world.events("worker.failed")] == [("node-1", "stall")]
    assert world.nodes["node-1"].last(messages.RunJob).local_ranks == [0]


def _a_peer_dies_and_the_others_stay_in_their_step(world):
    """node-0 and node-1 wait in a collective of the generation that ended with node-2."""
    world.start(steps=3)
    for name in ("node-0", "node-1"):
        world.nodes[name].is_at(Place.COMMUNICATING)
    world.beat()
    world.nodes["node-2"].fails("worker killed by SIGKILL")
    world.decide()
    world.nodes["node-2"].restarts_worker()


def test_a_worker_that_says_that_it_is_stuck_is_started_again_at_once(make_world):
    world = make_world(nodes=3, spares=0)
    _a_peer_dies_and_the_others_stay_in_their_step(world)
    world.nodes["node-0"].stops()
    world.nodes["node-1"].worker_says(messages.Stuck(generation=1))
    world.pass_time(0.5)  # its next heartbeat says the same
    assert [event.source for event in world.events("worker.failed")] == ["node-2", "node-1"]


def test_a_worker_that_is_slow_to_stop_and_says_nothing_is_given_seconds(make_world):
    """Half a second was given before: a busy machine took healthy workers' lives, and with the last one the state."""
    world = make_world(nodes=3, spares=0)
    _a_peer_dies_and_the_others_stay_in_their_step(world)
    world.nodes["node-0"].stops()
    world.pass_time(4.0)
    assert len(world.events("worker.failed")) == 1
    world.pass_time(2.0)
    assert [event.source for event in world.events("worker.failed")] == ["node-2", "node-1"]


def test_the_last_that_hold_the_state_are_not_ended_for_being_slow(make_world):
    world = make_world(nodes=3, spares=0)
    _a_peer_dies_and_the_others_stay_in_their_step(world)
    for name in ("node-0", "node-1"):
        world.nodes[name].worker_says(messages.Stuck(generation=1))
    world.pass_time(15.0)
    assert len(world.events("worker.failed")) == 1 and not world.job.over
    for name in ("node-0", "node-1"):  # they come out at last
        world.nodes[name].stops()
    world.decide()
    assert world.job.generation == 2 and world.job.status == RESTORING


def test_the_last_word_of_a_silent_node_accuses_none_of_its_workers(make_world):
    """Its worker was computing when the node died: that is no stall, however patient the limit for nodes is."""
    world = make_world(nodes=2, spares=1, suspect_s=4.0, dead_s=8.0, lease_s=30.0)
    job = world.start(steps=0)
    for step in range(1, 8):
        world.pass_time(0.02)
        world.commit(step)
    world.nodes["node-1"].is_at(Place.COMPUTING)
    world.beat()
    world.silent = {"node-1"}
    world.nodes["node-0"].stops()
    world.pass_time(7.5)
    assert world.events("worker.failed") == [] and job.status == RUNNING
    world.pass_time(1.0)
    assert [event.data["cause"] for event in world.events("recovery.started")] == ["node"]


def test_ranks_that_lost_each_other_without_a_death_build_their_group_again(make_world):
    world = make_world()
    job = world.start(steps=3)
    for node in world.members():
        node.stops()
    world.pass_time(0.85)
    assert job.generation == 1, "who died is usually known by then"
    world.pass_time(0.3)
    assert world.tables()[-1] == ["node-0", "node-1"] and job.generation == 2
    assert world.events("recovery.started")[0].data["cause"] == "link"
    order = [event.kind for event in world.log.events
             if event.kind in ("recovery.started", "action.decided", "membership.changed")]
    assert order[-3:] == ["recovery.started", "action.decided", "membership.changed"], "first decide, then act"


@pytest.mark.parametrize("busy", [False, True])
def test_ranks_that_wait_for_one_another_get_more_time_on_a_busy_machine(make_world, busy):
    world = make_world(nodes=2, spares=0)
    world.controller.watch._pressure.read = lambda: world.clock.now if busy else 0.0
    job = world.start(steps=0)
    for step in range(1, 8):
        world.pass_time(0.02)
        world.commit(step)
    for node in world.members():
        node.is_at(Place.COMMUNICATING)
    world.pass_time(2.0)
    assert [event.data["cause"] for event in world.events("recovery.started")] == ([] if busy else ["link"])
    world.pass_time(5.0)
    assert world.events("recovery.started") and not job.over


def test_a_spares_worker_that_crashes_is_retried_a_few_times_and_disturbs_nobody(make_world):
    world = make_world()
    job = world.start(steps=1)
    spare = world.nodes["node-2"]
    for _ in range(5):
        spare.fails()
        spare.restarts_worker()
    assert len(world.events("worker.restarted")) == 3
    assert (job.status, job.generation) == (RUNNING, 1)


def test_a_fatal_error_of_a_worker_ends_the_job_with_that_very_error(make_world):
    world = make_world()
    job = world.start(steps=1)
    fatal = ConfigError("ctx.protect must come before the loop", hint="move it up", line=12)
    world.nodes["node-1"].fails("ConfigError: ...", fatal=fatal.to_dict())
    world.decide()
    assert job.status == FAILED
    assert isinstance(job.error, ConfigError) and job.error.hint == "move it up" and job.error.line == 12


def test_a_fatal_error_of_a_spare_is_not_the_jobs_error(make_world):
    world = make_world()
    job = world.start(steps=1, budgets={"node": 0})
    world.nodes["node-2"].fails("ConfigError", fatal=ConfigError("a spare's").to_dict())
    assert job.status == RUNNING
    world.controller.node_exited("node-1", "gone")
    world.decide()
    assert job.status == FAILED and isinstance(job.error, RecoveryExhausted)


def test_a_crash_on_every_rank_ends_the_job_with_the_workers_traceback(make_world):
    world = make_world()
    job = world.start(steps=3)
    for node in world.members():
        node.fails("ValueError: nan", traceback="Traceback: line 7")
    world.decide()
    assert isinstance(job.error, TrainingFailed)
    assert "every rank failed: ValueError: nan" in str(job.error) and job.error.traceback == "Traceback: line 7"


def test_a_crash_loop_ends_in_recovery_exhausted_with_its_history(make_world):
    world = make_world()
    job = world.start(steps=1, budgets={"crash": 2})
    node = world.nodes["node-1"]
    for attempt in range(3):
        assert job.status != FAILED
        node.fails(f"ValueError: number {attempt}", traceback=f"Traceback {attempt}")
        world.decide()
        if job.status != FAILED:
            node.restarts_worker()
            world.seat()
            world.commit(2 + attempt)
    assert job.status == FAILED and isinstance(job.error, RecoveryExhausted)
    assert job.error.cause == "crash" and job.error.traceback == "Traceback 2"
    assert [row["detail"] for row in job.error.history] == [f"ValueError: number {n}" for n in range(3)]
    assert [row["generation"] for row in job.error.history] == [1, 2, 3]
    assert "3 failures, 3 steps committed" in str(job.error)


def test_a_budget_is_full_again_after_a_long_calm(make_world):
    world = make_world()
    job = world.start(steps=1, budgets={"crash": 1}, refill_steps=5)
    node = world.nodes["node-1"]
    for begin in (1, 10):
        node.fails()
        world.decide()
        node.restarts_worker()
        world.seat()
        for step in range(begin + 1, begin + 9):
            world.commit(step)
    assert job.status == RUNNING and job.generation == 3


# ---- the policy ----------------------------------------------------------------------------------------------------


def broken_policy(snapshot, budgets):
    raise ZeroDivisionError("a student's mistake")


@pytest.mark.parametrize(("policy", "words"), [
    (broken_policy, "the policy raised ZeroDivisionError: a student's mistake"),
    (lambda snapshot, budgets: None, "returned None"),
    (lambda snapshot, budgets: "Replace", "returned 'Replace'"),
    (lambda snapshot, budgets: Continue, "Continue'>: it is no Action"),
    (lambda snapshot: Continue(), "the policy raised TypeError"),
], ids=["raises", "nothing", "a string", "a class", "too few arguments"])
def test_a_bad_policy_ends_the_job_and_says_why(make_world, policy, words):
    world = make_world()
    job = world.start(policy=policy)
    world.controller.node_exited("node-1", "gone")
    world.decide()
    assert job.status == FAILED and isinstance(job.error, BadPolicy) and words in str(job.error)
    assert world.nodes["node-0"].words()[-2:] == ["Release", "EndJob"]


@pytest.mark.parametrize(("action", "problem"), [
    (Continue(), "node-1 is dead and would keep its seat"),
    (Restart(restart=5), "node-1 is dead and would keep its seat"),
    (Replace(seats=None), "its fields make no sense"),
    (Replace(seats={}), "it must name members, which are ['node-0', 'node-1']"),
    (Replace(seats={"node-1": "ghost"}), "replacements must be different spares, which are ['node-2']"),
    (Shrink(lost=()), "it must name members"),
    (Shrink(lost=("node-0", "node-1")), "nobody would be left"),
    (Grow(added=("ghost",)), "only spares can be added, which are ['node-2']"),
], ids=lambda it: repr(it) if not isinstance(it, str) else "")
def test_an_action_that_cannot_be_carried_out_ends_the_job_and_says_why(make_world, action, problem):
    world = make_world()
    job = world.start(policy=lambda snapshot, budgets: action)
    world.controller.node_exited("node-1", "gone")
    world.decide()
    assert job.status == FAILED and isinstance(job.error, BadPolicy)
    assert f"the policy returned {action!r}: {problem}" in str(job.error)
    assert world.events("action.decided") == [] and len(world.tables()) == 1


def test_a_policy_that_ends_the_job_with_an_unknown_error_ends_it_all_the_same(make_world):
    world = make_world()
    job = world.start(policy=lambda snapshot, budgets: Abort(error="Nonsense", reason="because I say so"))
    world.controller.node_exited("node-1", "gone")
    world.decide()
    assert job.status == FAILED and "because I say so" in str(job.error)


def test_a_policy_that_waits_is_asked_again_and_its_waiting_is_recorded_once(make_world):
    asked = []

    def patient(snapshot, budgets):
        asked.append(snapshot.spares)
        return decide(snapshot, budgets) if snapshot.spares else Wait(reason="no spare")

    world = make_world(spares=0)
    job = world.start(policy=patient)
    world.controller.node_exited("node-1", "gone")
    world.decide()
    assert asked == [()] and job.status == RECOVERING
    world.pass_time(0.2)
    assert len(asked) == 1, "not at every tick"
    world.pass_time(0.9)
    assert len(asked) == 4
    assert [event.data["action"] for event in world.events("action.decided")] == ["Wait"]
    assert job.budgets()["node"] == 8, "waiting costs nothing"
    world.join("node-2")
    world.nodes["node-2"].parks()
    world.pass_time(0.3)
    assert asked[-1] == ("node-2",) and world.tables()[1:] == [["node-0", "node-2"]]
    assert [event.data["action"] for event in world.events("action.decided")] == ["Wait", "Replace"]
    assert [failure["node"] for failure in job.history] == ["node-1"] and job.budgets()["node"] == 7


def test_the_policy_is_asked_with_what_is_known(make_world):
    seen = []

    def curious(snapshot, budgets):
        seen.append((snapshot, dict(budgets)))
        return decide(snapshot, budgets)

    world = make_world(nodes=3, spares=1, replace=False)
    world.start(steps=4, policy=curious, min_nodes=2, budgets={"node": 5})
    world.controller.node_exited("node-1", "gone")
    world.decide()
    ((snapshot, budgets),) = seen
    assert [(failure.cause, failure.node, failure.detail) for failure in snapshot.failures] == [
        ("node", "node-1", "gone")]
    assert (snapshot.members, snapshot.spares) == (("node-0", "node-1", "node-2"), ("node-3",))
    assert (snapshot.wanted, snapshot.minimum, snapshot.can_start) == (3, 2, False)
    assert (snapshot.step, snapshot.holders) == (4, 2)
    assert budgets == {**DEFAULT_BUDGETS, "node": 5}


def test_a_stall_that_repeats_on_one_node_is_told_to_the_policy(make_world):
    seen = []

    def curious(snapshot, budgets):
        seen.append(dict(snapshot.repeats))
        return Restart(restart=(("node-1", 0),)) if snapshot.failures else Wait()

    world = make_world()
    world.start(policy=curious)
    for step in (2, 3):
        world.nodes["node-1"].fails(cause="stall")
        world.decide()
        world.nodes["node-1"].restarts_worker()
        world.seat()
        world.commit(step)
    assert seen == [{"node-1": 0}, {"node-1": 1}]


def _fail_and_recover(world: World, step: int, cause: str) -> None:
    world.nodes["node-1"].fails(cause=cause)
    world.decide()
    world.nodes["node-1"].restarts_worker()
    world.seat()
    world.commit(step)


def test_a_healthy_node_keeps_its_seat_when_its_worker_was_killed_before_and_gets_stuck_once(make_world):
    """Earlier crashes counted as repeats of the stall: one seat in 430 recoveries was lost."""
    world = make_world(nodes=3, spares=1)
    job = world.start()
    _fail_and_recover(world, 2, "crash")
    _fail_and_recover(world, 3, "crash")
    world.nodes["node-1"].fails(cause="stall")
    world.decide()
    assert job.plan == ["node-0", "node-1", "node-2"]


def test_a_stall_of_long_ago_does_not_count_against_a_node(make_world):
    world = make_world(nodes=3, spares=1)
    job = world.start(refill_steps=10)
    _fail_and_recover(world, 2, "stall")
    for step in range(3, 20):
        world.commit(step)
    world.nodes["node-1"].fails(cause="stall")
    world.decide()
    assert job.plan == ["node-0", "node-1", "node-2"]


def test_two_workers_of_a_node_that_stall_together_are_one_stall(make_world):
    world = make_world(nodes=2, spares=1, procs_per_node=2)
    job = world.start()
    for local in (0, 1):
        world.nodes["node-1"].fails(cause="stall", local=local)
    world.decide()
    assert job.plan == ["node-0", "node-1"]


def test_a_worker_that_a_cut_group_does_not_let_go_once_is_no_sign_of_a_bad_node(make_world):
    world = make_world(nodes=3, spares=2)
    job = world.start(steps=3)
    world.controller.node_exited("node-2", "killed")
    world.decide()
    generation = job.generation
    for node in world.members():
        node.takes_seats() if node.name != "node-1" else node.is_at(Place.COMMUNICATING)
    world.nodes["node-1"].beat()
    world.nodes["node-1"].worker_says(messages.Stuck(generation=generation - 1))
    world.pass_time(0.4)
    assert world.events("worker.failed")[-1].data["detail"].startswith("did not stop")
    world.nodes["node-1"].restarts_worker()
    world.seat()
    world.commit(job.ledger.step + 1)
    assert "node-1" in job.plan and len(world.events("worker.failed")) == 1


# ---- the end -------------------------------------------------------------------------------------------------------


def test_a_job_is_finished_only_when_all_ranks_are(make_world):
    world = make_world()
    job = world.start(steps=3)
    world.nodes["node-0"].finishes()
    assert job.status == RUNNING
    world.nodes["node-1"].finishes()
    assert job.status == FINISHED
    (end,) = world.events("job.finished")
    assert (end.step, end.data["status"], end.data["agree"], end.data["digest"]) == (3, FINISHED, True, "d" * 8)
    assert all(node.words()[-2:] == ["Release", "EndJob"] for node in world.nodes.values())


def test_ranks_that_end_in_different_states_are_told(make_world):
    world = make_world()
    world.start(steps=3)
    world.nodes["node-0"].finishes("a" * 8)
    world.nodes["node-1"].finishes("b" * 8)
    (end,) = world.events("job.finished")
    assert end.data["agree"] is False and "digest" not in end.data


def test_a_rank_that_finished_before_a_failure_must_finish_again(make_world):
    world = make_world()
    job = world.start(steps=3)
    world.nodes["node-0"].finishes()
    world.controller.node_exited("node-1", "gone at the last moment")
    world.decide()
    assert world.tables()[-1] == ["node-0", "node-2"]
    world.seat()
    world.nodes["node-2"].finishes()
    assert job.status == RESTORING
    world.nodes["node-0"].finishes()
    assert job.status == FINISHED and [row["node"] for row in job.finished.values()] == ["node-2", "node-0"]


def test_an_end_that_was_told_for_an_old_generation_does_not_count(make_world):
    world = make_world()
    job = world.start(steps=3)
    survivor = world.nodes["node-0"]
    world.controller.node_exited("node-1", "gone")
    world.decide()
    assert job.generation == 2
    survivor.finishes()  # it was on its way when the generation ended
    assert job.finished == {} and job.moved == set()


def test_a_last_step_that_only_a_survivor_told_of_is_counted_at_the_end(make_world):
    world = make_world()
    job = world.start(steps=3)
    world.nodes["node-0"].commits(4)
    world.controller.node_exited("node-1", "gone with its last step")
    world.decide()
    world.seat()
    world.nodes["node-2"].places[0]["step"] = 4  # it got the state after step 4, and there is nothing left to do
    for node in world.members():
        node.finishes()
    assert job.status == FINISHED and job.ledger.step == 4
    assert [event.step for event in world.events("step.committed")] == [1, 2, 3, 4]
    assert world.events("job.finished")[0].step == 4


@pytest.mark.parametrize("name", ["step", "at", "generation", "rank", "source", "kind", "world", "ranks", "samples",
                                  "digest", "self"])
def test_a_reported_value_does_not_take_the_place_of_the_records_own(make_world, name):
    world = make_world()
    world.start(steps=1)
    world.commit(2, values={name: 3.0, "loss": 0.5})
    event = world.events("step.committed")[-1]
    assert (event.kind, event.step, event.generation, event.rank, event.source, event.at) == (
        "step.committed", 2, 1, None, "controller", world.clock.now)
    assert (event.data["world"], event.data["ranks"], event.data["digest"], event.data["loss"]) == (2, 2, 7, 0.5)
    assert "samples" not in event.data


def test_ranks_with_different_samples_are_told(make_world):
    world = make_world()
    world.start(steps=0)
    world.nodes["node-0"].commits(1, digest=1)
    world.nodes["node-1"].commits(1, digest=2)
    assert [event.step for event in world.events("samples.disagreed")] == [1]


def test_a_cancelled_job_is_over_and_makes_room_for_the_next(make_world):
    world = make_world()
    job = world.start(steps=2)
    world.controller.cancel(job)
    assert isinstance(job.error, JobCancelled) and "at step 2" in str(job.error)
    world.controller.cancel(job)
    assert len(world.events("job.finished")) == 1
    second = world.submit()
    for node in world.nodes.values():
        assert node.words()[-1] == "RunJob"
        node.places = {}
        node.parks()
    assert second.status == RESTORING and second.generation == 2, "generations are never used twice"


def test_words_of_an_ended_job_change_nothing(make_world):
    world = make_world()
    job = world.start(steps=2)
    world.controller.cancel(job)
    before = len(world.log.events)
    world.nodes["node-0"].fails()
    world.nodes["node-0"].beat()
    world.pass_time(0.3)
    assert len(world.log.events) == before


@pytest.mark.parametrize(("lease_s", "answers"), [(5.0, 3), (1.6, 8)])
def test_heartbeats_are_answered_with_the_newest_step_often_enough_for_the_lease(make_world, lease_s, answers):
    world = make_world(lease_s=lease_s)
    world.start(steps=3)
    node = world.nodes["node-0"]
    node.sent.clear()
    for _ in range(40):
        world.clock.now += 0.1
        node.beat()
    acks = [message for message in node.sent if isinstance(message, messages.Ack)]
    assert abs(len(acks) - answers) <= 2 and acks[-1] == messages.Ack(generation=1, step=3)
    assert len(acks) * lease_s / 4 >= 3.0, "a lease of four such intervals never runs out"


def test_a_calm_cluster_is_looked_at_rarely_and_a_suspicious_one_just_in_time(make_world):
    world = make_world()
    world.start(steps=3)
    world.pass_time(0.5)
    world.beat()
    assert world.controller.tick() == pytest.approx(0.2)
    world.clock.now += 0.25
    world.controller.tick()
    world.clock.now += 0.25
    assert world.controller.tick() == pytest.approx(0.1), "then somebody may have to be suspected"
    world.clock.now += 0.1
    assert world.controller.tick() == pytest.approx(0.1) and world.verdict("node-1") == "SUSPECT"
    world.controller.node_exited("node-1", "gone")
    assert world.controller.tick() == pytest.approx(0.05), "it recovers"


def test_the_status_names_ranks_and_roles(make_world):
    world = make_world()
    world.start(steps=3)
    status = world.controller.status()
    assert [(node["name"], node["role"], node["ranks"]) for node in status["nodes"]] == [
        ("node-0", "member", [0]), ("node-1", "member", [1]), ("node-2", "spare", [])]
    assert (status["job"]["step"], status["job"]["status"], status["generation"]) == (3, RUNNING, 1)


def test_nodes_that_would_get_a_rank_are_ready_before_and_after_a_job_and_only_the_others_are_spares(make_world):
    idle, world = make_world(), make_world()
    idle.join("node-0", "node-1", "node-2")
    assert [node["role"] for node in idle.controller.status()["nodes"]] == ["ready", "ready", "spare"]
    job = world.start(steps=3)
    world.controller.node_exited("node-1", "gone")
    world.controller.cancel(job)
    roles = [(node["name"], node["role"]) for node in world.controller.status()["nodes"] if node["joined"]]
    assert roles == [("node-0", "ready"), ("node-2", "ready")]


def test_a_failure_stands_above_the_recovery_it_caused_and_detect_begins_with_the_last_sign_of_life(make_world):
    world = make_world()
    world.start(steps=3)
    heard = world.controller.roster.nodes["node-1"].heard
    world.clock.now += 0.08
    world.controller.node_exited("node-1", "gone")
    started = next(event for event in world.log.events if event.kind == "recovery.started")
    assert started.data["evidence"] == heard < started.at
    shown = [event.kind for event in in_order_of_time(world.log.events)]
    assert shown.index("node.died") < shown.index("recovery.started")
