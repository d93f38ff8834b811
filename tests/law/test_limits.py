"""Laws on the tests themselves: how long they wait stands in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.law.source_rules import own_limits

TESTS = Path(__file__).parents[1]


def test_time_limits_stand_in_one_place():
    found = [f"tests/{file.relative_to(TESTS)}:{line}" for file in sorted(TESTS.rglob("*.py"))
             if file.name != "limits.py" for line in own_limits(file.read_text())]
    assert not found, f"take one of tests/limits.py: {found}"


def test_no_test_has_a_limit_of_its_own():
    mark = "mark." + "timeout"
    assert not [str(file) for file in TESTS.rglob("*.py") if mark in file.read_text()]


@pytest.mark.parametrize("source", ["job.result(timeout=60)", "run(['x'], timeout=7.5)", "end = time.monotonic() + 20"])
def test_a_limit_is_seen(source):
    assert own_limits(source) == [1]


@pytest.mark.parametrize("source", ["job.result(timeout=JOB_S)", "wait(timeout=0.05)", "time.monotonic() + 0.5",
                                    "f(60)"])
def test_names_and_short_moments_are_no_limits(source):
    assert own_limits(source) == []
