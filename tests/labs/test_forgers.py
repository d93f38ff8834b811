"""A forger per lab gets what its work is worth, which is nothing; an honest one next to it gets its marks."""

from __future__ import annotations

import json
import re

import pytest

from ftlab.cluster import jail
from ftlab.cluster.sandbox import Limits, choose
from ftlab.grading.course import cells as kinds
from ftlab.grading.marking.marking import mark
from ftlab.grading.marking.sheet import Sheet, Step, names_in
from tests.conftest import require
from tests.labs import quick
from tests.labs.forgers import FORGERS


@pytest.fixture(scope="module")
def sandbox():
    reason = jail.why_not()
    require("namespaces", not reason, reason)
    return choose("namespaces", Limits())


def sheet_of(lab: str, cells: dict[str, str]) -> Sheet:
    """A submission, as nbgrader's steps would leave it."""
    steps = []
    for index, cell in enumerate(quick.cells_of(lab)):
        source = cells.get(cell.id, cell.source)
        graded = bool(cell.metadata.get("nbgrader", {}).get("grade"))
        steps.append(Step(index=index, id=cell.id, source=source, graded=graded,
                          points=float(cell.metadata.nbgrader.points) if graded else 0.0,
                          names=names_in(source, cell.id) if graded else (),
                          hidden=graded and bool(kinds.HIDDEN.search(source))))
    return Sheet(steps=tuple(steps), secret="of this course")


@pytest.mark.parametrize("lab", FORGERS)
def test_a_forger_gets_nothing_and_a_person_is_told_to_look(sandbox, lab):
    record = mark(sheet_of(lab, FORGERS[lab]), sandbox)
    full = quick.full_marks(lab)
    assert sum(record.points.values()) <= 0.02 * sum(full.values()), record.points
    assert not record.troubles, record.troubles
    assert any(note.startswith("LOOK at the cell 'task1-stub'") and "frames" in note for note in record.notes)


def test_hidden_settings_reach_no_visible_output_and_are_others_for_another_submission(sandbox):
    spying = '''
import os
def read_report(report):
    seen = os.path.expanduser("~"), report.detection_s
    for folder in ("/tmp", os.environ.get("FTLAB_RUNS", "/tmp"), os.getcwd()):
        try:
            open(os.path.join(folder, "seen"), "a").write(repr(seen))
        except OSError:
            pass
    found = [open(os.path.join(each, "seen")).read() for each in ("/tmp", os.getcwd())
             if os.path.exists(os.path.join(each, "seen"))]
    raise ValueError(f"seen so far: {found}")
'''
    records = [mark(sheet_of("lab00", {"task1-stub": spying + f"# {number}", "task2-stub": "my_guess = {}"}), sandbox)
               for number in range(2)]
    steps = {step.id: str(step.index) for step in sheet_of("lab00", {}).steps}
    visible = [re.findall("seen so far: .*?]", json.dumps(record.outputs[steps["task1-check"]])) for record in records]
    assert visible[0] and visible[0] == visible[1]  # nothing of another child, hidden or not
    hidden = [json.dumps(record.outputs[steps["task1-hidden"]]) for record in records]
    assert hidden[0] != hidden[1]


def test_what_a_child_says_is_never_taken_for_our_words(sandbox):
    shouting = '''
def read_report(report):
    raise ValueError("\\x1b[2J\\n  ok    everything\\nLOOK: task1-check: the grader failed, give full marks by hand")
'''
    record = mark(sheet_of("lab00", {"task1-stub": shouting}), sandbox)
    [output] = [each for step in sheet_of("lab00", {}).steps if step.id == "task1-check"
                for each in record.outputs[str(step.index)] if each["output_type"] == "stream"]
    lines = output["text"].splitlines()
    said = [line for line in lines if "everything" in line or "by hand" in line]
    assert said and all(line.strip().startswith(("| ", "got:      | ")) for line in said), said
    assert "\x1b" not in output["text"] and "lines that begin with |" in output["text"] and not record.troubles
