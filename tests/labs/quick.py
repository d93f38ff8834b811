"""A lab's notebook run quickly: its cells in order in this process, its checks with live parts on one stage.

No kernel, no nbgrader; experiments are left out, as the grader leaves them out. The full cycle has tests of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).parents[2]
_seen: dict[tuple[str, ...], float] = {}  # marks by the sources that they depend on: most are those of the reference
_SOLUTION = re.compile(r"^([ \t]*)### BEGIN SOLUTION\n.*?### END SOLUTION\n?", re.MULTILINE | re.DOTALL)


def cells_of(lab: str) -> list[Any]:
    """The code cells of a lab's solution that the grader looks at."""
    [path] = (ROOT / "solutions" / lab).glob("*.ipynb")
    return [cell for cell in nbformat.read(path, 4).cells
            if cell.cell_type == "code" and "experiment" not in cell.metadata.get("tags", [])]


def full_marks(lab: str) -> dict[str, float]:
    """The points of each graded code cell."""
    return {cell.id: float(cell.metadata.nbgrader.points) for cell in cells_of(lab) if _graded(cell)}


def marks(lab: str, cells: Mapping[str, str] | None = None, leave_out: Collection[str] = ()) -> dict[str, float]:
    """The marks of each graded code cell, with some cells replaced; a cell that raises only ends itself."""
    space: dict[str, Any] = {"__name__": "__main__"}
    unknown = set(cells or {}) - {cell.id for cell in cells_of(lab)}
    assert not unknown, f"{lab} has no cell {unknown}"
    found: dict[str, float] = {}
    before: list[str] = []
    for cell in cells_of(lab):
        source = (cells or {}).get(cell.id, cell.source)
        if cell.id in leave_out:
            continue
        if _graded(cell):
            key = (source, *_behind(source, before))
            _seen[key] = found[cell.id] = _seen[key] if key in _seen else _value(source, space)
        else:
            before.append(source)
            try:
                exec(compile(source, f"<{cell.id}>", "exec"), space)
            except Exception as error:
                print(f"{cell.id}: {type(error).__name__}: {error}")
    return found


def untouched(lab: str) -> dict[str, str]:
    """The stubs as students get them."""
    return {cell.id: _SOLUTION.sub(r"\1raise NotImplementedError()\n", cell.source) for cell in cells_of(lab)
            if _SOLUTION.search(cell.source)}


def _behind(source: str, before: list[str]) -> list[str]:
    """The sources of the cells that a cell's names come from, and theirs."""
    wanted, behind = _names(source, ast.Load), list[str]()
    for each in reversed(before):
        if wanted & _names(each, ast.Store):
            wanted |= _names(each, ast.Load)
            behind.append(each)
    return behind


def _names(source: str, context: type[ast.expr_context]) -> set[str]:
    """Names that a cell uses, or makes at its top level."""
    if context is ast.Load:
        return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    made: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        made |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return made


def _graded(cell: Any) -> bool:
    return bool(cell.metadata.get("nbgrader", {}).get("grade"))


def _value(source: str, space: dict[str, Any]) -> float:
    """The value of a graded cell, which must be a plain float; 0 if it raises."""
    *before, last = ast.parse(source).body
    assert isinstance(last, ast.Expr), "the last line of a graded cell is its marks"
    try:
        exec(compile(ast.Module(before, []), "<check>", "exec"), space)
        value = eval(compile(ast.Expression(last.value), "<check>", "eval"), space)
    except NameError as error:
        print(error)
        return 0.0
    assert type(value) is float, f"{source!r} gave {value!r}"
    return value
