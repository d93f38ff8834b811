"""Somebody's own detector behind the controller's question about a silence."""

from __future__ import annotations

from ftlab.health.heartbeat import FixedTimeout
from ftlab.health.own import OwnDetector
from ftlab.membership import Verdict

FALLBACK = FixedTimeout(suspect_s=0.3, dead_s=0.55)


class Mine:
    """Dead after ten seconds; says so with a plain string."""

    def __init__(self):
        self.beats = []

    def heard(self, at):
        self.beats.append(at)

    def judge(self, now):
        return "DEAD" if now - self.beats[-1] > 10 else Verdict.ALIVE


def own(make) -> tuple[OwnDetector, list[str]]:
    told: list[str] = []
    return OwnDetector(make, FALLBACK, told.append), told


def test_it_is_asked_about_the_last_heartbeat_plus_the_silence():
    detector, told = own(Mine)
    detector.heard(100.0)
    assert detector.judge_silence(9.0) == Verdict.ALIVE and detector.judge_silence(11.0) is Verdict.DEAD
    assert not told


def test_a_node_that_was_never_heard_is_not_judged():
    detector, told = own(Mine)
    assert detector.judge_silence(1e9) == Verdict.ALIVE and not told


def test_one_that_fails_is_told_of_once_and_the_fixed_timeout_takes_over():
    def broken():
        raise LookupError("no such thing")

    class Wordless(Mine):
        def judge(self, now):
            return None

    class Deaf(Mine):
        def heard(self, at):
            raise OSError("deaf")

    for make, words in ((broken, "no such thing"), (Wordless, "None"), (Deaf, "deaf")):
        detector, told = own(make)
        detector.heard(100.0)
        assert [detector.judge_silence(each) for each in (0.1, 0.4, 0.6)] == list(Verdict)
        detector.heard(101.0)
        assert len(told) == 1 and words in told[0]
