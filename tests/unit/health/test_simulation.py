"""Replays of made-up traces, in which every alarm and every latency can be counted by hand."""

from __future__ import annotations

import json

import pytest

from ftlab.errors import ConfigError
from ftlab.health.detector import PhiConfig, PhiDetector
from ftlab.health.simulation import Outcome, phi_detector, simulate, sweep, timeout_detector
from ftlab.health.traces import CONDITIONS, Trace, load_traces, save_traces
from ftlab.membership import Verdict


def trace(*arrivals: float, **more) -> Trace:
    return Trace(**{"name": "made up", "node": "node-0", "interval_s": 0.1, "arrivals": arrivals, **more})


def steady(count: int, gap_after: dict[int, float] | None = None) -> Trace:
    """Heartbeats every 0.1 s, with longer gaps after some of them."""
    arrivals, at = [], 0.013
    for beat in range(count):
        arrivals.append(round(at, 6))
        at += (gap_after or {}).get(beat, 0.1)
    return trace(*arrivals)


class Never:
    """A detector that trusts everybody."""

    def heard(self, at: float) -> None: ...

    def suspicion(self, now: float) -> float:
        return 0.0

    def judge(self, now: float) -> Verdict:
        return Verdict.ALIVE


def test_regular_heartbeats_raise_no_alarm_and_every_death_is_noticed():
    outcome = simulate(timeout_detector(0.3), steady(100))
    assert outcome.false_alarms == 0 and outcome.missed == 0 and len(outcome.latencies) == 100
    assert outcome.watched_s == pytest.approx(9.9)
    assert all(0.3 <= latency <= 0.3 + 0.05 + 1e-9 for latency in outcome.latencies)


def test_the_verdict_comes_at_the_first_look_after_the_limit():
    outcome = simulate(timeout_detector(0.3), trace(1.01), look_s=0.05)
    assert outcome.latencies == pytest.approx((0.34,)), "looks at 1.30 (too early) and 1.35"
    assert simulate(timeout_detector(0.3), trace(1.01), look_s=1.0).latencies == pytest.approx((0.99,))


def test_a_gap_beyond_the_limit_is_one_false_alarm():
    outcome = simulate(timeout_detector(0.3), steady(100, {40: 5.0}))
    assert outcome.false_alarms == 1
    assert outcome.alarms_per_hour == pytest.approx(3600 / (9.8 + 5.0))


def test_a_gap_that_ends_before_anybody_looks_is_no_alarm():
    quick = trace(1.0, 1.34)
    assert simulate(timeout_detector(0.32), quick, look_s=0.5).false_alarms == 0
    assert simulate(timeout_detector(0.32), quick, look_s=0.01).false_alarms == 1


def test_a_heartbeat_at_the_moment_of_the_look_counts_first():
    assert simulate(timeout_detector(0.25), trace(1.0, 1.5), look_s=0.5).false_alarms == 0


def test_the_end_of_a_trace_is_no_false_alarm():
    assert simulate(timeout_detector(0.12), trace(1.0)).false_alarms == 0


def test_after_a_false_alarm_the_detector_starts_afresh():
    made = []

    def make() -> PhiDetector:
        made.append(PhiDetector(PhiConfig(pause_s=0.0)))
        return made[-1]

    outcome = simulate(make, steady(60, {29: 3.0}))
    assert outcome.false_alarms == 1 and len(made) == 2
    assert len(made[0]._intervals) == 29 and len(made[1]._intervals) == 29
    assert max(made[1]._intervals) < 0.2, "the gap is not an interval of the new node"


def test_a_gap_that_raised_no_alarm_makes_phi_slower():
    calm = simulate(phi_detector(8.0, 0.0), steady(60), look_s=0.001)
    shaken = simulate(phi_detector(8.0, 0.0), steady(60, {29: 0.14, 30: 0.13, 31: 0.14}), look_s=0.001)
    assert shaken.false_alarms == 0
    assert max(shaken.latencies[32:]) > max(calm.latencies[32:])


def test_a_death_that_nobody_notices_is_missed_and_has_no_worst_latency():
    outcome = simulate(Never, steady(5), limit_s=1.0)
    assert outcome.missed == 5 and outcome.latencies == ()
    assert outcome.median_s is None and outcome.worst_s is None
    some = Outcome(false_alarms=0, watched_s=1.0, latencies=(0.2,), missed=1)
    assert some.median_s == 0.2 and some.worst_s is None


def test_heartbeats_after_the_recorded_death_are_not_replayed():
    ended = trace(1.0, 1.1, 1.2, 9.0, death=1.25)
    outcome = simulate(timeout_detector(0.3), ended)
    assert len(outcome.latencies) == 3 and outcome.false_alarms == 0


def test_an_empty_trace_says_nothing():
    outcome = simulate(timeout_detector(0.3), trace())
    assert outcome == Outcome(false_alarms=0, watched_s=0.0, latencies=(), missed=0)
    assert outcome.alarms_per_hour == 0.0


def test_outcomes_of_several_nodes_count_together():
    one = Outcome(false_alarms=1, watched_s=600.0, latencies=(0.2, 0.4), missed=0)
    two = Outcome(false_alarms=3, watched_s=1200.0, latencies=(0.3,), missed=0)
    both = Outcome.together([one, two])
    assert (both.alarms_per_hour, both.median_s, both.worst_s) == (8.0, 0.3, 0.4)


def test_a_sweep_has_a_row_for_each_condition_and_threshold():
    busy = Trace(**{**steady(50, {20: 0.5}).to_dict(), "name": "busy"})
    rows = sweep([steady(50), steady(50), busy], timeouts=(0.2, 0.6), phis=(1.0, 8.0, 30.0))
    assert len(rows) == 16 and {row.trace for row in rows} == {"made up", "busy"}
    found = {(row.trace, row.detector, row.threshold): row.outcome for row in rows}
    assert found["busy", "timeout", 0.2].false_alarms == 1 and found["busy", "timeout", 0.6].false_alarms == 0
    assert len(found["made up", "timeout", 0.2].latencies) == 100, "two nodes"
    assert found["made up", "phi_pause", 1.0].median_s > found["made up", "phi", 1.0].median_s + 0.25
    assert found["made up", "phi", 1.0].median_s < found["made up", "phi", 30.0].median_s
    json.dumps([row.to_dict() for row in rows], allow_nan=False)


def test_a_trace_survives_its_file(tmp_path):
    first = trace(0.1, 0.2, 0.9, pauses=((0.25, 0.85),), death=2.0, recorded="by hand")
    second = trace(0.15, 0.2, node="node-1")
    (file,) = save_traces([first, second], tmp_path)
    assert file.name == "made up.json" and load_traces(tmp_path) == [first, second]


@pytest.mark.parametrize("wrong", [{"arrivals": (0.2, 0.1)}, {"interval_s": 0.0}])
def test_a_trace_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        trace(**{"arrivals": (0.1, 0.2), **wrong})


def test_the_longest_gap_is_between_two_heartbeats():
    assert trace(0.1, 0.2, 0.9, 1.0).longest_gap() == pytest.approx(0.7)
    assert trace(0.1).longest_gap() == 0.0


@pytest.mark.parametrize("name", CONDITIONS)
def test_the_traces_that_come_with_ftlab_are_whole(name):
    traces = [each for each in load_traces() if each.name == name]
    assert [each.node for each in traces] == ["node-0", "node-1", "node-2"]
    for each in traces:
        assert each.arrivals[-1] - each.arrivals[0] > 55 and len(each.arrivals) > 200
        assert bool(each.pauses) == (name == "paused") and each.recorded
        for begin, end in each.pauses:
            silent = [at for at in each.arrivals if begin + 0.05 < at < end]
            assert silent == [], "a stopped node sends nothing"
