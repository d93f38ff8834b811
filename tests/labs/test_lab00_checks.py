"""Lab 00's checks: full marks for the reference, none for the stubs, and each wrong solution loses what it should."""

from __future__ import annotations

from tests.labs.quick import full_marks, marks, untouched


def test_the_reference_gets_full_marks():
    assert marks("lab00") == full_marks("lab00")


def test_the_untouched_lab_gets_none():
    assert set(marks("lab00", untouched("lab00")).values()) == {0.0}


def test_wrong_readings_lose_their_share():
    half = 'def read_report(it): return {"detection_s": it.detection_s, "steps_lost": 0, "source": it.source}'
    assert marks("lab00", {"task1-stub": half}) == {**full_marks("lab00"), "task1-check": 1.0, "task1-hidden": 0.5}
    assert marks("lab00", {"task2-stub": 'my_guess = {"kill": True, "hang": False, "blackout": True}'}) == {
        **full_marks("lab00"), "task2-check": 0.0}
