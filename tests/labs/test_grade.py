"""`ftlab grade` as an instructor uses it: stopped and taken up again, one student, changes, bad usage.

It is called in this process, which has nbgrader imported, but where it must be stopped; workers and sandboxes are real.
"""

from __future__ import annotations

import csv
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nbconvert.exporters import HTMLExporter
from nbformat import writes
from nbgrader.api import Gradebook
from nbgrader.server_extensions.formgrader import handlers as formgrader

from ftlab.cli.main import main
from ftlab.cluster import engine, jail
from ftlab.grading.course.course import Course
from tests.conftest import require
from tests.labs.hostile.lab91 import NAME, WRONG_DOUBLE, WRONG_SQUARE, answered, author
from tests.labs.test_hostile import CONFIG, ROOT, SITE
from tests.limits import COMMAND_S, START_S

SLOW = "import time\ntime.sleep(2)"


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sandboxes have their folders; workers find the checks of lab 91."""
    reason = engine.available() and jail.why_not()
    require("docker", not reason, reason)
    place = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SITE), str(ROOT)]))
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


@pytest.fixture
def course(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nbgrader_config.py").write_text((ROOT / "nbgrader_config.py").read_text() + CONFIG)
    author(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def grade(course: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, dict]]]:
    def run(*argv: str) -> tuple[int, dict]:
        capsys.readouterr()
        code = main(["grade", "lab91", "--json", *argv])
        return code, json.loads(capsys.readouterr().out)

    before = signal.getsignal(signal.SIGTERM)  # the command sets its own
    yield run
    signal.signal(signal.SIGTERM, before)


def hand_in(course: Path, student: str, **cells: str) -> None:
    folder = course / "submitted" / student / "lab91"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(writes(answered(**cells)))


def test_stopped_by_ctrl_c_it_leaves_nothing_and_goes_on_where_it_was(course, temporary, grade):
    for number in range(3):
        hand_in(course, f"s{number}", between=f"{SLOW} + {number}")
    running = subprocess.Popen([sys.executable, "-m", "ftlab.cli.main", "grade", "lab91", "--jobs", "1"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    records, deadline = course / ".ftlab/grading/records", time.monotonic() + START_S
    while not list(records.glob("*.json")):
        assert time.monotonic() < deadline and running.poll() is None, running.communicate()
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    out, error = running.communicate(timeout=COMMAND_S)
    assert running.returncode == 130 and "interrupted" in error and "Traceback" not in error, (out, error)
    assert list(temporary.glob("ftlab-*")) == []
    assert [each for each in engine.look() if str(each.folder).startswith(str(temporary))] == []
    kept = len(list(records.glob("*.json")))
    assert 1 <= kept < 3
    code, answer = grade()
    assert code == 0 and [row["score"] for row in answer["graded"]] == [7.0] * 3
    assert sum(row["seconds"] == 0 for row in answer["graded"]) == kept


def test_only_what_changed_is_graded_again(course, grade):
    hand_in(course, "alice")
    hand_in(course, "bob")
    assert grade()[0] == 0
    hand_in(course, "bob", double=WRONG_DOUBLE)
    code, answer = grade("--csv", "marks.csv")
    assert code == 0
    assert {row["student"]: (row["unchanged"], row["score"]) for row in answer["graded"]} == {
        "alice": (True, 7.0), "bob": (False, 4.0)}
    assert "bob" in (course / "marks.csv").read_text()
    _, answer = grade("--student", "alice", "--again")
    assert [(row["student"], row["unchanged"]) for row in answer["graded"]] == [("alice", False)]
    source = course / "solutions" / "lab91" / NAME
    source.write_text(source.read_text().replace("check.lab91_task1(double)", "check.lab91_task1(double, number=8)"))
    _, answer = grade()
    assert not any(row["unchanged"] for row in answer["graded"])


def test_nobody_handed_in_and_unknown_labs_are_bad_usage(course, grade):
    code, answer = grade()
    assert code == 2 and "nothing was handed in" in answer["message"] and "ftlab collect" in answer["hint"]


def huge(path: Path) -> None:
    """60 GB that take no room on the disk."""
    with path.open("wb") as file:
        file.truncate(60 << 30)


def test_one_that_cannot_be_read_is_told_of_and_the_others_are_graded(course, grade):
    hand_in(course, "alice")
    for name in ("huge-beside", "huge-notebook", "many-files", "many-cells", "nested"):
        hand_in(course, name)
    place = {name: course / "submitted" / name / "lab91" for name in os.listdir(course / "submitted")}
    huge(place["huge-beside"] / "data.bin")
    huge(place["huge-notebook"] / NAME)
    for number in range(3000):
        (place["many-files"] / f"{number}.txt").touch()
    cell = {"cell_type": "code", "source": "1", "metadata": {}, "outputs": [], "execution_count": None}
    (place["many-cells"] / NAME).write_text(json.dumps({"cells": [cell] * 50_000, "metadata": {}, "nbformat": 4}))
    (place["nested"] / NAME).write_text("[" * 1_000_000)
    odd = os.fsencode(course / "submitted") + b"/M\xfcller"
    shutil.copytree(os.fsencode(place["alice"]), odd + b"/lab91")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, answer = grade()
    rows = {row["student"]: row for row in answer["graded"]}
    assert code == 1 and rows.pop("alice")["score"] == 7.0
    beside = rows.pop("huge-beside")
    assert beside["score"] == 7.0 and "left out, from data.bin on" in beside["notes"][0] and not beside["problem"]
    assert "no text: rename it" in rows.pop(os.fsdecode(b"M\xfcller"))["failed"]
    assert {name: row["problem"] for name, row in rows.items()} == {
        "huge-notebook": f"{NAME} is larger than 20 MB: outputs of a loop?",
        "many-files": "it holds more than 2000 files and folders",
        "many-cells": "this notebook has 50000 cells, the limit is 2000",
        "nested": rows["nested"]["problem"]}
    assert "no notebook" in rows["nested"]["problem"] and {row["score"] for row in rows.values()} == {0.0}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10  # kB; the files are 120 GB


def test_a_changed_due_date_changes_the_penalty_and_the_table_shows_it(course, grade, capsys):
    hand_in(course, "alice", double=WRONG_DOUBLE)
    hand_in(course, "bob")
    (course / "submitted/alice/lab91/timestamp.txt").write_text("2026-11-18 10:00:00 UTC\n")
    config = course / "nbgrader_config.py"
    config.write_text(config.read_text() + "c.LateSubmissionPlugin.penalty_method = 'zero'\n")

    def due(text: str) -> dict[str, tuple[float, float, bool]]:
        with Gradebook(f"sqlite:///{course}/gradebook.db") as gradebook:
            gradebook.update_or_create_assignment("lab91", duedate=text)
        code, answer = grade("--csv", "marks.csv")
        assert code == 0, answer
        with (course / "marks.csv").open() as file:
            exported = {row["student_id"]: float(row["score"]) for row in csv.DictReader(file)}
        assert exported == {row["student"]: row["score"] for row in answer["graded"]}
        return {row["student"]: (row["score"], row["penalty"], row["unchanged"]) for row in answer["graded"]}

    assert [row["score"] for row in grade()[1]["graded"]] == [4.0, 7.0]
    assert due("2026-11-18 08:00:00 UTC") == {"alice": (0.0, 4.0, True), "bob": (7.0, 0.0, True)}
    assert main(["grade", "lab91"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("alice")]
    assert "0 of 9" in line and "2.0 h late, 4 taken off" in line
    assert due("2026-11-18 12:00:00 UTC")["alice"] == (4.0, 0.0, True)


def test_a_broken_resubmission_leaves_the_graded_one_as_a_whole_and_says_which_counts(course, grade, capsys):
    hand_in(course, "alice")
    place = course / "submitted/alice/lab91"
    (place / "timestamp.txt").write_text("2026-11-18 10:00:00 UTC\n")
    assert grade()[0] == 0
    with Gradebook(f"sqlite:///{course}/gradebook.db") as gradebook:
        gradebook.find_grade("question", "hostile", "lab91", "alice").manual_score = 2.0
        gradebook.db.commit()
    whole = (place / NAME).read_text()
    (place / NAME).write_text(whole[:-40])
    (place / "timestamp.txt").write_text("2026-11-18 12:00:00 UTC\n")
    for unchanged in (False, True):
        code, answer = grade()
        [row] = answer["graded"]
        assert code == 1 and "no notebook" in row["problem"] and row["unchanged"] is unchanged
        assert row["score"] == 9.0 and row["counts"] == "the one of 2026-11-18 10:00:00 UTC, that was graded before"
    assert main(["grade", "lab91"]) == 1
    assert "NOT GRADED, and the one of 2026-11-18 10:00:00 UTC, that was graded before counts: " in \
        capsys.readouterr().out
    assert (course / "autograded/alice/lab91" / NAME).is_file()
    (place / NAME).write_text(writes(answered(square=WRONG_SQUARE)))
    code, answer = grade()
    assert code == 0 and answer["graded"][0]["score"] == 5.0 and not answer["graded"][0]["counts"]


def test_identical_notebooks_are_run_once(course, grade):
    for number, student in enumerate(("alice", "bob", "carol")):
        hand_in(course, student, between="1" if student == "carol" else "")
        (course / "submitted" / student / "lab91" / "timestamp.txt").write_text(f"2026-11-18 1{number}:00:00 UTC\n")
    code, answer = grade()
    rows = {row["student"]: row for row in answer["graded"]}
    assert code == 0 and {row["score"] for row in rows.values()} == {7.0}
    assert [rows[student]["seconds"] > 0 for student in rows] == [True, False, True]
    assert len(list((course / ".ftlab/grading/records").glob("*.json"))) == 2


def test_the_formgrader_shows_the_mark_scheme_to_the_marker_and_feedback_to_nobody(course, grade):
    hand_in(course, "alice")
    assert grade()[0] == 0
    config = Course(course).config
    config.HTMLExporter.update(template_name="formgrade", extra_template_basedirs=[formgrader.template_path])
    page = {"assignment_id": "lab91", "notebook_id": "hostile", "submission_id": "1", "index": 0, "total": 1,
            "base_url": "/", "student": "alice", "last_name": "", "first_name": "", "notebook_path": ""}
    file = course / "autograded/alice/lab91" / NAME
    shown = HTMLExporter(config=config).from_filename(str(file), resources=page)[0]
    assert "Because." in shown and "Mark scheme" in shown and "<p>because" in shown
    done = subprocess.run([sys.executable, "-m", "nbgrader", "generate_feedback", "lab91"], capture_output=True)
    feedback = (course / "feedback/alice/lab91" / NAME).with_suffix(".html").read_text()
    assert done.returncode == 0 and "Because." in feedback
    assert "Mark scheme" not in feedback and "because" not in feedback and "MARK SCHEME" not in file.read_text()
