"""The grader's end of the play: has the cells of a submission run in the sandbox, and takes in what they told.

A cell that cannot be interrupted, that ends its process, or that brings the sandbox down costs itself: the rest is run
again without it, and what was told before stands where there is nothing newer. Nothing that is told is believed; types,
sizes and pictures are looked at before they reach a notebook.
"""

from __future__ import annotations

import ast
import base64
import binascii
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_output

from ftlab.grading.marking.play import MAX_PART, MAX_PICTURE, MAX_PICTURES, MAX_TEXT, play_cells
from ftlab.grading.marking.sheet import RECEIPTS, Sheet, Step
from ftlab.grading.stage import Answer, Outcome, Play, Stage

_ATTEMPTS = 4  # so many cells may end the process, or hang beyond rescue
_GRACE_S = 10.0  # for a cell beyond its own deadline, before its process is killed
_PNG = b"\x89PNG\r\n\x1a\n"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass
class Played:
    """What came of a submission's cells."""

    outputs: dict[int, list[NotebookNode]] = field(default_factory=dict)  # by the cell's index
    errors: dict[int, str] = field(default_factory=dict)  # "NameError: ...", by the cell's index
    answers: dict[int, dict[str, Answer]] = field(default_factory=dict)  # by the graded cell's index
    notes: list[str] = field(default_factory=list)


def play_notebook(stage: Callable[[], Stage], sheet: Sheet) -> Played:
    """Run the student's cells; `stage` gives the sandboxed stage, a new one if the last has broken down."""
    skipped: dict[int, str] = {}
    deadline = time.monotonic() + 2 * sheet.notebook_s
    played, before = Played(), list[Played]()
    for _ in range(_ATTEMPTS):
        played = Played()
        before.append(played)
        told, end = _perform(stage(), sheet, skipped, max(1.0, deadline - time.monotonic()))
        begun = _take_in(played, told, {step.index for step in sheet.steps} - set(skipped))
        if begun is None or time.monotonic() > deadline:
            break
        skipped[begun] = _how(end, sheet)
    _fill_in(played, reversed(before))
    for index, reason in skipped.items():
        played.outputs[index] = [new_output("error", ename="CellEnded", evalue=reason, traceback=[])]
        played.errors[index] = reason
        played.notes.append(f"the cell {_id(sheet, index)[:80]!r}: {reason}")
    _explain_absent(played, sheet)
    return played


def _fill_in(played: Played, before: Iterable[Played]) -> None:
    """What an earlier attempt told, where the last one did not come so far."""
    for earlier in before:
        for index, outputs in earlier.outputs.items():
            if index not in played.outputs:
                played.outputs[index] = outputs
                played.errors |= {index: earlier.errors[index]} if index in earlier.errors else {}
        for index, answers in earlier.answers.items():
            played.answers[index] = {**answers, **played.answers.get(index, {})}


def _perform(stage: Stage, sheet: Sheet, skipped: dict[int, str], left: float) -> tuple[list[dict[str, Any]], Outcome]:
    folder = stage.new_folder("notebook")
    if sheet.files:
        _copy(Path(sheet.files), folder)
        stage.hand_over(folder)
    steps: list[dict[str, Any]] = [{"index": step.index, "names": list(step.names)} if step.graded else
                                   {"index": step.index, "code": step.source}
                                   for step in sheet.steps if step.index not in skipped]
    play = Play.of(play_cells, steps=steps, cell_s=sheet.cell_s, folder=str(folder))
    return stage.hear(play, min(sheet.notebook_s, left), sheet.cell_s + _GRACE_S)


def _take_in(played: Played, told: list[dict[str, Any]], expected: set[int]) -> int | None:
    """Note what was told; the cell that was begun last, unless all is done, which is only so if all was told of."""
    begun = -1
    for line in told:
        if line.get("done") is True and expected <= {*played.outputs, *played.answers}:
            return None
        if isinstance(line.get("begun"), int):
            begun = line["begun"]
        elif isinstance(line.get("cell"), int):
            played.outputs[line["cell"]] = outputs_of(line)
            if error := _error(line):
                played.errors[line["cell"]] = f"{error[0]}: {error[1]}"
        elif isinstance(line.get("parts"), int) and isinstance(line.get("found"), dict):
            played.answers.setdefault(line["parts"], {}).update(
                {str(name): _answer(str(name), part) for name, part in line["found"].items()})
    return begun


def outputs_of(line: dict[str, Any]) -> list[NotebookNode]:
    """The outputs of a cell as a notebook holds them: text and pictures, nothing that a browser would run."""
    found = [new_output("stream", name=name, text=text) for name in ("stdout", "stderr") if (text := _text(line, name))]
    if shown := _text(line, "shown"):
        found.append(new_output("display_data", data={"text/plain": shown}))
    found += [new_output("display_data", data={"image/png": picture}) for picture in _pictures(line)]
    if result := _text(line, "result"):
        found.append(new_output("execute_result", data={"text/plain": result}, execution_count=None))
    if error := _error(line):
        found.append(new_output("error", ename=error[0], evalue=error[1], traceback=error[2].splitlines()))
    return found


def _text(line: dict[str, Any], name: str) -> str:
    text = line.get(name)
    return _ESCAPES.sub("", text[:MAX_TEXT + 200]) if isinstance(text, str) else ""


def _error(line: dict[str, Any]) -> tuple[str, str, str] | None:
    error = line.get("error")
    if not isinstance(error, dict) or not error:
        return None
    return _text(error, "ename")[:100] or "Error", _text(error, "evalue")[:1000], _text(error, "traceback")


def _pictures(line: dict[str, Any]) -> list[str]:
    """PNG by its first bytes, and coded anew: what stands in a page is ours to the letter."""
    found = []
    listed = line.get("pictures")
    for each in listed[:MAX_PICTURES] if isinstance(listed, list) else []:
        try:
            raw = base64.b64decode(each, validate=True) if isinstance(each, str) else b""
        except (binascii.Error, ValueError):
            continue
        if raw.startswith(_PNG) and len(raw) <= MAX_PICTURE:
            found.append(base64.b64encode(raw).decode())
    return found


def _answer(name: str, part: Any) -> Answer:
    if not isinstance(part, dict) or not isinstance(part.get("raw"), str):
        reason = part.get("absent") if isinstance(part, dict) else None
        return Answer(name, absent=reason[:1000] if isinstance(reason, str) else f"{name} could not be read")
    try:
        raw = base64.b64decode(part["raw"], validate=True)
    except (binascii.Error, ValueError):
        return Answer(name, absent=f"{name} could not be read")
    return Answer(name, raw) if 0 < len(raw) <= MAX_PART else Answer(name, absent=f"{name} is too large")


def _explain_absent(played: Played, sheet: Sheet) -> None:
    """Every part that a graded cell needs is there, if only to say why it is not."""
    for step in sheet.steps:
        if step.graded:
            found = played.answers.setdefault(step.index, {})
            for name in step.names:
                if name not in found:
                    found[name] = Answer(name, absent=_why_absent(name, played, sheet))


def _why_absent(name: str, played: Played, sheet: Sheet) -> str:
    for step in sheet.steps:
        if not step.graded and name in _defined(step):
            error = played.errors.get(step.index)
            if error:
                return f"there is no {name}: the cell {step.id} ended with {error}"
            return f"there is no {name}: the cell {step.id} was not run to its end"
    return f"there is no {name}: no cell defines it"


def _defined(step: Step) -> set[str]:
    try:
        nodes = ast.parse(step.source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(re.findall(r"^(?:class|def|async def)\s+(\w+)", step.source, re.M))
    found = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    return found | {each.id for node in nodes if isinstance(node, ast.Assign) for each in node.targets
                    if isinstance(each, ast.Name)}


def _how(end: Outcome, sheet: Sheet) -> str:
    return f"it did not end within {sheet.cell_s:g} s, nor could it be interrupted" if end.late else \
        f"it ended its process ({end.ended or end.raised})"


def _id(sheet: Sheet, index: int) -> str:
    return next((step.id for step in sheet.steps if step.index == index), "before the first cell")


def _copy(source: Path, folder: Path) -> None:
    """What lies beside a notebook, links and receipts left out."""
    for file in source.rglob("*"):
        if file.is_file() and not file.is_symlink() and file.suffix != ".ipynb" and file.name not in RECEIPTS:
            target = folder / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


