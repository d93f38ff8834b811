"""Lab 03's checks: full marks for the reference, none for the stubs, and each wrong solution loses what it should."""

from __future__ import annotations

import pytest

from tests.labs.quick import full_marks, marks, untouched
from tests.labs.wrong.lab03 import WRONG

CLUSTER = "task4-check"  # takes 15 s: only those who lose marks in it are put to it
pytestmark = pytest.mark.timeout(600)


def test_the_reference_gets_full_marks():
    assert marks("lab03") == full_marks("lab03")


def test_the_untouched_lab_gets_none():
    assert set(marks("lab03", untouched("lab03")).values()) == {0.0}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_solution_loses_exactly_what_it_should(name):
    wrong = WRONG[name]
    left_out = () if CLUSTER in wrong.points else (CLUSTER,)
    wanted = {cell: points for cell, points in full_marks("lab03").items() if cell not in left_out}
    assert marks("lab03", wrong.cells, left_out) == {**wanted, **wrong.points}
