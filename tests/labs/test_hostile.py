"""Hostile and broken submissions, through `ftlab grade` with real sandboxes: fair marks, the batch goes on, nothing is
left. All are graded in one run; the tests look at what came of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from nbgrader.api import Gradebook

from ftlab.cluster import engine, jail
from tests.conftest import require
from tests.labs.hostile.lab91 import NAME, SECRETS, SUBMISSIONS, author, hand_in
from tests.limits import BATCH_S

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "hostile" / "site"
CONFIG = """
c.SandboxedExecute.cell_timeout = 6.0
c.SandboxedExecute.notebook_timeout = 60.0
"""


@dataclass
class Batch:
    """A course with all submissions, after one run of `ftlab grade`."""

    root: Path
    temporary: Path  # where sandboxes have their folders
    done: subprocess.CompletedProcess[str] | None = None
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, *argv: str, program: str = "ftlab.cli.main") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]),
                       "TMPDIR": str(self.temporary)}
        return subprocess.run([sys.executable, "-m", program, *argv], cwd=self.root, env=environment, text=True,
                              capture_output=True, timeout=BATCH_S)

    def outputs(self, student: str) -> str:
        return (self.root / "autograded" / student / "lab91" / NAME).read_text()

    def gradebook(self) -> dict[str, float]:
        with Gradebook(f"sqlite:///{self.root}/gradebook.db") as gradebook:
            return {each.student.id: each.score for each in gradebook.assignment_submissions("lab91")}


def batch(folder: Path, sandbox: str, names: list[str]) -> Batch:
    """Submissions, graded in a sandbox of one kind."""
    made = Batch(folder / "course", folder / "tmp")
    made.temporary.mkdir()
    made.root.mkdir()
    (made.root / "nbgrader_config.py").write_text((ROOT / "nbgrader_config.py").read_text() + CONFIG)
    author(made.root)
    for name in names:
        hand_in(SUBMISSIONS[name], name, made.root)
    made.done = made.run("grade", "lab91", "--json", "--sandbox", sandbox, "--memory-mb", "512", "--csv", "marks.csv")
    assert made.done.stdout, made.done.stderr
    answer = json.loads(made.done.stdout)
    assert "graded" in answer, answer
    made.rows = {row["student"]: row for row in answer["graded"]}
    return made


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    reason = engine.available()
    require("docker", not reason, reason)
    return batch(tmp_path_factory.mktemp("hostile"), "container", list(SUBMISSIONS))


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_a_submission_gets_its_fair_marks(graded, name):
    row, case = graded.rows[name], SUBMISSIONS[name]
    assert row["score"] == case.score, f"{case.why}: {row}"
    assert graded.gradebook()[name] == case.score
    assert case.problem in row["problem"] and bool(case.problem) == bool(row["problem"]), row
    assert any(case.note in note for note in [*row["notes"], ""]), row
    assert not row["troubles"] and not row["failed"], row


def test_the_batch_goes_on_and_tells_that_some_could_not_be_graded(graded):
    assert set(graded.rows) == set(SUBMISSIONS) and graded.done.returncode == 1
    assert {row["points"] for row in graded.rows.values()} == {9.0}


def test_the_marks_are_exported(graded):
    lines = (graded.root / "marks.csv").read_text().splitlines()
    assert len(lines) == 1 + len(SUBMISSIONS) and any(",honest," in line and ",7.0," in line for line in lines)


def test_a_spy_finds_neither_hidden_tests_nor_the_gradebook_nor_others(graded):
    text = graded.outputs("spy")
    assert "found []" in text, text[:3000]
    assert "pipes PermissionError PermissionError" in text


@pytest.mark.parametrize("name", [name for name, case in SUBMISSIONS.items() if not case.problem])
def test_no_output_of_a_student_holds_a_hidden_number_or_is_large(graded, name):
    notebook = json.loads(graded.outputs(name))
    for cell in notebook["cells"]:
        outputs = json.dumps(cell.get("outputs", []))
        assert len(outputs) < 200_000
        assert cell.get("metadata", {}).get("nbgrader", {}).get("grade") or not any(each in outputs for each in SECRETS)


def test_no_script_reaches_the_graded_notebook(graded):
    outputs = [each for cell in json.loads(graded.outputs("scripts"))["cells"] for each in cell.get("outputs", [])]
    assert {kind for each in outputs for kind in each.get("data", {})} <= {"text/plain", "image/png"}
    assert "<script>" not in json.dumps(outputs)


def test_no_script_reaches_the_feedback(graded):
    done = graded.run("generate_feedback", "lab91", "--student", "scripts", program="nbgrader")
    page = (graded.root / "feedback" / "scripts" / "lab91" / NAME).with_suffix(".html").read_text()
    assert done.returncode == 0 and "Because" in page and "&lt;script&gt;alert(92)" in page
    for each in ("<script>alert(92)", 'onerror="', 'href="javascript:', "<script>alert(91)"):
        assert each not in page


def test_no_cell_of_a_student_ran_in_the_grader(graded):
    assert not list(graded.root.rglob("planted"))


def test_a_link_is_not_followed(graded):
    beside = graded.root / "autograded" / "link-beside" / "lab91"
    assert not (beside / "data.txt").exists() and not (beside / "more").exists()


def test_nothing_is_left(graded):
    assert list(graded.temporary.glob("ftlab-*")) == []
    assert [each for each in engine.look() if str(each.folder).startswith(str(graded.temporary))] == []
    left = [each.info for each in psutil.process_iter(["cmdline"])
            if any("91919" in word or str(graded.temporary) in word for word in each.info["cmdline"] or [])]
    assert left == []


def test_grading_again_without_a_change_runs_nothing(graded):
    begin = time.monotonic()
    again = json.loads(graded.run("grade", "lab91", "--json", "--sandbox", "container", "--memory-mb", "512").stdout)
    assert all(row["unchanged"] for row in again["graded"]), again
    assert {row["student"]: row["score"] for row in again["graded"]} == {
        name: case.score for name, case in SUBMISSIONS.items()}
    assert time.monotonic() - begin < 60


def test_plain_nbgrader_grades_in_the_same_sandbox(graded):
    hand_in(SUBMISSIONS["forges"], "plain-forger", graded.root)
    done = graded.run("autograde", "lab91", "--student", "plain-forger", program="nbgrader")
    assert done.returncode == 0, done.stderr[-3000:]
    assert graded.gradebook()["plain-forger"] == SUBMISSIONS["forges"].score


def test_without_an_engine_namespaces_hold_too(tmp_path):
    reason = jail.why_not()
    require("namespaces", not reason, reason)
    names = ["honest", "spy", "forges", "kills-all", "daemons", "fork-bomb-in-its-part", "memory-bomb",
             "fills-the-disk", "allocates-the-disk", "no-text", "prints-no-text", "no-text-as-answer", "latin-1-beside",
             "brackets [1] {x} *?!"]
    made = batch(tmp_path, "namespaces", names)
    assert {name: row["score"] for name, row in made.rows.items()} == {
        name: SUBMISSIONS[name].score for name in names}, made.rows
    assert "not complete" in made.done.stderr and "found []" in made.outputs("spy")
    assert list(made.temporary.glob("ftlab-*")) == []
