"""A notebook from a fresh kernel, cell by cell; one that fails does not stop the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbgrader.utils import determine_grade

from ftlab.errors import JobError
from ftlab.grading.course import cells
from ftlab.grading.course.kernel import Kernel

CELL_S = 600.0  # the longest that one cell may take


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How one code cell went."""

    cell: str  # its id
    number: int  # counting code cells from 1
    seconds: float
    error: str = ""  # "ValueError: ..." or what else went wrong
    points: float = 0.0  # what it counts at most; 0 if it is not graded by its result
    earned: float = 0.0


def run(notebook: NotebookNode, folder: Path, told: Callable[[Ran, int], None], *, cell_s: float = CELL_S,
        skip: Callable[[NotebookNode], bool] = lambda cell: False) -> list[Ran]:
    """Execute a notebook in place, in a folder; `told` hears of each cell and how many there are.

    When the kernel dies, the cells that are left are not run, and say so.
    """
    todo = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip() and not skip(cell)]
    done: list[Ran] = []
    dead = ""
    with Kernel(folder) as kernel:
        for number, cell in enumerate(todo, 1):
            begin, trouble = time.monotonic(), f"not run: {dead}" if dead else ""
            cell.outputs, cell.execution_count = [], None if dead else number
            if not dead:
                try:
                    cell.outputs, trouble = kernel.run(cell.source, cell_s)
                except JobError as error:
                    dead = trouble = error.message
            done.append(_ran(cell, number, time.monotonic() - begin, trouble))
            told(done[-1], len(todo))
    return done


def marks(cell: NotebookNode) -> float:
    """What nbgrader gives for a check's outputs: nothing if there was an error or anything on stderr."""
    try:
        earned, _ = determine_grade(cell)
    except (ValueError, KeyError):  # a result above the maximum, or one that shows no text
        return 0.0
    return float(earned or 0.0)


def _ran(cell: NotebookNode, number: int, seconds: float, trouble: str) -> Ran:
    if trouble:
        cell.outputs.append(new_output("error", ename="Stopped", evalue=trouble, traceback=[trouble]))
    raised = [f"{each.ename}: {each.evalue}".rstrip(": ") for each in cell.outputs if each.output_type == "error"]
    error = trouble or (raised[-1].splitlines()[0] if raised else "")
    silent = cells.hidden(cell) and not cells.HIDDEN.search(cell.source)  # in a release: nothing is left to run
    if cells.kind(cell) != "check" or silent:
        return Ran(cell=cell.id, number=number, seconds=seconds, error=error)
    return Ran(cell=cell.id, number=number, seconds=seconds, error=error or _noise(cell), points=cells.points(cell),
               earned=marks(cell))


def _noise(cell: NotebookNode) -> str:
    """A check that writes to stderr scores nothing; say why."""
    loud = [each.text for each in cell.outputs if each.output_type == "stream" and each.name == "stderr"]
    return f"wrote to stderr: {loud[0].strip().splitlines()[-1][:120]}" if loud and loud[0].strip() else ""
