"""Lab 01's checks: the reference gets full marks, the untouched lab none, and each wrong solution what it should."""

from __future__ import annotations

import pytest

from ftlab.errors import FaultUnavailable
from ftlab.grading import check
from ftlab.grading.lab01 import checks, crashes
from ftlab.grading.stage import Answer, Stage, using
from tests.labs import quick
from tests.labs.wrong import cases
from tests.labs.wrong.lab01 import WRONG

QUICK = ("forgotten optimizer", "no fsync", "no directory fsync", "off-by-one retention", "swallows a damaged file",
         "forgotten RNG", "all ranks write", "the others wait for ever")
ALSO = {"no fsync": ("task3",), "forgotten optimizer": ("task2", "task4")}  # later tasks that stand on the wrong one


@pytest.fixture(scope="module", autouse=True)
def stage():
    with Stage() as stage, using(stage):
        yield stage


def part(name, cells=None):
    """A part of the reference, or of a wrong solution."""
    space = {"__name__": "__main__"}
    for cell in quick.cells_of("lab01"):
        if not cell.metadata.get("nbgrader", {}).get("grade"):
            exec((cells or {}).get(cell.id, cell.source), space)
    return space[name]


@pytest.mark.full  # nbval asks the same of the notebook (test_content), and the sandbox grades it (test_cycle)
def test_the_reference_gets_full_marks():
    full = quick.full_marks("lab01")
    assert quick.marks("lab01") == full and len(full) == 10


def test_the_untouched_lab_gets_none():
    assert quick.marks("lab01", quick.untouched("lab01")) == dict.fromkeys(quick.full_marks("lab01"), 0.0)


@pytest.mark.parametrize("name", cases(WRONG, QUICK))
def test_a_wrong_solution_loses_exactly_the_marks_that_it_should(name, monkeypatch):
    monkeypatch.setattr(checks, "_PATIENCE_S", 12.0)  # all that wait longer wait for ever
    monkeypatch.setattr(checks, "_LESS_S", 6.0)
    wrong, full = WRONG[name], quick.full_marks("lab01")
    assert wrong.points and all(wrong.points[cell] < full[cell] for cell in wrong.points)
    tasks = {cell.split("-")[0] for cell in wrong.cells} | set(ALSO.get(name, ()))
    skipped = {cell: str(full[cell]) for cell in full
               if cell not in wrong.points and cell.split("-")[0] not in tasks}
    assert quick.marks("lab01", {**wrong.cells, **skipped}) == {**full, **wrong.points}


def test_where_crashes_cannot_be_tried_the_order_of_calls_is_looked_at(monkeypatch, capsys):
    def refuse(*plays, **more):
        raise FaultUnavailable("this is no Linux")

    monkeypatch.setattr(crashes, "check_crashes", refuse)
    assert checks.task2(part("SafeManager")) == 4.0
    assert "cannot be tried on this machine (this is no Linux)" in capsys.readouterr().out
    assert checks.task2(part("SafeManager", WRONG["no fsync"].cells)) == 2.75
    assert checks.task2(part("SafeManager", WRONG["no directory fsync"].cells)) == 2.75
    assert checks.task3(part("TidyManager"), only="crash") == 0.0  # nothing was looked at
    assert checks.task3(part("TidyManager")) == 3.5


def test_a_failure_says_what_was_expected_where_to_look_and_how_to_repeat_it(capfd):
    assert check.lab01_task2(part("SafeManager", WRONG["no directory fsync"].cells), only="after") == 0.0
    out, err = capfd.readouterr()
    for words in ("FAIL  the machine dies when save_checkpoint has just returned", "expected:", "look:",
                  "os.fsync the directory", "check.lab01_task2(SafeManager, only='after')", "cost  seconds"):
        assert words in out
    assert not err


def test_a_part_that_is_not_there_gets_nothing_and_is_named(capsys):
    assert check.lab01_task4(Answer("ExactManager", absent="its cell raised NameError"), part("Batches")) == 0.0
    assert "ExactManager: its cell raised NameError" in capsys.readouterr().out


def test_a_manager_that_never_returns_costs_one_scenario_of_waiting(monkeypatch, capsys):
    class Endless(part("SavingManager")):
        def load_checkpoint(self, model, optimizer, checkpoint_path=None):
            while True:
                pass

    monkeypatch.setattr("ftlab.grading.lab01.trial.Trial.play.__kwdefaults__", {"seconds": 2.0, "own": True})
    assert checks.task1(Endless) == 0.0
    assert "did not end" in (out := capsys.readouterr().out) and out.count("not tried") == 3
