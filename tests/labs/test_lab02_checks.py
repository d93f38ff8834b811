"""Lab 02's checks: full marks for the reference, none for the stubs, and each wrong solution loses what it should."""

from __future__ import annotations

import pytest

from tests.labs.quick import full_marks, marks, untouched
from tests.labs.wrong import cases
from tests.labs.wrong.lab02 import WRONG

QUICK = ("NaN compared with ==", "a fixed limit", "a mean for a median", "never forgets", "a pace per look",
         "accuses slow nodes", "remembers a verdict", "never suspects")
pytestmark = pytest.mark.xdist_group("lab02")  # marks that were seen once are not looked at again


def test_the_reference_gets_full_marks():
    assert marks("lab02") == full_marks("lab02")


def test_the_untouched_lab_gets_none():
    assert set(marks("lab02", untouched("lab02")).values()) == {0.0}


@pytest.mark.parametrize("name", cases(WRONG, QUICK))
def test_a_wrong_solution_loses_exactly_what_it_should(name):
    wrong = WRONG[name]
    assert marks("lab02", wrong.cells) == {**full_marks("lab02"), **wrong.points}
