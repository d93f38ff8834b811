"""`ftlab grade` as an instructor uses it: stopped and taken up again, one student, changes, bad usage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nbformat import writes

from ftlab.cluster import engine, jail
from tests.conftest import require
from tests.labs.hostile.lab91 import NAME, WRONG_DOUBLE, answered, author
from tests.labs.test_hostile import CONFIG, ROOT, SITE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SLOW = "import time\ntime.sleep(2)"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    reason = engine.available() and jail.why_not()
    require("docker", not reason, reason)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]),
            "TMPDIR": str(tmp_path_factory.mktemp("tmp"))}


@pytest.fixture
def course(tmp_path: Path) -> Path:
    (tmp_path / "nbgrader_config.py").write_text((ROOT / "nbgrader_config.py").read_text() + CONFIG)
    author(tmp_path)
    return tmp_path


def hand_in(course: Path, student: str, **cells: str) -> None:
    folder = course / "submitted" / student / "lab91"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(writes(answered(**cells)))


def grade(course: Path, environment: dict[str, str], *argv: str) -> tuple[int, dict]:
    done = subprocess.run([sys.executable, "-m", "ftlab.cli.main", "grade", "lab91", "--json", *argv], cwd=course,
                          env=environment, text=True, capture_output=True, timeout=400)
    return done.returncode, json.loads(done.stdout)


def test_stopped_by_ctrl_c_it_leaves_nothing_and_goes_on_where_it_was(course, environment):
    for number in range(4):
        hand_in(course, f"s{number}", between=f"{SLOW} + {number}")
    running = subprocess.Popen([sys.executable, "-m", "ftlab.cli.main", "grade", "lab91", "--jobs", "1"], cwd=course,
                               env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    records, deadline = course / ".ftlab/grading/records", time.monotonic() + 200
    while not list(records.glob("*.json")):
        assert time.monotonic() < deadline and running.poll() is None, running.communicate()
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    out, error = running.communicate(timeout=100)
    assert running.returncode == 130 and "interrupted" in error and "Traceback" not in error, (out, error)
    assert list(Path(environment["TMPDIR"]).glob("ftlab-*")) == []
    assert [each for each in engine.look() if str(each.folder).startswith(environment["TMPDIR"])] == []
    kept = len(list(records.glob("*.json")))
    assert 1 <= kept < 4
    code, answer = grade(course, environment)
    assert code == 0 and [row["score"] for row in answer["graded"]] == [7.0] * 4
    assert sum(row["seconds"] == 0 for row in answer["graded"]) == kept


def test_only_what_changed_is_graded_again(course, environment):
    hand_in(course, "alice")
    hand_in(course, "bob")
    assert grade(course, environment)[0] == 0
    hand_in(course, "bob", double=WRONG_DOUBLE)
    code, answer = grade(course, environment, "--csv", "marks.csv")
    assert code == 0
    assert {row["student"]: (row["unchanged"], row["score"]) for row in answer["graded"]} == {
        "alice": (True, 7.0), "bob": (False, 4.0)}
    assert "bob" in (course / "marks.csv").read_text()
    _, answer = grade(course, environment, "--student", "alice", "--again")
    assert [(row["student"], row["unchanged"]) for row in answer["graded"]] == [("alice", False)]
    source = course / "solutions" / "lab91" / NAME
    source.write_text(source.read_text().replace("check.lab91_task1(double)", "check.lab91_task1(double, number=8)"))
    _, answer = grade(course, environment)
    assert not any(row["unchanged"] for row in answer["graded"])


def test_nobody_handed_in_and_unknown_labs_are_bad_usage(course, environment):
    code, answer = grade(course, environment)
    assert code == 2 and "nothing was handed in" in answer["message"] and "ftlab collect" in answer["hint"]
