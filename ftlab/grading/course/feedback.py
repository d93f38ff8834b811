"""What students see of their graded work: how each cell went, never what was hidden in it."""

from __future__ import annotations

import re
from typing import Any

from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor

from ftlab.grading.course import cells

_REGIONS = ("HIDDEN TESTS", "MARK SCHEME", "SOLUTION")
_NOTE = "# The tests of this cell are hidden; its marks count as shown."
_VERDICT = re.compile(r"lab\d\d_task\d+\w*: .*points|  (ok  |FAIL)  ")  # of a card: not what it expected, nor the call


class HideTests(NbGraderPreprocessor):
    """Hidden tests and mark schemes are taken out; of what a hidden check said, only how each scenario went."""

    def preprocess_cell(self, cell: NotebookNode, resources: Any, index: int) -> tuple[NotebookNode, Any]:
        """One cell."""
        if cells.kind(cell) not in ("check", "manual"):
            return cell, resources
        secret = cells.kind(cell) == "check" and cells.hidden(cell)
        shown = without_regions(cell.source)
        cell.source = "\n".join(part for part in (shown, _NOTE) if part.strip()) if secret else shown
        if secret:
            cell.outputs = [_told(each) for each in cell.outputs if each.output_type in ("error", "stream")]
        return cell, resources


class ShortTracebacks(NbGraderPreprocessor):
    """Tracebacks quote the source around them, hidden tests too: an error is told as `name: message`."""

    def preprocess_cell(self, cell: NotebookNode, resources: Any, index: int) -> tuple[NotebookNode, Any]:
        """One cell."""
        if cell.cell_type == "code":
            for output in cell.outputs:
                if output.output_type == "error":
                    output.traceback = [f"{output.ename}: {output.evalue}" if output.evalue else output.ename]
        return cell, resources


def without_regions(source: str) -> str:
    """A cell's text without what stands between markers; one that is never closed takes all that follows with it."""
    kept, inside = [], ""
    for line in source.splitlines():
        if not inside:
            inside = next((name for name in _REGIONS if f"BEGIN {name}" in line), "")
            if not inside:
                kept.append(line)
        elif f"END {inside}" in line:
            inside = ""
    return "\n".join(kept)


def _told(output: NotebookNode) -> NotebookNode:
    """Of a card its verdicts, of an error only that there was one: the rest may quote the test."""
    if output.output_type == "error":
        output.evalue = ""
    else:
        output.text = "".join(line for line in output.text.splitlines(keepends=True) if _VERDICT.match(line))
    return output
