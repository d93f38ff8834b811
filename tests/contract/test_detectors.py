"""What every failure detector must do, the same for a fixed timeout and for phi accrual."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from ftlab.health.detector import Detector, PhiConfig, PhiDetector, TimeoutDetector
from ftlab.health.heartbeat import FixedTimeout
from ftlab.membership import Verdict

ORDER = [Verdict.ALIVE, Verdict.SUSPECT, Verdict.DEAD]
MAKERS: dict[str, Callable[[], Detector]] = {
    "timeout": lambda: TimeoutDetector(FixedTimeout(suspect_s=0.3, dead_s=0.55)),
    "phi": lambda: PhiDetector(PhiConfig()),
    "phi without a pause": lambda: PhiDetector(PhiConfig(pause_s=0.0)),
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
def make(request: pytest.FixtureRequest) -> Callable[[], Detector]:
    return request.param


def beating(make: Callable[[], Detector], beats: int = 50, begin: float = 100.0) -> tuple[Detector, float]:
    """A detector after so many regular heartbeats, and the time of the last."""
    detector = make()
    for beat in range(beats):
        detector.heard(begin + 0.1 * beat)
    return detector, begin + 0.1 * (beats - 1)


def first(detector: Detector, verdict: Verdict, since: float) -> float:
    """Seconds of silence until a verdict, to a millisecond."""
    return next(ms / 1000 for ms in range(5000) if detector.judge(since + ms / 1000) == verdict)


def test_a_node_is_alive_while_its_heartbeats_come_on_time(make):
    detector = make()
    for beat in range(200):
        detector.heard(100.0 + 0.1 * beat)
        for ms in range(0, 101, 10):
            assert detector.judge(100.0 + 0.1 * beat + ms / 1000) == Verdict.ALIVE


@pytest.mark.parametrize("beats", [1, 2, 9, 11, 500])
def test_a_silent_node_is_suspected_and_then_dead(make, beats):
    detector, last = beating(make, beats)
    suspected, dead = first(detector, Verdict.SUSPECT, last), first(detector, Verdict.DEAD, last)
    assert 0.1 < suspected < dead < 1.0


def test_a_verdict_does_not_soften_while_the_silence_lasts(make):
    detector, last = beating(make)
    moments = [last + ms / 1000 for ms in range(-200, 5000, 3)]
    verdicts = [ORDER.index(detector.judge(now)) for now in moments]
    suspicions = [detector.suspicion(now) for now in moments]
    assert verdicts == sorted(verdicts) and set(verdicts) == {0, 1, 2}
    assert suspicions == sorted(suspicions) and suspicions[0] < 1e-9 and suspicions[-1] > 1


def test_a_node_that_is_heard_again_is_alive_again(make):
    detector, last = beating(make)
    back = last + first(detector, Verdict.DEAD, last) + 1.0
    assert detector.judge(back) == Verdict.DEAD
    detector.heard(back)
    assert detector.judge(back) == detector.judge(back + 0.1) == Verdict.ALIVE
    assert detector.suspicion(back) < detector.suspicion(back + 30.0)


def test_a_node_that_was_never_heard_is_not_judged(make):
    detector = make()
    for now in (0.0, 1.0, 1e9):
        assert detector.judge(now) == Verdict.ALIVE and detector.suspicion(now) == 0.0


def test_asking_changes_nothing(make):
    asked, last = beating(make)
    unasked, _ = beating(make)
    for ms in (0, 5000, 100, 700, 60_000, 250):
        asked.judge(last + ms / 1000)
        asked.suspicion(last + ms / 1000)
    asked.heard(last + 0.1)
    unasked.heard(last + 0.1)
    for ms in range(0, 2000, 7):
        now = last + 0.1 + ms / 1000
        assert asked.suspicion(now) == unasked.suspicion(now) and asked.judge(now) == unasked.judge(now)


def test_time_that_passed_without_a_question_counts(make):
    detector, last = beating(make)
    assert detector.judge(last + 3600.0) == Verdict.DEAD


@pytest.mark.parametrize("gap", [0.05, 0.1, 0.15])
def test_a_heartbeat_that_is_older_than_the_newest_tells_nothing(make, gap):
    detector, last = beating(make)
    other, _ = beating(make)
    detector.heard(last)
    detector.heard(last - gap)
    for ms in range(0, 2000, 10):
        assert detector.suspicion(last + ms / 1000) == other.suspicion(last + ms / 1000)


@pytest.mark.parametrize("silence", [0.0, 1e-9, 1.0, 1e3, 1e9, 1e18, 1e300, math.inf])
def test_no_silence_is_too_long_for_a_number(make, silence):
    detector, last = beating(make)
    suspicion = detector.suspicion(last + silence)
    assert suspicion >= 0.0 and not math.isnan(suspicion)
    assert detector.judge(last + silence) == (Verdict.DEAD if silence >= 1.0 else Verdict.ALIVE)


def test_a_clock_that_starts_anywhere_makes_no_difference(make):
    early, first_last = beating(make, begin=0.0)
    late, other_last = beating(make, begin=1e6)
    for ms in range(0, 1500, 10):
        assert early.judge(first_last + ms / 1000 + 5e-4) == late.judge(other_last + ms / 1000 + 5e-4)
