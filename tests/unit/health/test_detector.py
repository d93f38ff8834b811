"""Phi from the intervals between heartbeats: what it means, what it learns, and how far out it can be computed."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

import pytest

from ftlab.errors import ConfigError
from ftlab.health.detector import PhiConfig, PhiDetector, TimeoutDetector, phi
from ftlab.health.heartbeat import FixedTimeout
from ftlab.membership import Verdict


def fed(intervals: list[float], config: PhiConfig | None = None) -> tuple[PhiDetector, float]:
    """A detector that heard heartbeats with these intervals, and the time of the last."""
    detector, at = PhiDetector(config), 50.0
    detector.heard(at)
    for interval in intervals:
        at += interval
        detector.heard(at)
    return detector, at


def noisy(deviation: float, count: int = 200, seed: int = 1) -> list[float]:
    draw = random.Random(seed)
    return [max(0.001, draw.gauss(0.1, deviation)) for _ in range(count)]


@pytest.mark.parametrize("deviations", [-5.0, -1.0, 0.0, 0.5, 1.0, 3.0, 6.0])
def test_phi_is_minus_the_logarithm_of_the_chance_to_be_later(deviations):
    assert 10 ** -phi(deviations) == pytest.approx(1 - NormalDist().cdf(deviations), rel=1e-6)


@pytest.mark.parametrize(("deviations", "expected"), [  # computed with mpmath to 50 digits
    (10.0, 23.11805341), (20.0, 88.56009534), (29.999, 197.2961662), (30.001, 197.3222528), (37.5, 307.3367371),
    (100.0, 2173.871543),
])
def test_phi_is_right_where_the_chance_is_hardly_a_number(deviations, expected):
    assert phi(deviations) == pytest.approx(expected, abs=1e-5)


def test_phi_rises_everywhere_also_where_the_formula_changes():
    places = [each / 1000 for each in range(-40_000, 60_000)] + [30 - 1e-12, 30.0, 30 + 1e-12] + [1e3, 1e5, 1e9, 1e300]
    values = [phi(each) for each in sorted(places)]
    assert values == sorted(values) and values[0] == 0.0 and math.isfinite(values[-1])


def test_the_same_lateness_is_more_suspicious_of_a_regular_node():
    config = PhiConfig(pause_s=0.0)
    regular, last = fed(noisy(0.01), config)
    erratic, other = fed(noisy(0.04), config)
    assert regular.judge(last + 0.2) == Verdict.DEAD
    assert erratic.judge(other + 0.2) == Verdict.ALIVE


def test_phi_matches_mean_and_deviation_of_the_window():
    config = PhiConfig(pause_s=0.05, window=4, enough=2, least_deviation_s=0.001)
    detector, last = fed([9.0, 9.0, 0.08, 0.12, 0.08, 0.12], config)
    assert detector.suspicion(last + 0.1 + 0.05 + 0.02 * 3) == pytest.approx(phi(3.0), rel=1e-6)


def test_what_left_the_window_is_forgotten():
    detector, last = fed([1e6] + [0.1] * 100)
    other, other_last = fed([0.1] * 100)
    assert detector.suspicion(last + 0.45) == pytest.approx(other.suspicion(other_last + 0.45), rel=1e-3)


def test_a_long_interval_makes_it_patient_for_a_while():
    calm, last = fed([0.1] * 50)
    shaken, other = fed([0.1] * 49 + [2.0])
    assert calm.judge(last + 1.0) == Verdict.DEAD
    assert shaken.judge(other + 1.0) == Verdict.ALIVE and shaken.judge(other + 10.0) == Verdict.DEAD


@pytest.mark.parametrize("count", [0, 1, 4])
def test_before_it_has_seen_enough_it_goes_by_the_first_estimate(count):
    config = PhiConfig(enough=5, first_s=2.0, pause_s=0.0)
    detector, last = fed([0.1] * count, config)
    assert detector.suspicion(last + 2.0 + 0.5 * 3) == pytest.approx(phi(3.0), rel=1e-6)
    learned, last = fed([0.1] * 5, config)
    assert learned.suspicion(last + 0.5) > phi(30.0)


def test_perfectly_regular_heartbeats_keep_the_least_deviation():
    detector, last = fed([0.125] * 50, PhiConfig(pause_s=0.0, least_deviation_s=0.02))  # exact in binary
    assert detector.suspicion(last + 0.125 + 0.02 * 4) == pytest.approx(phi(4.0), rel=1e-6)


def test_a_pause_moves_phi_by_as_much():
    without, last = fed([0.1] * 50, PhiConfig(pause_s=0.0))
    patient, _ = fed([0.1] * 50, PhiConfig(pause_s=0.3))
    assert patient.suspicion(last + 0.43) == pytest.approx(without.suspicion(last + 0.13), rel=1e-6)


def test_a_fixed_timeout_learns_nothing():
    detector = TimeoutDetector(FixedTimeout(suspect_s=0.3, dead_s=0.55))
    for at in (0.0, 5.0, 10.0, 15.0):
        detector.heard(at)
    assert [detector.judge(15.0 + silence) for silence in (0.29, 0.31, 0.56)] == [
        Verdict.ALIVE, Verdict.SUSPECT, Verdict.DEAD]


@pytest.mark.parametrize(("wrong", "reason"), [
    ({"suspect_phi": 8.0}, "suspected before"), ({"suspect_phi": 0.0}, "suspected before"),
    ({"dead_phi": math.inf}, "suspected before"), ({"enough": 1}, "no deviation"), ({"window": 5}, "remembered"),
    ({"first_s": 0.0}, "positive"), ({"least_deviation_s": 0.0}, "positive"), ({"pause_s": -0.1}, "negative"),
])
def test_a_setting_that_cannot_work_is_refused_with_the_reason(wrong, reason):
    with pytest.raises(ConfigError, match=reason):
        PhiConfig(**wrong)
