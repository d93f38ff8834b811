"""The controller is killed at every event of a recovery, and in the two seconds after it: nobody who holds the state is
given up, and training goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ftlab import messages
from ftlab.detection import read_failures
from ftlab.report.measure import measure
from tests.unit.recovery.simulation import Simulation

Fault = Callable[[Simulation], None]
RECOVERED_S = 12.0  # of simulated time


def _node_killed(sim: Simulation) -> None:
    sim.kill_node("node-1")


def _two_killed(sim: Simulation) -> None:
    sim.kill_node("node-1")
    sim.kill_node("node-2")


def _worker_crashed(sim: Simulation) -> None:
    node = sim.live()[1]
    node.places, node.held = {}, -1
    sim.attempt(lambda: node.worker_says(messages.Failed(cause="crash", detail="ValueError: no")))


def _ranks_lost_each_other(sim: Simulation) -> None:
    for node in sim.live():
        sim.attempt(lambda node=node: node.leave("lost its peers"))


FAULTS: dict[str, Fault] = {"node": _node_killed, "nodes": _two_killed, "worker": _worker_crashed,
                            "link": _ranks_lost_each_other}


def _undisturbed(make: Callable[..., Simulation], fault: Fault, spares: int) -> tuple[int, int]:
    """The first and the last event of a recovery that nothing else disturbs."""
    sim = make(spares=spares)
    sim.start_job(3)
    first = len(sim.log.events) + 1
    fault(sim)
    sim.run_until(lambda: any(event.kind == "recovery.finished" for event in sim.log.events), 5.0)
    return first, len(sim.log.events)


def _must_go_on(sim: Simulation, what: str) -> None:
    sim.run_until(lambda: sim.up and all(node.linked for node in sim.live()), RECOVERED_S)
    step = sim.committed
    sim.run_until(lambda: sim.up and sim.committed >= step + 3 and sim.job.status == "running", RECOVERED_S)
    given_up = [node.name for node in sim.live() if any(step > 0 for step in node.given_up)]
    assert given_up == [], f"{what}: {given_up} lived, held the state, and began anew"
    figures = measure(sim.log.events)
    assert figures["recoveries"] >= 1 and figures["steps_lost"] == 0, f"{what}: {figures}"
    assert all(one.end is not None for one in read_failures(sim.log.events).recoveries), f"{what}: {sim.log.events}"


@pytest.fixture
def make(monkeypatch, tmp_path: Path):
    made: list[Simulation] = []

    def make(**config) -> Simulation:
        made.append(Simulation(monkeypatch, tmp_path / f"{len(made)}.jsonl", **{"nodes": 3, "spares": 1,
                                                                               "replace": True, **config}))
        return made[-1]

    return make


@pytest.mark.parametrize("late_s", [0.0, 1.0])
@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_controller_that_is_killed_at_any_event_of_a_recovery(make, fault, spares, late_s):
    first, last = _undisturbed(make, FAULTS[fault], spares)
    for event in range(first, last + 1):
        for when in ("before", "after"):
            for lost in (False, True):
                sim = make(spares=spares, seed=event)
                sim.start_job(3)
                sim.kill_at, sim.loses_what_was_sent, sim.late_s = (event, when), lost, late_s
                FAULTS[fault](sim)
                sim.run_until(lambda sim=sim: sim.kill_at is None, 8.0)
                _must_go_on(sim, f"killed {when} event {event}, {lost=}")


@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_a_controller_that_is_killed_at_any_event_of_shrinking_and_growing(make, late_s):
    def shrink_and_grow(sim: Simulation) -> None:
        sim.kill_node("node-1")
        sim.run_until(lambda: sim.up and sim.job.status == "running" and len(sim.job.plan) == 2, RECOVERED_S)
        sim.attempt(lambda: sim.add("node-7"))
        sim.run_until(lambda: sim.up and sim.job.status == "running" and len(sim.job.plan) == 3, RECOVERED_S)

    settings = {"spares": 0, "replace": False}
    sim = make(**settings)
    sim.start_job(3, min_nodes=2)
    first = len(sim.log.events) + 1
    shrink_and_grow(sim)
    for event in range(first, len(sim.log.events) + 1):
        for lost in (False, True):
            sim = make(**settings, seed=event)
            sim.start_job(3, min_nodes=2)
            sim.kill_at, sim.loses_what_was_sent, sim.late_s = (event, "after"), lost, late_s
            shrink_and_grow(sim)
            _must_go_on(sim, f"killed after event {event}, {lost=}")


@pytest.mark.parametrize("late_s", [0.0, 1.0])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_controller_that_is_killed_in_the_two_seconds_after_a_recovery(make, fault, late_s):
    for ticks in range(0, 40, 2):
        for lost in (False, True):
            sim = make(spares=2, seed=ticks)
            sim.start_job(3)
            FAULTS[fault](sim)
            sim.run_until(lambda sim=sim: any(event.kind == "recovery.finished" for event in sim.log.events), 5.0)
            for _ in range(ticks):
                sim.turn()
            sim.loses_what_was_sent = lost
            sim.kill_controller(away=0.3, late_s=late_s)
            _must_go_on(sim, f"killed {ticks} ticks after, {lost=}")


@pytest.mark.parametrize("late_s", [3.0, 4.5])
def test_nobody_is_given_up_while_nobody_else_holds_the_state(make, late_s):
    """A machine that is so busy that nodes find the new controller only after seconds."""
    for seed in range(30):
        sim = make(spares=1, seed=seed)
        sim.start_job(3)
        sim.kill_controller(away=0.3, late_s=late_s)
        sim.run_until(lambda sim=sim: sim.up and all(node.linked for node in sim.live()), RECOVERED_S)
        step = sim.committed
        sim.run_until(lambda sim=sim, step=step: sim.committed >= step + 3, RECOVERED_S)
