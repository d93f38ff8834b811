"""A student's notebook, made whole again: every released cell once, in its place, and as it was if it is locked.

What students wrote is kept: their answers, and every cell of their own, behind the released cell that it followed.
"""

from __future__ import annotations

import ast
import copy
import json
from dataclasses import dataclass, field
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_raw_cell

from ftlab.errors import ConfigError
from ftlab.grading.course import cells
from ftlab.grading.course.record import Record
from ftlab.grading.course.unicode_text import writable

_MAX_CELLS = 2000  # of a student's notebook; nbformat takes milliseconds for each
_MAKERS = {"code": new_code_cell, "markdown": new_markdown_cell, "raw": new_raw_cell}


@dataclass(frozen=True)
class Repaired:
    """The whole notebook, without outputs, and what had to be done to it, in words."""

    notebook: NotebookNode
    notes: list[str] = field(default_factory=list)


@dataclass
class _Cell:
    """One cell of a student, and which released cell it is; empty: their own."""

    type: str
    source: str
    metadata: dict[str, Any]
    id: str
    stands_for: str = ""


def repair(text: str, record: Record) -> Repaired:
    """The notebook in `text`, as it should be. Raises ConfigError if it cannot be read as a notebook at all."""
    release = cells.parse(json.dumps(record.content), "the release")
    known = {cell.id: cell for cell in release.cells}
    mine, notes = _read(text)
    _identify(mine, known)
    notes += [*_settle_duplicates(mine, known), *_adopt(mine, known)]
    whole = copy.deepcopy(release)
    whole.cells = []
    here = {cell.stands_for: cell for cell in mine if cell.stands_for}
    free = _followers(mine)
    whole.cells += [_own(cell) for cell in free.get("", [])]
    for name, released in known.items():
        restored, note = _restore(here.get(name), released)
        whole.cells += [restored, *(_own(cell) for cell in free.get(name, []))]
        notes += [note] if note else []
    order = [cell.stands_for for cell in mine if cell.stands_for]
    if order != [name for name in known if name in here]:
        notes.append("the cells were not in the order of the lab: put back into it")
    _number(whole, set(known))
    return Repaired(whole, notes)


def _read(text: str) -> tuple[list[_Cell], list[str]]:
    """The cells of a notebook, whatever else is wrong with it."""
    try:
        data = writable(json.loads(text))
        if isinstance(data, dict) and "worksheets" in data:
            data = cells.parse(text, "the notebook")
        listed = [each for each in data["cells"] if isinstance(each, dict)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"this is no notebook: {type(error).__name__}: {str(error)[:100]}",
                          hint="File > Save Notebook As in JupyterLab writes it anew") from None
    if len(listed) > _MAX_CELLS:
        raise ConfigError(f"this notebook has {len(listed)} cells, the limit is {_MAX_CELLS}",
                          hint="cells that a loop made? delete them")
    found, damaged = [], 0
    for each in listed:
        source, metadata, id = each.get("source", ""), each.get("metadata"), each.get("id")
        source = "".join(map(str, source)) if isinstance(source, list) else source
        good = isinstance(source, str) and isinstance(metadata, dict) and each.get("cell_type") in _MAKERS
        damaged += not good
        found.append(_Cell(each["cell_type"] if each.get("cell_type") in _MAKERS else "code",
                           source if isinstance(source, str) else "", metadata if isinstance(metadata, dict) else {},
                           id if isinstance(id, str) else ""))
    return found, [f"{damaged} cells were damaged: what could be read of them was kept"] if damaged else []


def _identify(mine: list[_Cell], known: dict[str, NotebookNode]) -> None:
    """Which released cell each is: by nbgrader's name, else by its id, else by its text."""
    by_text = {cell.source: name for name, cell in known.items()}
    for cell in mine:
        meta = cell.metadata.get("nbgrader")
        name = meta.get("grade_id") if isinstance(meta, dict) else None
        if isinstance(name, str) and name in known:
            cell.stands_for = name
        elif cell.id in known and not name:
            cell.stands_for = cell.id
        elif cell.source.strip() and cell.source in by_text:
            cell.stands_for = by_text[cell.source]


def _settle_duplicates(mine: list[_Cell], known: dict[str, NotebookNode]) -> list[str]:
    """Of several that stand for the same cell, the last that was worked on counts; the others become cells of the
    student's own, unless they say nothing new."""
    notes = []
    for name, released in known.items():
        same = [cell for cell in mine if cell.stands_for == name]
        if len(same) < 2:
            continue
        kept = ([cell for cell in same if cell.source != released.source] or same)[-1]
        for cell in same:
            if cell is not kept and (cell.source == released.source or cell.source == kept.source):
                mine.remove(cell)
            elif cell is not kept:
                cell.stands_for = ""
        notes.append(f"{name} was there {len(same)} times: the last version that was worked on counts")
    return notes


def _adopt(mine: list[_Cell], known: dict[str, NotebookNode]) -> list[str]:
    """A stub that is gone, while a cell of the student's own defines its names: that cell is the answer."""
    notes = []
    there = {cell.stands_for for cell in mine}
    for name, released in known.items():
        wanted = _defined(released.source) if cells.kind(released) == "stub" and name not in there else set()
        answers = [cell for cell in mine if not cell.stands_for and wanted and wanted <= _defined(cell.source)]
        if answers:
            answers[-1].stands_for = name
            notes.append(f"{name} was missing: the cell that defines {', '.join(sorted(wanted))} took its place")
    return notes


def _restore(cell: _Cell | None, released: NotebookNode) -> tuple[NotebookNode, str]:
    """The released cell with the student's answer in it, and what was done about it."""
    whole, kind = copy.deepcopy(released), cells.kind(released)
    if cell is None:
        lost = {"stub": "put back empty, without an answer", "manual": "put back empty, without an answer",
                "free": ""}.get(kind, "put back")
        return whole, f"{released.id} was missing: {lost}" if lost else ""
    changed = cell.source != released.source
    if kind in ("stub", "manual", "free"):
        whole.source = cell.source
    elif changed:
        return whole, f"{released.id} was changed but is locked: put back as it was"
    if cell.type != released.cell_type:
        return whole, f"{released.id} was a {cell.type} cell: made a {released.cell_type} cell again"
    same = _marking(cell.metadata) == _marking(released.metadata)
    return whole, "" if same else f"{released.id} had lost or changed its metadata: restored"


def _marking(metadata: dict[str, Any]) -> list[Any]:
    """What nbgrader goes by."""
    meta = metadata.get("nbgrader")
    keys = ("grade", "solution", "locked", "task", "points", "grade_id")
    return [meta.get(key) for key in keys] if isinstance(meta, dict) else []


def _followers(mine: list[_Cell]) -> dict[str, list[_Cell]]:
    """Released cell → the student's own cells behind it; those before all others under the empty name."""
    found: dict[str, list[_Cell]] = {}
    last = ""
    for cell in mine:
        if cell.stands_for:
            last = cell.stands_for
        else:
            found.setdefault(last, []).append(cell)
    return found


def _own(cell: _Cell) -> NotebookNode:
    made: NotebookNode = _MAKERS[cell.type](cell.source)
    tags = cell.metadata.get("tags")
    if isinstance(tags, list) and all(isinstance(tag, str) for tag in tags) and tags:
        made.metadata["tags"] = tags
    return made


def _number(notebook: NotebookNode, taken: set[str]) -> None:
    """Ids for the student's own cells: the same each time."""
    own = [cell for cell in notebook.cells if cell.id not in taken]
    for number, cell in enumerate(own, 1):
        cell.id = f"own-{number}"


def _defined(source: str) -> set[str]:
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return set()
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
