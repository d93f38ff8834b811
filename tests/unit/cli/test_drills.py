"""`ftlab drill all`: a drill that comes to no verdict is named, and the others are run all the same."""

from __future__ import annotations

import json

import pytest

from ftlab.cli import drills
from ftlab.cli.main import main
from ftlab.drill.drill import DRILLS
from ftlab.errors import WaitTimeout
from ftlab.report.report import Report


@pytest.fixture
def only_hang_fails(monkeypatch):
    def run(name, twin, arguments):
        if name == "hang":
            raise WaitTimeout("the end of the job did not come within 300 s")
        return Report(facts={"drill": name, "held": True, "repeat": f"ftlab drill {name}"}, events=[])

    monkeypatch.setattr(drills, "_run_one", run)
    monkeypatch.setattr(drills, "_impossible", lambda arguments: {"disk": "needs containers"})


def test_the_others_are_run_and_the_broken_one_is_named(only_hang_fails, capsys):
    assert main(["drill", "all", "--json"]) == 1
    said = capsys.readouterr()
    body = json.loads(said.out)
    assert body["broken"] == {"hang": "the end of the job did not come within 300 s"} and body["held"] is False
    assert [row["drill"] for row in body["drills"]] == [name for name in DRILLS if name not in ("hang", "disk")]
    assert "[hang] no verdict: the end of the job" in said.err and "[disk] left out: needs containers" in said.err


def test_a_drill_that_was_asked_for_by_name_ends_with_its_own_error(only_hang_fails, capsys):
    assert main(["drill", "hang", "--json"]) != 0
    assert "did not come within 300 s" in "".join(capsys.readouterr())
