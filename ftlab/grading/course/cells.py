"""What the cells of a lab are for, read from nbgrader's metadata; and notebooks on disk.

nbgrader has functions for the first, but importing it takes seconds, and everybody who grades or hands in imports this.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from ftlab.errors import ConfigError

EXPERIMENT = "experiment"  # the tag of cells that run a cluster for the student's eyes; the grader leaves them out
HIDDEN = re.compile(r"BEGIN HIDDEN TESTS")
SECRETS = re.compile(r"(BEGIN|END) (SOLUTION|HIDDEN TESTS|MARK SCHEME)")
TOKEN = re.compile(r"check\.(lab\d\d_task\d+\w*)")


def read(path: Path) -> NotebookNode:
    """A notebook from a file. Raises ConfigError with the reason if it is none."""
    try:
        raw = path.read_text(encoding="utf-8")
        return parse(raw, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the notebook {path}: {error}") from None


def parse(text: str, name: str) -> NotebookNode:
    """A notebook from its JSON, in the present format. Raises ConfigError with the reason if it is none."""
    try:
        notebook: NotebookNode = nbformat.reads(text, as_version=4)
        return notebook
    except Exception as error:  # JSON, schema and version errors of nbformat have no common root
        raise ConfigError(f"{name} is no notebook: {str(error).splitlines()[0][:200] if str(error) else error!r}",
                          hint="open it in JupyterLab; if it cannot be opened there, start from a fresh copy") from None


def write(notebook: NotebookNode, path: Path) -> None:
    """A notebook to a file, the way nbgrader and JupyterLab write it."""
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def grade_id(cell: NotebookNode) -> str:
    """nbgrader's name of a cell; empty if it has none."""
    found = _meta(cell).get("grade_id", "")
    return found if isinstance(found, str) else ""


def kind(cell: NotebookNode) -> str:
    """One of: stub (students write code), check (graded by its result), manual (graded by a person), locked, free."""
    grade, solution, task, locked = (bool(_meta(cell).get(name)) for name in ("grade", "solution", "task", "locked"))
    if grade or task:
        return "manual" if solution or task or cell.cell_type != "code" else "check"
    return "stub" if solution else "locked" if locked else "free"


def points(cell: NotebookNode) -> float:
    """What a cell counts; 0 for one that is not graded."""
    return float(_meta(cell).get("points", 0)) if kind(cell) in ("check", "manual") else 0.0


def hidden(cell: NotebookNode) -> bool:
    """Whether a check says nothing to students: hidden tests in a source, a mere comment in a release."""
    code = [line for line in cell.source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return kind(cell) == "check" and (bool(HIDDEN.search(cell.source)) or not code)


def tagged(cell: NotebookNode, tag: str) -> bool:
    """Whether a cell has a tag."""
    return tag in cell.metadata.get("tags", [])


def _meta(cell: NotebookNode) -> dict[str, Any]:
    found = cell.metadata.get("nbgrader", {})
    return found if isinstance(found, dict) else {}
