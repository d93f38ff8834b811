"""Right answers that differ from the reference get full marks."""

from __future__ import annotations

import pytest

from tests.labs import quick
from tests.labs.right import RIGHT

CASES = [pytest.param(lab, task, number, id=f"{lab}-{task}-{number}", marks=[
             pytest.mark.xdist_group(f"right-{lab}"), *([pytest.mark.full] if number > 1 else [])])
         for (lab, task), answers in RIGHT.items() for number in range(len(answers))]


@pytest.mark.parametrize(("lab", "task", "number"), CASES)
def test_a_right_answer_of_ones_own_gets_full_marks(lab, task, number):
    full = {cell: points for cell, points in quick.full_marks(lab).items() if cell.startswith(task)}
    others = [cell for cell in quick.full_marks(lab) if cell not in full]
    assert quick.marks(lab, RIGHT[lab, task][number], leave_out=others) == full
