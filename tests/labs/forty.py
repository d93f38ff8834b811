"""Many submissions of lab 01, to measure: `python -m tests.labs.forty FOLDER 40`, then `ftlab grade lab01` in FOLDER.

References with small differences, and the wrong solutions among them; `expected.json` says what each should get.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from pathlib import Path

import nbformat

from ftlab.grading.course.course import Course
from ftlab.grading.course.release import generate
from tests.labs.wrong.lab01 import WRONG

ROOT = Path(__file__).parents[2]


def build(root: Path, number: int) -> dict[str, float]:
    """A course with so many submissions; the automatic points of each."""
    (root / "solutions").mkdir(parents=True)
    shutil.copy(ROOT / "nbgrader_config.py", root)
    shutil.copytree(ROOT / "solutions" / "lab01", root / "solutions" / "lab01")
    course = Course(root)
    generate(course, "lab01", root / "release")
    release = nbformat.read(root / "release" / "lab01" / course.notebook("lab01").name, 4)
    answers = {cell.id: cell.source for cell in nbformat.read(course.notebook("lab01"), 4).cells}
    full = {cell.id: float(cell.metadata.nbgrader.points) for cell in release.cells
            if cell.metadata.get("nbgrader", {}).get("grade") and cell.cell_type == "code"}
    wrong, expected = iter(WRONG.items()), {}
    for student in range(number):
        title, changed = next(wrong, ("reference", None)) if student % 5 in (1, 3) else ("reference", None)
        name = f"s{student:02d}-{title.replace(' ', '-')}"
        notebook = copy.deepcopy(release)
        for cell in notebook.cells:
            if cell.id.endswith("-stub"):
                source = changed.cells.get(cell.id) if changed else None
                cell.source = f"{source or answers[cell.id]}\n# by student {student}"
        folder = root / "submitted" / name / "lab01"
        folder.mkdir(parents=True)
        nbformat.write(notebook, folder / course.notebook("lab01").name)
        expected[name] = sum({**full, **(changed.points if changed else {})}.values())
    (root / "expected.json").write_text(json.dumps(expected))
    return expected


if __name__ == "__main__":
    build(Path(sys.argv[1]).absolute(), int(sys.argv[2]))
