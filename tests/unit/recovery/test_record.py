"""The record of one recovery: spans from many ranks, folded into one time per step."""

from __future__ import annotations

from ftlab.recovery.record import PHASES, RecoveryRecord, envelope


def span(name: str, begin: float, end: float) -> dict[str, object]:
    return {"name": name, "begin": begin, "end": end}


def test_the_envelope_runs_from_the_first_rank_that_began_to_the_last_that_ended():
    spans = [span("connect", 2.0, 2.5), span("connect", 1.5, 2.1), span("connect", 1.75, 3.0)]
    assert envelope(spans) == {"connect": 1.5}


def test_the_envelope_is_in_the_order_of_the_phases_whatever_came_first():
    names = [name for phase in PHASES.values() for name in phase]
    spans = [span(name, index, index + 0.5) for index, name in enumerate(names)]
    assert list(envelope(reversed(spans))) == names


def test_an_empty_recovery_has_an_empty_envelope():
    assert envelope([]) == {}


def test_a_step_that_nobody_knows_is_left_out_of_the_envelope_but_kept_as_a_span():
    record = RecoveryRecord(cause="node", nodes=["node-1"], began=1.0)
    record.span("coffee", 1.0, 2.0, "node-0 rank=0")
    record.span("detect", 0.5, 1.0)
    facts = record.facts()
    assert facts["phases"] == {"detect": 0.5}
    assert [row["name"] for row in facts["spans"]] == ["coffee", "detect"]


def test_a_span_knows_its_phase_and_who_measured_it():
    record = RecoveryRecord(cause="node", nodes=["node-1"], began=1.0)
    record.span("receive_state", 1.0, 2.0, "node-3 rank=1")
    record.span("detect", 0.5, 1.0)
    assert [(row["phase"], row["by"]) for row in record.spans] == [
        ("training recovery", "node-3 rank=1"), ("node reschedule", "controller")]


def test_facts_name_the_cause_the_nodes_the_source_and_the_attempts():
    record = RecoveryRecord(cause="stall", nodes=["node-2"], began=1.0, attempts=3, source="live")
    assert record.facts() == {"cause": "stall", "nodes": ["node-2"], "spans": [], "phases": {}, "rung": "live",
                              "attempts": 3}
