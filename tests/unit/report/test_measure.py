"""The figures of a run, from events that are written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ftlab.events import Event
from ftlab.report.measure import goodput, measure
from ftlab.report.page import findings


def event(kind: str, at: float, **fields: Any) -> Event:
    head = {name: fields.pop(name) for name in ("generation", "step", "source") if name in fields}
    return Event(kind=kind, at=at, data=fields, **head)


def table(at: float, generation: int, world: int, instead: tuple[int, int] | None = None) -> Event:
    """A world of nodes 0, 1, …; `instead` of one of them another one has its seat."""
    numbers = [instead[1] if instead and number == instead[0] else number for number in range(world)]
    seats = [{"node": f"node-{number}"} for number in numbers]
    return event("membership.changed", at, generation=generation, world=world, table={"seats": seats})


def step(at: float, number: int, generation: int = 1) -> Event:
    return event("step.committed", at, step=number, generation=generation)


def injected(at: float, fault: str = "kill", target: str = "node-1", *, receipt_at: float | None = None) -> Event:
    return event("fault.injected", at, fault=fault, target=target,
                 receipt={"at": at if receipt_at is None else receipt_at})


def started(at: float, generation: int) -> Event:
    return event("recovery.started", at, generation=generation, cause="node")


def finished(at: float, generation: int, rung: str = "live", **phases: float) -> Event:
    return event("recovery.finished", at, generation=generation, cause="node", rung=rung, phases=phases, spans=[])


ONE_KILL = [
    table(0.0, 1, 4), step(1.0, 1), step(2.0, 2),
    injected(2.3), started(2.35, 2), table(2.4, 2, 4),
    step(2.75, 3, 2), finished(2.76, 2, detect=0.05, connect=0.2), step(3.0, 4, 2),
]


def test_one_kill_is_measured_from_the_injection():
    figures = measure(ONE_KILL)
    assert (figures["injected"], figures["recoveries"], figures["generations"]) == (1, 1, 2)
    assert figures["worlds"] == [4, 4] and figures["source"] == "live"
    assert figures["detection_s"] == pytest.approx(0.05) and figures["stall_s"] == pytest.approx(0.45)
    assert figures["phases"] == {"detect": 0.05, "connect": 0.2}
    assert (figures["steps"], figures["steps_lost"]) == (4, 0)
    (row,) = figures["injections"]
    assert (row["fault"], row["target"], row["receipt"]) == ("kill", "node-1", {"at": 2.3})


def test_each_world_that_was_built_again_is_told_with_its_time_and_its_nodes():
    spans = [{"name": "detect", "end": 2.35}, {"name": "connect", "end": 2.6}, {"name": "first_step", "end": 2.75}]
    rebuilt = event("recovery.finished", 2.76, generation=2, cause="node", rung="live", phases={}, spans=spans)
    figures = measure([table(0.0, 1, 4), started(2.35, 2), table(2.4, 2, 4, instead=(1, 4)), rebuilt,
                       started(3.0, 3), table(3.1, 3, 3), finished(3.2, 3)])
    first, second = figures["restarts"]
    assert first == {"generation": 2, "cause": "node", "seconds": 0.4, "left": ["node-1"], "came": ["node-4"]}
    assert (second["left"], second["came"]) == (["node-3", "node-4"], ["node-1"])
    lines = findings(figures)
    assert "system restart (node): 0.40 s from the verdict to the first step of generation 2" in lines
    assert "node replacement: node-4 for node-1" in lines


def test_the_receipt_says_when_it_really_happened():
    late = [injected(2.34, receipt_at=2.3) if each.kind == "fault.injected" else each for each in ONE_KILL]
    assert measure(late)["detection_s"] == pytest.approx(0.05)


def test_steps_of_the_old_world_after_the_injection_do_not_end_the_stall():
    events = [table(0.0, 1, 2), step(1.0, 1), injected(1.1), step(1.2, 2), started(1.3, 2), table(1.4, 2, 2),
              step(1.9, 3, 2), finished(1.91, 2)]
    assert measure(events)["stall_s"] == pytest.approx(0.8)


def test_of_several_injections_the_worst_figures_are_at_the_top():
    more = [*ONE_KILL, injected(4.0), started(4.5, 3), table(4.6, 3, 3), step(6.0, 5, 3), finished(6.01, 3)]
    figures = measure(more)
    assert figures["injected"] == 2 and figures["worlds"] == [4, 4, 3]
    assert figures["detection_s"] == pytest.approx(0.5) and figures["stall_s"] == pytest.approx(2.0)
    assert [row["stall_s"] for row in figures["injections"]] == pytest.approx([0.45, 2.0])
    assert figures["phases"] == {"detect": 0.05, "connect": 0.2}, "the phases are the first recovery's"


def test_a_second_fault_during_a_recovery_ends_with_the_recovery_that_came_through():
    events = [table(0.0, 1, 3), step(1.0, 1), injected(1.1), started(1.2, 2), table(1.3, 2, 3),
              injected(1.4, target="node-2"), event("recovery.abandoned", 1.5, generation=2), started(1.5, 3),
              table(1.6, 3, 3), step(2.0, 2, 3), finished(2.01, 3)]
    figures = measure(events)
    assert [row["stall_s"] for row in figures["injections"]] == pytest.approx([0.9, 0.6])
    assert [row["detection_s"] for row in figures["injections"]] == pytest.approx([0.1, 0.1])


def test_a_killed_controller_is_detected_by_its_restart_and_stalls_nobody():
    events = [table(0.0, 1, 2), step(1.0, 1), injected(1.1, "controller", "controller"), step(1.2, 2),
              event("controller.started", 1.6, restored=True), step(1.7, 3)]
    figures = measure(events)
    assert figures["detection_s"] == pytest.approx(0.5) and figures["stall_s"] == pytest.approx(0.1)
    assert figures["recoveries"] == 0 and figures["phases"] == {}


def test_what_did_not_happen_has_no_figure():
    figures = measure([table(0.0, 1, 2), step(1.0, 1), injected(1.1), started(1.3, 2)])
    assert figures["detection_s"] == pytest.approx(0.2) and figures["stall_s"] is None
    empty = measure([])
    assert (empty["injected"], empty["detection_s"], empty["stall_s"], empty["steps"]) == (0, None, None, 0)
    assert (empty["worlds"], empty["source"], empty["goodput"], empty["steps_lost"]) == ([], None, None, 0)


@pytest.mark.parametrize(("steps", "lost"), [
    ([(1, 1), (2, 1), (3, 2)], 0),
    ([(1, 1), (2, 1), (2, 2), (3, 2)], 1),
    ([(step, 1) for step in range(1, 11)] + [(6, 2), (7, 2)], 5),
    ([(1, 1), (2, 1), (3, 1), (3, 2), (4, 2), (2, 3)], 4),
    ([(2, 1), (1, 1)], 0),
], ids=["none", "the one in flight", "back to a checkpoint", "twice", "within one world"])
def test_steps_that_had_to_be_done_again_are_lost(steps, lost):
    events = [step(float(index), number, generation) for index, (number, generation) in enumerate(steps)]
    assert measure(events)["steps_lost"] == lost


def test_goodput_is_the_share_that_typical_steps_would_have_taken():
    steady = [step(float(number), number) for number in range(1, 12)]
    assert goodput(steady) == 1.0
    with_a_stall = [*steady, step(21.0, 12)]
    assert goodput(with_a_stall) == pytest.approx(11 / 20)
    assert goodput(steady[:2]) is None
