"""The whole way of a lab: release, hand in, collect, grade, feedback, with real notebooks, sandboxes and gradebook.

The reference gets full marks in every lab; the untouched lab none and a wrong solution exactly what it should, in labs
00 and 02, which are quick. `make test-all` sends some through labs 01 and 03 too; all the others go through the checks
alone in `test_labNN_checks.py`.
"""

from __future__ import annotations

import html
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from nbgrader.api import Gradebook

from ftlab.grading.course import cells
from ftlab.grading.course.collecting import collect
from ftlab.grading.course.course import Course
from ftlab.grading.course.release import release
from ftlab.grading.course.release_rules import secret_lines
from tests.labs.students import full_points, reference, submission
from tests.limits import BATCH_S

ROOT = Path(__file__).parents[2]
CHOSEN = {"lab01": ("no directory fsync", "forgotten RNG"), "lab02": ("accuses slow nodes",),
          "lab03": ("swallows the error",)}  # the wrong solutions that take the whole way
ALL = {"lab00": ("reference", "untouched"), "lab02": ("reference", "untouched", *CHOSEN["lab02"])}
REST = {"lab01": ("untouched", *CHOSEN["lab01"]), "lab03": ("untouched", *CHOSEN["lab03"])}

@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Course:
    """The real course in a temporary folder, released there."""
    root = tmp_path_factory.mktemp("real")
    shutil.copytree(ROOT / "solutions", root / "solutions", ignore=shutil.ignore_patterns("runs", "checkpoints"))
    shutil.copy(ROOT / "nbgrader_config.py", root)
    course = Course(root)
    release(course, course.labs())
    return course


def command(course: Course, *words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=course.root, capture_output=True, text=True,
                          timeout=BATCH_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def hand_in(course: Course, lab: str, students: Sequence[str]) -> dict[str, dict[str, float]]:
    """Submissions, collected; student → the marks they should get."""
    inbox = course.root / f"inbox-{lab}-{len(students)}"
    inbox.mkdir()
    expected = {}
    for student in students:
        name = student.replace(" ", "-")
        given, expected[name] = answers_of(course, lab, student)
        submission(course, lab, name, given).write(inbox / f"{lab}-{name}.zip")
    assert {each.outcome for each in collect(course, inbox)} == {"taken"}
    return expected


def answers_of(course: Course, lab: str, student: str) -> tuple[dict[str, str], dict[str, float]]:
    """What a student writes into the stubs, and the marks for it."""
    answers, full = reference(course, lab), full_points(course, lab)
    if student == "reference":
        return answers, full
    if student == "untouched":
        return {}, dict.fromkeys(full, 0.0)
    wrong = importlib.import_module(f"tests.labs.wrong.{lab}").WRONG[student]
    return {**answers, **wrong.cells}, {**full, **wrong.points}


def marks(course: Course, lab: str) -> dict[str, dict[str, float]]:
    """Student → graded cell → marks, of what is graded by its result."""
    notebook = course.notebook(lab).stem
    wanted = full_points(course, lab)
    with Gradebook(f"sqlite:///{course.root}/gradebook.db") as gradebook:
        return {each.student.id: {grade.name: grade.auto_score
                                  for grade in gradebook.find_submission_notebook(notebook, lab, each.student.id).grades
                                  if grade.name in wanted} for each in gradebook.assignment_submissions(lab)}


def test_the_plain_commands_of_nbgrader_grade_lab_00_and_give_feedback_without_secrets(real):
    expected = hand_in(real, "lab00", ALL["lab00"])
    command(real, "nbgrader", "generate_assignment", "lab00", "--force")
    command(real, "nbgrader", "autograde", "lab00")
    assert marks(real, "lab00") == expected
    command(real, "nbgrader", "generate_feedback", "lab00")
    source = cells.read(real.notebook("lab00"))
    source.cells = [cell for cell in source.cells if cells.kind(cell) == "check"]
    secrets = secret_lines(source)
    pages = sorted(real.root.glob("feedback/*/lab00/*.html"))
    assert [page.parts[-3] for page in pages] == ["reference", "untouched"] and secrets
    for page in pages:
        text = html.unescape(re.sub(r"<style.*?</style>|<[^>]+>", "", page.read_text(), flags=re.DOTALL))
        assert not [line for line in secrets if line in text]
        assert "BEGIN HIDDEN" not in text and "MARK SCHEME" not in text
        assert "The tests of this cell are hidden" in text


@pytest.mark.parametrize(("lab", "students"), [
    ("lab01", ("reference",)), ("lab02", ALL["lab02"]), ("lab03", ("reference",)),
    *(pytest.param(lab, students, marks=pytest.mark.full) for lab, students in REST.items())])
def test_each_student_gets_exactly_the_marks_that_they_should(real, lab, students):
    expected = hand_in(real, lab, students)
    chosen = [word for student in expected for word in ("--student", student)]
    told = json.loads(command(real, "ftlab.cli.main", "grade", lab, "--json", "--csv", f"{lab}.csv", *chosen))
    assert told["ok"], told
    assert {student: found for student, found in marks(real, lab).items() if student in expected} == expected
    assert len((real.root / f"{lab}.csv").read_text().splitlines()) >= 1 + len(expected)
