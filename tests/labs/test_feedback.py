"""What students see of their graded work, after nbgrader's own commands on a small course."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from nbgrader.api import Gradebook

from ftlab.grading.course.collecting import collect
from ftlab.grading.course.course import Course
from ftlab.grading.course.feedback import without_regions
from ftlab.grading.course.release import tree
from tests.labs.students import reference, submission
from tests.limits import COMMAND_S

STOCK = """
c.Autograde.sanitize_preprocessors = ["nbgrader.preprocessors." + each for each in (
    "ClearOutput", "DeduplicateIds", "OverwriteKernelspec", "OverwriteCells", "CheckCellMetadata")]
c.Autograde.autograde_preprocessors = ["nbgrader.preprocessors." + each for each in (
    "Execute", "LimitOutput", "SaveAutoGrades", "AssignLatePenalties", "CheckCellMetadata")]
"""  # lab 90's checks judge live parts: they need nbgrader's own way of executing

ANSWERS = {"bob": {"task1-stub": "def double(x):\n    return 42"}, "carol": {},
           "dave": {"task1-stub": "def double(x):\n    return 2 * x\ncheck = None"}}


def nbgrader(course: Course, *words: str) -> str:
    """Run one of nbgrader's commands in the course, as an instructor would."""
    done = subprocess.run([sys.executable, "-m", "nbgrader", *words], cwd=course.root, capture_output=True, text=True,
                          timeout=COMMAND_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_the_plain_commands_of_nbgrader_work_and_feedback_shows_nothing_hidden(course):
    released = tree(course.releases)
    nbgrader(course, "generate_assignment", "lab90", "--force")
    assert tree(course.releases) == released  # the record too, by the hook
    assert "Success!" in nbgrader(course, "validate", "solutions/lab90/small.ipynb")
    config = course.root / "nbgrader_config.py"
    config.write_text(config.read_text() + STOCK)
    inbox = course.root.parent / "inbox"
    inbox.mkdir()
    for student, answers in {"alice": reference(course, "lab90"), **ANSWERS}.items():
        submission(course, "lab90", student, answers).write(inbox / f"lab90-{student}.zip")
    assert {each.outcome for each in collect(course, inbox)} == {"taken"}
    nbgrader(course, "autograde", "lab90")
    nbgrader(course, "generate_feedback", "lab90")
    assert _marks(course) == {"alice": 6.0, "bob": 2.0, "carol": 0.0, "dave": 0.0}
    for page in course.root.glob("feedback/*/lab90/small.html"):
        text = re.sub(r"<style.*?</style>|<[^>]+>", "", page.read_text(), flags=re.DOTALL)
        assert not re.search(r"8121|BEGIN HIDDEN|MARK SCHEME|any reason|Traceback|Input In", text), page
        assert "The tests of this cell are hidden" in text and "lab90_task2" in text
    bob, dave = ((course.root / f"feedback/{name}/lab90/small.html").read_text() for name in ("bob", "dave"))
    assert "FAIL  a number is doubled" in bob and "16242" not in bob
    assert "AttributeError" in dave  # an error keeps its name


def _marks(course: Course) -> dict[str, float]:
    with Gradebook(f"sqlite:///{course.root}/gradebook.db") as gradebook:
        return {each.student.id: each.score for each in gradebook.assignment_submissions("lab90")}


@pytest.mark.parametrize(("source", "shown"), [
    ("a\n### BEGIN HIDDEN TESTS\nb\n### END HIDDEN TESTS\nc", "a\nc"),
    ("### BEGIN SOLUTION\n### BEGIN MARK SCHEME\n### END SOLUTION\nc", "c"),
    ("a\n### BEGIN MARK SCHEME\nb", "a"), ("a", "a"),
])
def test_regions_are_taken_out_even_when_they_are_never_closed(source, shown):
    assert without_regions(source) == shown


def test_the_extensions_of_nbgrader_are_enabled():
    for words, name in (("labextension", "@jupyter/nbgrader"), ("server extension", "nbgrader")):
        done = subprocess.run([str(Path(sys.executable).parent / "jupyter"), *words.split(), "list"],
                              capture_output=True, text=True, timeout=COMMAND_S)
        lines = [line for line in (done.stdout + done.stderr).splitlines() if name in line]
        assert any("enabled" in line for line in lines) and not any("disabled" in line for line in lines), lines
