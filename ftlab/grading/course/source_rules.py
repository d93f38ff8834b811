"""What an authored notebook must be like, so that nbgrader, git and students get along with it."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator

from nbformat import NotebookNode
from nbgrader.nbgraderformat.v3 import MetadataValidatorV3
from nbgrader.utils import is_grade, is_solution

from ftlab.errors import ConfigError
from ftlab.grading import check
from ftlab.grading.course import cells
from ftlab.grading.course.problem import Problem

_ID = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TASK_ID = re.compile(r"task(\d+)\b")
_RANDOM_ID = re.compile(r"[0-9a-f]{8}")  # what Jupyter calls a new cell
_SOLUTION = "BEGIN SOLUTION"
_MARK_SCHEME = re.compile(r"^### BEGIN MARK SCHEME$.*?^### END MARK SCHEME$", re.DOTALL | re.MULTILINE)
_META = {"nbgrader", "tags", "jupyter", "collapsed", "editable", "deletable"}


def source_problems(lab: str, name: str, notebook: NotebookNode) -> list[Problem]:
    """All that is wrong with the source of a lab; `name` is how it is called in messages."""
    found = [*_ids(name, notebook), *_metadata(name, notebook), *_outputs(name, notebook)]
    return found or [*_task_names(lab, name, notebook), *_graded(name, notebook), *_stubs(name, notebook),
                      *_questions(name, notebook)]


def graded_call(cell: NotebookNode) -> ast.Call | None:
    """The `check.labNN_taskM(...)` that a graded cell ends with."""
    try:
        body = ast.parse(cell.source).body
    except SyntaxError:
        return None
    last = body[-1].value if body and isinstance(body[-1], ast.Expr) else None
    if isinstance(last, ast.Call) and isinstance(last.func, ast.Attribute) and isinstance(last.func.value, ast.Name):
        return last if last.func.value.id == "check" else None
    return None


def _ids(name: str, notebook: NotebookNode) -> Iterator[Problem]:
    if (notebook.nbformat, notebook.nbformat_minor) < (4, 5):
        yield Problem(name, "is of a notebook format without cell ids", "save it with JupyterLab 4")
        return
    for found, count in Counter(cell.id for cell in notebook.cells).items():
        if count > 1:
            yield Problem(f"{name} {found}", f"{count} cells have this id", "give each an id of its own")
        if not _ID.fullmatch(found) or _RANDOM_ID.fullmatch(found):
            yield Problem(f"{name} {found}", "its id says nothing", "give it a readable one, such as task2-stub")
    for cell in notebook.cells:
        if cells.kind(cell) != "free" and cells.grade_id(cell) != cell.id:
            yield Problem(f"{name} {cell.id}", f"its grade_id is {cells.grade_id(cell)!r}", "make both the same")


def _metadata(name: str, notebook: NotebookNode) -> Iterator[Problem]:
    for cell in notebook.cells:
        where, meta = f"{name} {cell.id}", cell.metadata.get("nbgrader")
        extra = sorted(set(cell.metadata) - _META)
        if extra:
            yield Problem(where, f"has metadata that only makes noise: {', '.join(extra)}", "remove it")
        if meta is None:
            continue
        if {meta.get(key) for key in ("grade", "solution", "locked", "task")} <= {False, None}:
            yield Problem(where, "has nbgrader metadata that says nothing", "remove it")
            continue
        try:
            MetadataValidatorV3().validate_cell(cell)
        except Exception as error:  # jsonschema's and nbgrader's own have no common root
            yield Problem(where, f"its nbgrader metadata is not valid: {str(error).splitlines()[0]}",
                          "see docs/labs.md for the form of each kind of cell")
            continue
        if cells.kind(cell) == "check" and not meta["locked"]:
            yield Problem(where, "is graded by its result, but students may change it", "lock it")
        if cells.kind(cell) in ("check", "manual") and cells.points(cell) <= 0:
            yield Problem(where, "is graded but counts nothing", "give it points")


def _outputs(name: str, notebook: NotebookNode) -> Iterator[Problem]:
    for cell in notebook.cells:
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None):
            yield Problem(f"{name} {cell.id}", "its outputs are not stripped",
                          f"jupyter nbconvert --clear-output --inplace {name}")


def _task_names(lab: str, name: str, notebook: NotebookNode) -> Iterator[Problem]:
    known, last = check.names(), 0
    for cell in notebook.cells:
        for token in cells.TOKEN.findall(cell.source):
            if token not in known:
                yield Problem(f"{name} {cell.id}", f"there is no check.{token}", _did_you_mean(token))
            elif not token.startswith(f"{lab}_"):
                yield Problem(f"{name} {cell.id}", f"check.{token} belongs to another lab", f"write check.{lab}_...")
        number = _TASK_ID.match(cell.id)
        if number and not last <= int(number[1]) <= last + 1:
            yield Problem(f"{name} {cell.id}", f"comes after task {last}", "number the tasks in order")
        last = int(number[1]) if number else last


def _did_you_mean(token: str) -> str:
    try:
        getattr(check, token)
    except ConfigError as error:
        return error.hint
    return "correct its name"


def _graded(name: str, notebook: NotebookNode) -> Iterator[Problem]:
    """A graded cell ends with a check, counts what that check gives, and names only what the grader will know."""
    defined: set[str] = set()
    for cell in notebook.cells:
        where = f"{name} {cell.id}"
        if cells.kind(cell) != "check":
            runs = cell.cell_type == "code" and not cells.tagged(cell, cells.EXPERIMENT)  # in grading
            defined |= _names_defined(cell.source) if runs else set()
            continue
        call = graded_call(cell)
        if call is None:
            yield Problem(where, "does not end with a plain check, so anything it shows would score in full",
                          "make check.labNN_taskM(...) its last line")
            continue
        counted = _points_of(call)
        if counted is not None and counted != cells.points(cell):
            yield Problem(where, f"counts {cells.points(cell):g} points, but its check gives up to {counted:g}",
                          "make both the same (points= in the call, or in the metadata)")
        used = {node.id for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)}
        for other in sorted(used - defined - {"check"}):
            yield Problem(where, f"uses {other}, which no cell above defines that the grader runs",
                          "pass only students' parts and plain values")


def _points_of(call: ast.Call) -> float | None:
    """What a check gives at most: as the call says, else by its own default; None if that cannot be told."""
    for keyword in call.keywords:
        if keyword.arg == "points":
            try:
                return float(ast.literal_eval(keyword.value))
            except ValueError:
                return None
    assert isinstance(call.func, ast.Attribute)
    try:
        default = inspect.signature(getattr(check, call.func.attr)).parameters["points"].default
    except (ConfigError, KeyError):
        return None
    return float(default) if isinstance(default, int | float) else None


def _names_defined(source: str) -> set[str]:
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return set()
    found = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return found | {target.id for node in body if isinstance(node, ast.Assign | ast.AnnAssign)
                    for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                    if isinstance(target, ast.Name)}


def _stubs(name: str, notebook: NotebookNode) -> Iterator[Problem]:
    for cell in notebook.cells:
        if cells.kind(cell) == "stub" and cell.cell_type == "code" and _SOLUTION not in cell.source:
            yield Problem(f"{name} {cell.id}", "students would get an empty cell",
                          "put ### BEGIN SOLUTION and ### END SOLUTION around the body only")


def _questions(name: str, notebook: NotebookNode) -> Iterator[Problem]:
    """nbgrader empties a cell for a written answer: what is in it, the question too, students would not see."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and is_grade(cell) and is_solution(cell) and _SOLUTION not in cell.source:
            question = _MARK_SCHEME.sub("", cell.source).strip()
            if question:
                yield Problem(f"{name} {cell.id}", f"students would not see '{question[:40]}'",
                              "put the question into a cell of its own above, and keep only the mark scheme here")
