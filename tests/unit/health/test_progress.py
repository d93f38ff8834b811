"""Who holds the others up? Limits that follow the step time, and verdicts on what workers were last seen doing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftlab.health.progress import Limits, Sighting, Standing, StepClock, all_waiting, find_stalled, holders

LIMITS = Limits(floor_s=1.0, factor=8.0, first_step_s=300.0)
COMPUTING, WAITING, OUTSIDE = Standing.COMPUTING, Standing.WAITING, Standing.OUTSIDE
DONE, IDLE = Standing.DONE, Standing.IDLE


def clock(step_s: float, steps: int = 20) -> StepClock:
    made = StepClock(LIMITS)
    for step in range(steps + 1):
        made.tick(100.0 + step * step_s)
    return made


def seen(standing: Standing, since: float, number: int = 0, generation: int = 1) -> Sighting:
    return Sighting(who=(f"node-{number}", 0), generation=generation, standing=standing, since=since)


@pytest.mark.parametrize(("step_s", "limit"), [(0.02, 1.0), (0.124, 1.0), (0.25, 2.0), (30.0, 240.0), (600.0, 4800.0)])
def test_the_limit_follows_the_step_time_but_not_below_its_floor(step_s, limit):
    assert clock(step_s).limit() == pytest.approx(limit)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_before_the_step_time_is_known_a_step_may_take_long(steps):
    early = clock(0.02, steps)
    assert early.typical() == 0.0 and early.limit() == 300.0


def test_three_steps_are_enough_to_know_the_step_time():
    assert clock(0.02, 3).limit() == 1.0


def test_one_slow_step_does_not_move_the_limit():
    steady = clock(0.5)
    steady.tick(100.0 + 20 * 0.5 + 60.0)
    assert steady.typical() == pytest.approx(0.5)


def test_the_limit_adapts_when_steps_become_longer():
    slower = StepClock(LIMITS)
    at = 0.0
    for gap in [0.02] * 100 + [2.0] * 60:
        at += gap
        slower.tick(at)
    assert slower.limit() == pytest.approx(16.0)


def test_the_time_of_a_recovery_is_no_step_time():
    paused = StepClock(LIMITS)
    for at in (1.0, 1.5, 2.0, 2.5):
        paused.tick(at)
    paused.pause()
    for at in (500.0, 500.5, 501.0):
        paused.tick(at)
    assert max(paused._times) == 0.5 and len(paused._times) == 5


def test_steps_that_are_told_again_or_out_of_order_teach_nothing():
    odd = StepClock(LIMITS)
    for at in (5.0, 5.0, 4.0, 4.0):
        odd.tick(at)
    assert len(odd._times) == 0


def test_a_job_with_short_steps_is_accused_after_about_a_second():
    limit = clock(0.02).limit()
    hung, victim = seen(COMPUTING, since=100.0), seen(WAITING, since=100.0, number=1)
    assert find_stalled([hung, victim], 100.99, limit, 60.0) == []
    assert find_stalled([hung, victim], 101.01, limit, 60.0) == [hung]


@pytest.mark.parametrize("standing", [COMPUTING, OUTSIDE])
def test_nobody_is_accused_while_nobody_waits(standing):
    busy = [seen(standing, since=100.0, number=number) for number in range(4)]
    assert find_stalled(busy, 100_000.0, limit_s=1.0, outside_s=60.0) == []


def test_those_who_have_stopped_wait_for_the_one_who_has_not():
    stuck, stopped = seen(COMPUTING, since=100.0), seen(Standing.RECOVERING, since=100.0, number=1)
    assert find_stalled([stuck, stopped], 102.0, limit_s=1.0, outside_s=60.0) == [stuck]


def test_a_job_with_long_steps_is_not_accused_in_the_middle_of_one():
    limit = clock(30.0).limit()
    workers = [seen(COMPUTING, since=100.0), seen(WAITING, since=100.0, number=1)]
    assert find_stalled(workers, 100.0 + 120.0, limit, 60.0) == []


@pytest.mark.parametrize(("standing", "seconds", "guilty"), [
    (COMPUTING, 1.5, True), (COMPUTING, 0.5, False),
    (WAITING, 1000.0, False), (IDLE, 1000.0, False),
    (OUTSIDE, 1.5, False), (OUTSIDE, 59.0, False), (OUTSIDE, 61.0, True),
])
def test_only_who_computes_or_dawdles_for_too_long_is_stalled(standing, seconds, guilty):
    workers = [seen(standing, since=100.0), seen(WAITING, since=100.0, number=1)]
    found = find_stalled(workers, 100.0 + seconds, limit_s=1.0, outside_s=60.0)
    assert bool(found) is guilty


def test_long_steps_stretch_the_time_between_steps_too():
    workers = [seen(OUTSIDE, since=100.0), seen(WAITING, since=100.0, number=1)]
    assert find_stalled(workers, 200.0, limit_s=240.0, outside_s=60.0) == []


def test_the_one_who_holds_the_others_up_is_named_and_his_victims_are_not():
    guilty = seen(COMPUTING, since=100.0, number=2)
    victims = [seen(WAITING, since=100.0, number=number) for number in (0, 1, 3)]
    assert find_stalled([*victims, guilty], 110.0, 1.0, 60.0) == [guilty]


@pytest.mark.parametrize(("workers", "broken"), [
    ([], False),
    ([seen(WAITING, 100.0), seen(WAITING, 100.0, 1)], True),
    ([seen(WAITING, 100.0), seen(COMPUTING, 100.0, 1)], False),
    ([seen(WAITING, 100.0), seen(WAITING, 104.5, 1)], False),
    ([seen(WAITING, 100.0), seen(WAITING, 100.0, 1, generation=2)], False),
    ([seen(WAITING, 100.0), seen(OUTSIDE, 100.0, 1)], False),
    ([seen(WAITING, 100.0), seen(IDLE, 100.0, 1)], False),
    ([seen(WAITING, 100.0), seen(DONE, 100.0, 1)], True),
    ([seen(WAITING, 104.5), seen(DONE, 100.0, 1)], False),
    ([seen(DONE, 100.0), seen(DONE, 100.0, 1)], False),
], ids=["nobody", "all", "one computes", "one only just", "one in another generation", "one outside", "one idle",
        "for one that is done", "only just for one that is done", "all are done"])
def test_a_group_is_broken_when_all_its_ranks_wait_for_one_another(workers, broken):
    assert all_waiting(workers, generation=1, now=105.0, limit_s=1.0) is broken


@pytest.mark.parametrize(("standing", "words"), [
    (OUTSIDE, "between step 12 and 13, in the train function's own code for 70.0 s: the others wait for it, and may "
              "have to for 60.0 s (outside_limit_s)"),
    (COMPUTING, "computing step 13 for 70.0 s: a step may take 1.0 s"),
])
def test_the_blame_says_where_a_rank_is(standing, words):
    stalled = Sighting(who=("node-1", 0), generation=1, standing=standing, since=100.0, step=12)
    assert stalled.blame(170.0, 1.0, 60.0) == words


def test_a_worker_that_gets_no_cpu_is_given_more_time_but_not_for_ever():
    starved = replace(seen(COMPUTING, 100.0), starved=True)
    waiting = seen(WAITING, 100.0, number=1)
    assert find_stalled([seen(COMPUTING, 100.0), waiting], 101.1, 1.0, 60.0)
    assert find_stalled([starved, waiting], 105.9, 1.0, 60.0) == []
    assert find_stalled([starved, waiting], 106.1, 1.0, 60.0) == [starved]


def test_who_holds_a_committed_step():
    old = replace(seen(WAITING, 100.0, number=0), step=6)
    new = replace(seen(WAITING, 100.0, number=1), step=8)
    fresh = replace(seen(IDLE, 100.0, number=2, generation=0), step=0)
    assert holders([old, new, fresh], 7) == {("node-1", 0)}
    assert holders([old, new, fresh], 0) == {("node-0", 0), ("node-1", 0)}
