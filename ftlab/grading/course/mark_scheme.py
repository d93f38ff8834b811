"""The mark scheme of a written answer, shown to whoever marks it in nbgrader's formgrader, and to nobody else.

A release takes mark schemes out, and a submission has the student's text in their place. So they are put behind that
text from the source, for the page only: neither the graded notebook nor the feedback ever holds one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbconvert.preprocessors import Preprocessor
from nbformat import NotebookNode

from ftlab.errors import ConfigError
from ftlab.grading.course import cells
from ftlab.grading.course.course import Course

_BEGIN, _END = "BEGIN MARK SCHEME", "END MARK SCHEME"


class ShowMarkScheme(Preprocessor):
    """Behind each written answer what a full answer says; on pages of the formgrader only."""

    enabled = True

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """The whole notebook; `submission_id` is what the formgrader, and nothing else, gives to its page."""
        if "submission_id" not in resources:
            return nb, resources
        try:
            course = Course.find(Path(resources["metadata"]["path"]))
            source = cells.read(course.notebook(str(resources["assignment_id"])))
        except (ConfigError, KeyError, OSError) as error:
            self.log.warning("no mark schemes: %s", error)
            return nb, resources
        schemes = {cells.grade_id(cell): scheme_of(cell.source) for cell in source.cells}
        for cell in nb.cells:
            if cells.kind(cell) == "manual" and schemes.get(cells.grade_id(cell)):
                scheme = "\n".join(f"> {line}" for line in schemes[cells.grade_id(cell)].splitlines())
                cell.source = f"{cell.source}\n\n---\n\n> **Mark scheme** (students do not see this)\n>\n{scheme}"
        return nb, resources


def scheme_of(source: str) -> str:
    """What stands between the markers of a cell."""
    kept, inside = [], False
    for line in source.splitlines():
        if _BEGIN in line or _END in line:
            inside = _BEGIN in line
        elif inside:
            kept.append(line)
    return "\n".join(kept).strip()
