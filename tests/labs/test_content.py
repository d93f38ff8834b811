"""The notebooks, as nbval runs them: solutions pass everywhere, releases fail where a student has to work.

The checks of a solution must give full marks there. A release differs from its solution in the stubs only, so what is
not about them is run once; `make test-all` has nbval run the releases, too.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from nbformat import NotebookNode

from ftlab.grading.course import cells
from ftlab.grading.course.audit import audit
from ftlab.grading.course.course import Course
from ftlab.grading.course.record import FILE
from tests.limits import BATCH_S, START_S

ROOT = Path(__file__).parents[2]
COURSE = Course(ROOT)
LABS = COURSE.labs()

Failed = dict[str, str]  # the cells that failed → what nbval said


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
         ) -> Iterator[dict[tuple[str, str], Future[Failed]]]:
    """Each lab, solved and released, under nbval: two at a time, all started when the first is asked for."""
    place = tmp_path_factory.mktemp("nbval")
    kinds = [("solved", COURSE.sources), ("released", COURSE.releases)][:2 if request.config.getoption("--full") else 1]
    started: list[subprocess.Popen] = []
    pool = ThreadPoolExecutor(2)
    yield {(lab, kind): pool.submit(nbval, folder / lab, place / kind / lab, started)
           for lab in LABS for kind, folder in kinds}
    pool.shutdown(wait=False, cancel_futures=True)
    for each in started:
        each.send_signal(signal.SIGINT)  # those that are done do not mind
    pool.shutdown()


def nbval(folder: Path, place: Path, started: list[subprocess.Popen]) -> Failed:
    """Run a lab's notebook in a copy of its folder; ids of the cells that failed."""
    shutil.copytree(folder, place, ignore=shutil.ignore_patterns(FILE, ".ipynb_checkpoints"))
    [notebook] = place.glob("*.ipynb")
    if folder.parent == COURSE.sources:
        ask_for_full_marks(notebook)
    (place / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax",
               f"--nbval-cell-timeout={START_S:.0f}", f"--junitxml={place / 'nbval.xml'}", notebook.name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    running = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env=environment)
    started.append(running)
    said, _ = running.communicate(timeout=BATCH_S)
    assert running.returncode in (0, 1), said[-5000:]
    code = [cell for cell in cells.read(notebook).cells if cell.cell_type == "code"]
    cases = list(xml.parse(place / "nbval.xml").getroot().iter("testcase"))
    assert len(cases) == len(code), f"nbval ran {len(cases)} of {len(code)} cells"
    return {cell.id: "".join(problem.itertext())[-1500:] for cell, case in zip(code, cases, strict=True)
            for problem in [*case.findall("failure"), *case.findall("error")]}


def ask_for_full_marks(file: Path) -> None:
    """Have each check of a solution fail unless it gives all its points."""
    notebook = cells.read(file)
    for cell in notebook.cells:
        if cells.kind(cell) == "check":
            *before, last = ast.parse(cell.source).body
            cell.source = "\n".join([*map(ast.unparse, before), f"assert {ast.unparse(last)} == {cells.points(cell)}"])
    cells.write(notebook, file)


@pytest.mark.parametrize("lab", LABS)
def test_every_cell_of_a_solution_runs_and_every_check_gives_full_marks(runs, lab):
    failed = runs[lab, "solved"].result()
    assert not failed, "\n".join(f"{name}: {what}" for name, what in failed.items())


@pytest.mark.parametrize("lab", LABS)
def test_an_untouched_lab_fails_where_a_student_has_to_work_and_nowhere_else(lab, monkeypatch, tmp_path):
    """Cells that are not about clusters and checks are run here; all but stubs stand in the solution, which was run."""
    monkeypatch.chdir(tmp_path)
    released, solved = released_cells(lab), {cell.id: cell.source for cell in cells.read(COURSE.notebook(lab)).cells}
    stubs = [cell for cell in released if cells.kind(cell) == "stub"]
    assert stubs and all("NotImplementedError" in cell.source for cell in stubs)
    for cell in released:
        assert cell in stubs or cells.hidden(cell) or cell.source == solved[cell.id], cell.id
    space: dict[str, object] = {"__name__": "__main__"}
    failed = {cell.id: error for cell in released
              if not cells.tagged(cell, cells.EXPERIMENT) and cells.kind(cell) != "check"
              and (error := run_here(cell, space))}
    assert set(failed) <= waits_for_students(released), failed


def run_here(cell: NotebookNode, space: dict[str, object]) -> str:
    """Run a cell in this process; what it raised."""
    try:
        exec(compile(cell.source, f"<{cell.id}>", "exec"), space)
    except Exception as error:
        return repr(error)
    return ""


def released_cells(lab: str) -> list[NotebookNode]:
    """The code cells as students get them."""
    [notebook] = (COURSE.releases / lab).glob("*.ipynb")
    return [cell for cell in cells.read(notebook).cells if cell.cell_type == "code"]


@pytest.mark.full  # starts the clusters of all labs a second time, with the same cells
@pytest.mark.parametrize("lab", LABS)
def test_nbval_finds_that_an_untouched_lab_fails_where_a_student_has_to_work_and_nowhere_else(runs, lab):
    failed, waiting = runs[lab, "released"].result(), waits_for_students(released_cells(lab))
    others = {name: what for name, what in failed.items() if name not in waiting}
    assert not others, "\n".join(f"{name}: {what}" for name, what in others.items())
    assert failed, "nothing in this lab needs a student"


def waits_for_students(released: list[NotebookNode]) -> set[str]:
    """The code cells that use what a student has to write: stubs, checks, and whatever stands on either."""
    found, unsure = set(), set[str]()
    for cell in released:
        used, made = names(cell.source)
        if cells.kind(cell) in ("stub", "check") or used & unsure:
            found.add(cell.id)
            unsure |= made
    return found


def names(source: str) -> tuple[set[str], set[str]]:
    """The names that a cell reads, and those that it gives a value to."""
    python = [line for line in source.splitlines() if not line.startswith(("%", "!"))]
    nodes = list(ast.walk(ast.parse("\n".join(python))))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return read, made | {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_the_labs_are_in_order():
    problems = audit(COURSE, LABS)
    assert not problems, "\n".join(map(str, problems))
