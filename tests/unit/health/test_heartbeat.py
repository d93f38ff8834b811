"""Verdicts from silence, and a watcher that does not hold its own lateness against anybody."""

from __future__ import annotations

import pytest

from ftlab.health.heartbeat import FixedTimeout, Watch
from ftlab.membership import Verdict


@pytest.mark.parametrize(("silence", "verdict"), [
    (-1.0, Verdict.ALIVE), (0.0, Verdict.ALIVE), (0.299, Verdict.ALIVE),
    (0.3, Verdict.SUSPECT), (0.549, Verdict.SUSPECT),
    (0.55, Verdict.DEAD), (1e6, Verdict.DEAD),
])
def test_silence_becomes_suspicion_and_then_death(silence, verdict):
    assert FixedTimeout(suspect_s=0.3, dead_s=0.55).judge(silence) == verdict


def test_a_punctual_watcher_is_never_late():
    watch = Watch(every_s=0.02, looked=10.0)
    assert [watch.look(10.0 + 0.02 * tick) for tick in range(1, 50)] == [0.0] * 49


@pytest.mark.parametrize(("gap", "late"), [(0.03, 0.0), (0.04, 0.0), (0.05, 0.03), (5.02, 5.0)])
def test_lateness_counts_from_one_missed_look(gap, late):
    assert Watch(every_s=0.02, looked=10.0).look(10.0 + gap) == pytest.approx(late)


def test_what_counts_as_late_need_not_grow_with_the_time_between_looks():
    watch = Watch(every_s=0.2, looked=10.0, slack_s=0.05)
    assert watch.look(10.24) == 0.0
    watch.every_s = 0.02
    assert watch.look(10.36) == pytest.approx(0.1)


def test_a_late_look_is_told_once():
    watch = Watch(every_s=0.02, looked=10.0)
    assert watch.look(13.0) == pytest.approx(2.98)
    assert watch.look(13.02) == 0.0


def test_a_clock_that_stands_still_is_not_late():
    watch = Watch(every_s=0.02, looked=10.0)
    assert watch.look(10.0) == 0.0 and watch.looked == 10.0
