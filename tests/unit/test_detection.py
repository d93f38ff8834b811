"""`detect` has one meaning: from the injection, or else the last evidence of life, to the verdict."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ftlab.checkpoint.interval import fit
from ftlab.detection import read_failures
from ftlab.events import Event, in_order_of_time
from ftlab.metrics.exporter import Exporter
from ftlab.report.measure import measure
from ftlab.report.page import report_fragment
from ftlab.report.report import report_table
from ftlab.report.story import read_story
from ftlab.report.waterfall import waterfall_rows
from tests.recorded import NAMES, load, report_of


def event(kind: str, at: float, **fields: Any) -> Event:
    head = {name: fields.pop(name) for name in ("generation", "step", "source") if name in fields}
    return Event(kind=kind, at=at, data=fields, **head)


def kill(at: float, node: str, fault: str = "kill") -> Event:
    return event("fault.injected", at, fault=fault, target=node, receipt={"at": at})


def started(at: float, generation: int, *nodes: str, evidence: float | None = None, cause: str = "node") -> Event:
    known = {} if evidence is None else {"evidence": evidence}
    return event("recovery.started", at, generation=generation, cause=cause, nodes=list(nodes), **known)


def finished(at: float, generation: int, *nodes: str, evidence: float, verdict: float, cause: str = "node") -> Event:
    spans = [{"phase": "node reschedule", "name": "detect", "begin": evidence, "end": verdict, "by": "controller"},
             {"phase": "training recovery", "name": "first_step", "begin": at - 0.1, "end": at, "by": "rank=0"}]
    return event("recovery.finished", at, generation=generation, cause=cause, nodes=list(nodes), spans=spans,
                 phases={"detect": round(verdict - evidence, 6), "first_step": 0.1})


def step(at: float, number: int, generation: int) -> Event:
    return event("step.committed", at, step=number, generation=generation)


@pytest.mark.parametrize("name", NAMES)
def test_json_table_waterfall_and_page_agree_on_recorded_drills(name: str) -> None:
    report = report_of(name)
    story = read_story(report.events)
    for fault, row in zip(story.faults, report.injections, strict=True):
        assert row["detection_s"] == (None if fault.detection_s is None else round(fault.detection_s, 4))
    drawn = [waterfall.end - waterfall.begin for recovery in story.recoveries
             for waterfall in waterfall_rows(recovery.spans) if waterfall.name == "detect"]
    if drawn:
        assert report.detection_s == report.phases["detect"] == round(max(drawn), 4)
        said = f"{report.detection_s * 1000:.1f} ms" if report.detection_s < 0.09995 else \
            f"{report.detection_s * 1000:.0f} ms"
        assert report_table(report.facts).count(said) >= 2, "the figure at the top, and the first of the phases"
        assert report_fragment(report.facts, report.events).count(f">{said}<") >= 2, "the figure, and a row"


@pytest.mark.parametrize("name", NAMES)
def test_a_detection_is_never_shorter_than_nothing_nor_begins_after_the_injection(name: str) -> None:
    failures = read_failures(load(name))
    assert all(seconds >= 0 for seconds in failures.detections())
    for fault in failures.faults:
        assert all(recovery.began <= fault.at for recovery in fault.recoveries if fault.at <= recovery.started)


def test_the_order_of_the_log_does_not_matter() -> None:
    """A receipt is written after the fact, perhaps after the verdict."""
    for name in NAMES:
        events = load(name)
        mixed = events.copy()
        random.Random(name).shuffle(mixed)
        assert read_failures(mixed).detections() == read_failures(events).detections()


def test_where_nobody_injected_anything_it_begins_with_the_last_evidence_of_life() -> None:
    events = [step(1.0, 1, 1), started(2.0, 2, "node-1", evidence=1.3), step(2.4, 2, 2),
              finished(2.5, 2, "node-1", evidence=1.3, verdict=2.0)]
    figures = measure(events)
    assert figures["injected"] == 0 and figures["detection_s"] == figures["phases"]["detect"] == pytest.approx(0.7)
    assert measure(events[:2])["detection_s"] == pytest.approx(0.7), "known before the recovery ends"


def test_two_at_once_that_one_recovery_answers_each_count_from_their_own_injection() -> None:
    events = [step(1.0, 1, 1), kill(1.1, "node-1"), kill(1.15, "node-2"), started(1.3, 2, "node-1", evidence=1.29),
              step(1.9, 2, 2), finished(2.0, 2, "node-1", "node-2", evidence=1.29, verdict=1.3)]
    figures = measure(events)
    assert [row["detection_s"] for row in figures["injections"]] == pytest.approx([0.2, 0.15])
    assert figures["detection_s"] == figures["phases"]["detect"] == pytest.approx(0.2)


def test_what_strikes_during_a_recovery_is_noticed_when_its_own_node_is_found_dead() -> None:
    events = [step(1.0, 1, 1), kill(1.1, "node-1"), started(1.2, 2, "node-1", evidence=1.1), kill(1.25, "node-2"),
              event("node.died", 1.28, source="node-2"), step(1.9, 2, 2),
              finished(2.0, 2, "node-1", "node-2", evidence=1.1, verdict=1.2)]
    figures = measure(events)
    assert [row["detection_s"] for row in figures["injections"]] == pytest.approx([0.1, 0.03])
    assert [row["stall_s"] for row in figures["injections"]] == pytest.approx([0.8, 0.65])
    assert figures["phases"]["detect"] == pytest.approx(0.1)


def test_two_in_two_recoveries_of_one_outage_keep_their_own_verdicts() -> None:
    events = [step(1.0, 1, 1), kill(1.1, "node-1"), kill(1.12, "node-2"), started(1.2, 2, "node-1", evidence=1.2),
              event("recovery.abandoned", 1.4, generation=2), started(1.4, 3, "node-2", evidence=1.4), step(1.9, 2, 3),
              finished(2.0, 3, "node-2", evidence=1.4, verdict=1.4)]
    figures = measure(events)
    assert [row["detection_s"] for row in figures["injections"]] == pytest.approx([0.1, 0.28])
    assert figures["detection_s"] == figures["phases"]["detect"] == pytest.approx(0.28)


def test_a_fault_on_many_nodes_is_noticed_with_the_first_of_them() -> None:
    events = [step(1.0, 1, 1), kill(1.1, "all", "blackout"), started(1.3, 2, "node-1", evidence=1.3),
              event("recovery.abandoned", 1.35, generation=2), started(1.35, 3, "node-2", evidence=1.35),
              step(2.5, 1, 3), finished(2.6, 3, "node-2", "node-0", evidence=1.35, verdict=1.35),
              started(9.0, 4, "node-7", evidence=8.9), finished(9.5, 4, "node-7", evidence=8.9, verdict=9.0)]
    failures = read_failures(events)
    assert [recovery.detection_s for recovery in failures.recoveries] == pytest.approx([0.2, 0.2, 0.1])
    assert measure(events)["phases"]["detect"] == measure(events)["detection_s"] == pytest.approx(0.2)


def test_a_node_that_fails_by_itself_long_after_an_injection_is_another_failure() -> None:
    events = [step(1.0, 1, 1), kill(1.1, "node-1", "straggler"), started(2.0, 2, "node-1", evidence=2.0),
              finished(2.5, 2, "node-1", evidence=2.0, verdict=2.0), step(2.6, 2, 2),
              started(50.0, 3, "node-1", evidence=49.4), finished(50.5, 3, "node-1", evidence=49.4, verdict=50.0)]
    assert read_failures(events).detections() == pytest.approx([0.9, 0.9, 0.6])


def test_a_node_that_dies_while_the_controller_is_away_counts_from_its_own_injection() -> None:
    events = [step(1.0, 1, 1), kill(1.1, "controller", "controller"), kill(1.2, "node-1"),
              event("controller.started", 1.6), started(2.1, 2, "node-1", evidence=1.0), step(2.4, 2, 2),
              finished(2.5, 2, "node-1", evidence=1.0, verdict=2.1)]
    figures = measure(events)
    assert [row["detection_s"] for row in figures["injections"]] == pytest.approx([0.5, 0.9])
    assert figures["detection_s"] == figures["phases"]["detect"] == pytest.approx(0.9)


def test_a_spare_that_is_killed_was_noticed_and_held_up_nobody() -> None:
    events = [step(1.0, 1, 1), kill(1.1, "node-4"), event("node.died", 1.15, source="node-4"), step(1.2, 2, 1),
              started(5.0, 2, "node-1", evidence=4.9), finished(5.5, 2, "node-1", evidence=4.9, verdict=5.0)]
    (row,) = measure(events)["injections"]
    assert row["detection_s"] == pytest.approx(0.05) and row["stall_s"] is None
    assert measure(events)["phases"]["detect"] == pytest.approx(0.1)


def test_metrics_and_the_cost_model_take_the_same_detection() -> None:
    for name in ("kill", "hang", "crash"):
        events, exporter = load(name), Exporter()
        for each in events:
            exporter.observe(each)
        wanted = measure(events)["detection_s"]
        seen = exporter.registry.get_sample_value("ftlab_recovery_phase_seconds_sum", {"phase": "detect"})
        assert seen == pytest.approx(wanted, abs=1e-4)
        assert fit(events).detection_s == pytest.approx(wanted, abs=1e-4)


def test_events_are_shown_in_the_order_of_time_and_a_fault_stands_above_the_death_it_caused() -> None:
    for name in ("kill", "crash", "blackout"):
        kinds = [each.kind for each in report_of(name).events]
        assert kinds.index("fault.injected") < kinds.index("recovery.started")
    tied = [event("node.died", 1.0), event("recovery.started", 1.0), event("fault.injected", 0.9)]
    numbered = [Event(**{**vars(each), "seq": number}) for number, each in enumerate(tied)]
    assert [each.kind for each in in_order_of_time(numbered)] == ["fault.injected", "node.died", "recovery.started"]
