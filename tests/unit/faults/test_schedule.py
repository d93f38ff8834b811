"""Schedules from a seed: the same seed, the same faults."""

from __future__ import annotations

import pytest

from ftlab.faults import random_schedule
from ftlab.faults.catalogue import HEALABLE, KINDS
from ftlab.faults.schedule import RANDOM_KINDS

NODES = ["node-0", "node-1", "node-2"]
SEEDS = range(60)


def test_the_same_seed_gives_the_same_faults():
    for seed in SEEDS:
        first, again = (random_schedule(seed, 6, NODES, 300) for _ in range(2))
        assert first == again and first.seed == seed
        assert first.describe() == again.describe()


def test_different_seeds_give_different_faults():
    assert len({random_schedule(seed, 6, NODES, 300).describe() for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("steps", [20, 100, 300, 5000])
def test_faults_come_in_order_within_the_run_on_known_nodes(steps):
    for seed in SEEDS:
        faults = random_schedule(seed, 8, NODES, steps).faults
        assert len(faults) == 8
        at = [fault.at_step for fault in faults]
        assert at == sorted(at) and min(at) >= 5 and max(at) <= 0.85 * steps
        assert {fault.target for fault in faults} <= {*NODES, "controller"}


@pytest.mark.parametrize("steps", [1, 2, 5, 6])
def test_faults_of_a_very_short_run_come_before_its_end(steps):
    for seed in SEEDS:
        assert all(0 <= fault.at_step < steps for fault in random_schedule(seed, 5, NODES, steps).faults)


def test_all_kinds_and_all_nodes_come_up_over_the_seeds():
    faults = [fault for seed in SEEDS for fault in random_schedule(seed, 6, NODES, 300).faults]
    assert {fault.kind for fault in faults} == set(RANDOM_KINDS) <= set(KINDS)
    assert {fault.target for fault in faults} == {*NODES, "controller"}


def test_exactly_what_can_be_healed_is_healed():
    for seed in SEEDS:
        for fault in random_schedule(seed, 6, NODES, 300).faults:
            assert (fault.heal_after is not None) == (fault.kind in HEALABLE)


def test_the_kinds_can_be_chosen():
    kinds = {fault.kind for seed in SEEDS for fault in random_schedule(seed, 4, NODES, 300, kinds=("kill",)).faults}
    assert kinds == {"kill"}


def test_a_schedule_describes_itself_line_by_line():
    schedule = random_schedule(7, 5, NODES, 300)
    assert schedule.describe().splitlines() == [fault.describe() for fault in schedule.faults]


def test_no_faults_are_a_schedule_too():
    assert random_schedule(1, 0, NODES, 300).faults == ()
