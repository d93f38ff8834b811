"""The whole way of a lab: release, hand in, collect, grade, feedback, with real notebooks, sandboxes and gradebook.

The reference gets full marks, the untouched lab none, and a few of the wrong solutions exactly what they should; all
the others go through the checks alone in `test_labNN_checks.py`.
"""

from __future__ import annotations

import html
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from nbgrader.api import Gradebook

from ftlab.grading.course import cells
from ftlab.grading.course.collecting import collect
from ftlab.grading.course.course import Course
from ftlab.grading.course.release import release
from ftlab.grading.course.release_rules import secret_lines
from tests.labs.students import full_points, reference, submission

ROOT = Path(__file__).parents[2]
CHOSEN = {"lab01": ("no directory fsync", "forgotten RNG"), "lab02": ("accuses slow nodes",),
          "lab03": ("swallows the error",)}  # the wrong solutions that take the whole way

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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
    done = subprocess.run([sys.executable, "-m", *words], cwd=course.root, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def hand_in(course: Course, lab: str) -> dict[str, dict[str, float]]:
    """Submissions of all kinds, collected; student → the marks they should get."""
    inbox = course.root / f"inbox-{lab}"
    inbox.mkdir()
    answers, full = reference(course, lab), full_points(course, lab)
    students = {"reference": (answers, full), "untouched": ({}, dict.fromkeys(full, 0.0))}
    for name in CHOSEN.get(lab, ()):
        wrong = importlib.import_module(f"tests.labs.wrong.{lab}").WRONG[name]
        students[name.replace(" ", "-")] = ({**answers, **wrong.cells}, {**full, **wrong.points})
    for student, (given, _) in students.items():
        submission(course, lab, student, given).write(inbox / f"{lab}-{student}.zip")
    assert {each.outcome for each in collect(course, inbox)} == {"taken"}
    return {student: marks for student, (_, marks) in students.items()}


def marks(course: Course, lab: str) -> dict[str, dict[str, float]]:
    """Student → graded cell → marks, of what is graded by its result."""
    notebook = course.notebook(lab).stem
    wanted = full_points(course, lab)
    with Gradebook(f"sqlite:///{course.root}/gradebook.db") as gradebook:
        return {each.student.id: {grade.name: grade.auto_score
                                  for grade in gradebook.find_submission_notebook(notebook, lab, each.student.id).grades
                                  if grade.name in wanted} for each in gradebook.assignment_submissions(lab)}


def test_the_plain_commands_of_nbgrader_grade_lab_00_and_give_feedback_without_secrets(real):
    expected = hand_in(real, "lab00")
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


@pytest.mark.parametrize("lab", [lab for lab in Course(ROOT).labs() if lab != "lab00"])
def test_each_student_gets_exactly_the_marks_that_they_should(real, lab):
    expected = hand_in(real, lab)
    told = json.loads(command(real, "ftlab.cli.main", "grade", lab, "--json", "--csv", f"{lab}.csv"))
    assert told["ok"], told
    assert marks(real, lab) == expected
    assert len((real.root / f"{lab}.csv").read_text().splitlines()) >= 1 + len(expected)
