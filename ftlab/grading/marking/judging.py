"""A graded cell, run in the grader's own process: the instructor's source, with the student's parts as bytes.

The checks run the parts in the sandboxed stage; nothing of the student is unpickled here. What the check prints and
the float it ends with become the cell's outputs, from which nbgrader takes the marks.
"""

from __future__ import annotations

import ast
import contextlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_output

from ftlab.errors import FtlabError
from ftlab.grading import check
from ftlab.grading.marking.sheet import Step
from ftlab.grading.stage import Answer, Stage, using

_MAX_PRINTED = 64 << 10


@dataclass(frozen=True)
class Judged:
    """What a graded cell gave."""

    points: float
    outputs: list[NotebookNode]
    trouble: str = ""  # why an instructor should look at it: the check itself failed, or the sandbox broke down


def judge(step: Step, answers: dict[str, Answer], stage: Callable[[], Stage]) -> Judged:
    """Run one graded cell; it is tried again in a new sandbox if the first one breaks down under it."""
    for last in (False, True):
        open_stage = stage()
        judged = _judge(step, answers, open_stage)
        if not judged.trouble or open_stage.open or last:
            break
    return judged


def _judge(step: Step, answers: dict[str, Answer], stage: Stage) -> Judged:
    printed, errors = io.StringIO(), io.StringIO()
    try:
        with using(stage), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            value = run(step.source, step.id, {"check": check, **{name: answers[name] for name in step.names}})
        points, trouble = _points(value, step)
    except AssertionError as error:
        return Judged(0.0, [*_stream(printed), _failed(error)])
    except FtlabError as error:
        down = "" if stage.open else "the sandbox broke down: "
        return Judged(0.0, [*_stream(printed), _failed(error)], f"{step.id}: {down}{_quoted(error, error.message)}")
    except Exception as error:
        return Judged(0.0, [*_stream(printed), _failed(error)], f"{step.id}: {_quoted(error, str(error))}")
    result = [new_output("execute_result", data={"text/plain": repr(points)}, execution_count=None)]
    return Judged(points, [*_stream(printed), *result], trouble)


def run(source: str, name: str, space: dict[str, Any]) -> Any:
    """Run a cell of the instructor's; the value of its last line if that is an expression, else None."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), f"<{name}>", "exec"), space)
    return eval(compile(ast.Expression(last.value), f"<{name}>", "eval"), space) if isinstance(last, ast.Expr) else None


def _points(value: Any, step: Step) -> tuple[float, str]:
    """The points that a cell gave, within its bounds. None is a cell of asserts that all held."""
    if value is None:
        return step.points, ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 0.0, f"{step.id}: it gave {value!r}, which is no number of points"
    inside = min(max(float(value), 0.0), step.points)
    return inside, "" if inside == value else f"{step.id}: it gave {value:g} points of {step.points:g}"


def _quoted(error: BaseException, words: str) -> str:
    """What a check that failed said. Words of the student may be among it, and must not be taken for ours."""
    return f"the check ended with {type(error).__name__}; it says, and a student's code may have worded it: " + \
        repr("".join(each if each.isprintable() else " " for each in words))[:500]


def _stream(printed: io.StringIO) -> list[NotebookNode]:
    text = printed.getvalue()[:_MAX_PRINTED]
    return [new_output("stream", name="stdout", text=text)] if text else []


def _failed(error: BaseException) -> NotebookNode:
    made: NotebookNode = new_output("error", ename=type(error).__name__, evalue=str(error)[:1000], traceback=[])
    return made
