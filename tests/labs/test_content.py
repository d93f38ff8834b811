"""The notebooks, as nbval runs them: solutions pass everywhere, releases fail where a student has to work."""

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

ROOT = Path(__file__).parents[2]
COURSE = Course(ROOT)
LABS = COURSE.labs()
CELL_S = 300  # a deadline, generous; the labs are quicker

Failed = dict[str, str]  # the cells that failed → what nbval said


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Future[Failed]]]:
    """Each lab, solved and released, under nbval: two at a time, all started when the first is asked for."""
    place = tmp_path_factory.mktemp("nbval")
    started: list[subprocess.Popen] = []
    pool = ThreadPoolExecutor(2)
    yield {(lab, kind): pool.submit(nbval, folder / lab, place / kind / lab, started)
           for lab in LABS for kind, folder in (("solved", COURSE.sources), ("released", COURSE.releases))}
    pool.shutdown(wait=False, cancel_futures=True)
    for each in started:
        each.send_signal(signal.SIGINT)  # those that are done do not mind
    pool.shutdown()


def nbval(folder: Path, place: Path, started: list[subprocess.Popen]) -> Failed:
    """Run a lab's notebook in a copy of its folder; ids of the cells that failed."""
    shutil.copytree(folder, place, ignore=shutil.ignore_patterns(FILE, ".ipynb_checkpoints"))
    [notebook] = place.glob("*.ipynb")
    (place / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax",
               f"--nbval-cell-timeout={CELL_S}", f"--junitxml={place / 'nbval.xml'}", notebook.name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    running = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env=environment)
    started.append(running)
    said, _ = running.communicate(timeout=900)
    assert running.returncode in (0, 1), said[-5000:]
    code = [cell for cell in cells.read(notebook).cells if cell.cell_type == "code"]
    cases = list(xml.parse(place / "nbval.xml").getroot().iter("testcase"))
    assert len(cases) == len(code), f"nbval ran {len(cases)} of {len(code)} cells"
    return {cell.id: "".join(problem.itertext())[-1500:] for cell, case in zip(code, cases, strict=True)
            for problem in [*case.findall("failure"), *case.findall("error")]}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lab", LABS)
def test_every_cell_of_a_solution_runs(runs, lab):
    failed = runs[lab, "solved"].result()
    assert not failed, "\n".join(f"{name}: {what}" for name, what in failed.items())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lab", LABS)
def test_an_untouched_lab_fails_where_a_student_has_to_work_and_nowhere_else(runs, lab):
    failed = runs[lab, "released"].result()
    [notebook] = (COURSE.releases / lab).glob("*.ipynb")
    waiting = waits_for_students(cells.read(notebook))
    others = {name: what for name, what in failed.items() if name not in waiting}
    assert not others, "\n".join(f"{name}: {what}" for name, what in others.items())
    assert failed, "nothing in this lab needs a student"


def waits_for_students(notebook: NotebookNode) -> set[str]:
    """The code cells that use what a student has to write: stubs, checks, and whatever stands on either."""
    found, unsure = set(), set[str]()
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
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
