"""The stop button in a real kernel, for one check of each kind; `python -m tests.labs.interrupts` tries them all."""

from __future__ import annotations

import random
from collections.abc import Iterator

import psutil
import pytest

from tests.labs.interrupts import Check, Figures, Notebook, begin, checks_of, notebook, stop_once
from tests.limits import SOON_S

KINDS = {  # what the child does when it is stopped, and the scenario that is looked at afterwards
    "lab00": [("task1-check", "", "a function is called")],
    "lab01": [("task2-check", "during", "a save is traced, and images are loaded"),
              ("task5-check", "load", "ranks of a group wait for each other")],
    "lab02": [("task4-check", "", "heartbeats are replayed")],  # which is a function that is called
    "lab03": [("task4-check", "", "a cluster trains below the child"),
              ("task5-check", "without trouble", "a loop trains and is killed")],
}


@pytest.fixture(scope="module")
def made() -> Iterator[Notebook]:
    with notebook() as made:
        yield made
        made.close()
        assert made.left() == [], "after the kernel's end"


@pytest.mark.parametrize("lab", [pytest.param(lab, marks=pytest.mark.full) if lab == "lab02" else lab for lab in KINDS])
def test_a_check_that_was_stopped_is_right_the_next_time_and_leaves_nothing(made, lab):
    begin(made, lab)
    draw, known = random.Random(13), {check.cell: check for check in checks_of(lab)}
    for cell, only, what in KINDS[lab]:
        check, figures = known[cell], Figures()
        moments = [(draw.uniform(0.0, 0.3), None), (draw.uniform(0.5, 3.0), draw.uniform(0.0, 0.2))]
        for moment, again in moments if lab == "lab00" else moments[1:]:  # a server starts in the same way for all
            stop_once(made, check, moment, figures, again)
        while not figures.stopped and figures.late < 6:  # on a quick machine the check had ended before
            stop_once(made, check, moment / 2 ** figures.late, figures, again)
        assert figures.problems == [] and figures.stopped, f"{what}: {figures}, {figures.problems}"
        assert max(figures.returns) < 5.0, what
        judge(made, check, only, what)


def judge(made: Notebook, check: Check, only: str, what: str) -> None:
    """The reference passes, and a wrong solution gets no more than it should; the cluster is left to the loop."""
    if "a cluster" in what:
        return
    source = check.source.replace(")", f", only={only!r})") if only else check.source
    found = made.run(source)
    assert found.marks and "FAIL" not in found.printed, (what, found)
    if check.wrong and not only:
        made.run(check.wrong)
        found = made.run(source)
        made.run(check.right)
        assert "FAIL" in found.printed and found.marks is not None and found.marks < check.points, (what, found)


def test_the_cells_after_a_stopped_check_are_not_run(made):
    made.run("from ftlab.grading import check\nimport time\ndef read_report(report): time.sleep(60)")
    asked = made.start("check.lab00_task1(read_report)")
    behind = made.start("print('must not run')")
    made.stop_when_busy()
    cell = made.wait(asked)
    assert cell.error == "Stopped" and cell.shown == [
        "lab00_task1 was stopped: nothing was marked. Run the cell again when you are ready."]
    assert made.wait(behind).printed == ""


def test_a_kernel_that_is_killed_in_a_check_leaves_nothing():
    with notebook() as made:
        made.run("from ftlab.grading import check\nimport time\ndef read_report(report): time.sleep(60)")
        made.start("check.lab00_task1(read_report)")
        below = made.stop_when_busy(kill=True)
        assert below and made.left() == [] and psutil.wait_procs(below, timeout=SOON_S)[1] == []
