"""Lab 03's checks: full marks for the reference, none for the stubs, and each wrong solution loses what it should."""

from __future__ import annotations

import pytest

from tests.labs.quick import full_marks, marks, untouched
from tests.labs.wrong import cases
from tests.labs.wrong.lab03 import WRONG

QUICK = ("forgets budgets", "restarts healthy workers", "shrinks though there is a spare", "skips at once",
         "trusts a bad checkpoint", "swallows the error", "goes back to the wrong epoch", "saves before it looks")
pytestmark = pytest.mark.xdist_group("lab03")  # marks that were seen once are not looked at again

CLUSTER = "task4-check"  # takes 15 s: only those who lose marks in it are put to it, one of them in `make test`
PUT_TO_IT = "shrinks though there is a spare"


def test_the_reference_gets_full_marks():
    """All but the cluster's, for which test_content and test_cycle ask."""
    assert marks("lab03", leave_out=[CLUSTER]) == {
        cell: points for cell, points in full_marks("lab03").items() if cell != CLUSTER}


def test_the_untouched_lab_gets_none():
    assert set(marks("lab03", untouched("lab03")).values()) == {0.0}


@pytest.mark.parametrize("name", cases(WRONG, QUICK))
def test_a_wrong_solution_loses_exactly_what_it_should(name, request):
    wrong = WRONG[name]
    assert CLUSTER in WRONG[PUT_TO_IT].points
    put_to_it = CLUSTER in wrong.points and (name == PUT_TO_IT or request.config.getoption("--full"))
    left_out = () if put_to_it else (CLUSTER,)
    wanted = {cell: points for cell, points in {**full_marks("lab03"), **wrong.points}.items() if cell not in left_out}
    assert marks("lab03", wrong.cells, left_out) == wanted
