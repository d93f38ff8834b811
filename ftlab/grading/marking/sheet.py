"""What there is to do for one notebook: the student's cells to run, the graded cells to judge, in their order.

The source of a graded cell never comes from the submission, but from the gradebook: it is run in the grader's own
process, and holds the hidden tests. A sheet is plain data, so that a worker can be told of it, and so that its digest
says whether it was marked before.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

import ftlab
from ftlab.errors import ConfigError
from ftlab.grading.course import cells as kinds
from ftlab.grading.draws import of_submission

_LAB = re.compile(r"\bcheck\.(lab\d\d)_")
_TORCH = re.compile(r"\btorch\b")
RECEIPTS = ("timestamp.txt", "manifest.json")  # beside a notebook, but no part of it: when it came, and in what
_FOUND_BY_DEFAULT = {"check", *dir(builtins)}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One code cell: run in the sandbox, or judged by the grader."""

    index: int  # in the notebook
    id: str
    source: str
    graded: bool = False
    points: float = 0.0  # at most
    names: tuple[str, ...] = ()  # of a graded cell: the parts that it needs
    hidden: bool = False  # of a graded cell: students do not see what it tests


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """All steps of one notebook, and the deadlines."""

    steps: tuple[Step, ...]
    files: str = ""  # a folder with what lies beside the notebook
    cell_s: float = 60.0  # for one of the student's cells
    notebook_s: float = 300.0  # for all of them
    secret: str = ""  # of the course: hidden tests are drawn from it, and from what was handed in

    @property
    def draws(self) -> str:
        """From what the hidden tests of this submission are drawn: equal for equal cells, and for nobody else's."""
        own = [step.source for step in self.steps if not step.graded]
        return of_submission(self.secret, hashlib.sha256(json.dumps(own).encode()).hexdigest())

    @property
    def modules(self) -> list[str]:
        """What the sandbox's server should import before anything else; torch, which takes seconds, only if a cell
        speaks of it (and a lab's scenes import what they need)."""
        torch = ["torch"] if any(_TORCH.search(step.source) for step in self.steps) else []
        return [*torch, "ftlab.grading.marking.play", *(f"ftlab.grading.{lab}.scenes" for lab in self.labs)]

    @property
    def labs(self) -> list[str]:
        """Whose checks are called: what judges them is not in the sandbox."""
        return sorted({lab for step in self.steps if step.graded for lab in _LAB.findall(step.source)})

    def to_json(self) -> str:
        """For a worker."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Sheet:
        """As it was written."""
        data = json.loads(text)
        steps = tuple(Step(**{**each, "names": tuple(each["names"])}) for each in data.pop("steps"))
        return cls(steps=steps, **data)

    def key(self, sandbox: str) -> str:
        """A digest of all that the marks can depend on: the cells, the files beside them, ftlab, and the sandbox."""
        beside = digest_of(Path(self.files), skip=".ipynb", without=RECEIPTS) if self.files else ""
        data = {**asdict(self), "files": beside, "ftlab": code_digest(), "sandbox": sandbox}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def sheet_of(notebook: NotebookNode, sources: Mapping[str, tuple[str, float]], **settings: Any) -> Sheet:
    """The sheet of a sanitized notebook; `sources` are the graded code cells by name: (source, points).

    Cells with the tag "experiment" are left out: they show a cluster to the student, and prove nothing.
    """
    steps = []
    for index, cell in enumerate(notebook.cells):
        name = kinds.grade_id(cell)
        if cell.cell_type != "code":
            continue
        if kinds.kind(cell) == "check" and name in sources:
            source, points = sources[name]
            steps.append(Step(index=index, id=name, source=source, graded=True, points=points,
                              names=names_in(source, name), hidden=bool(kinds.HIDDEN.search(source))))
        elif kinds.kind(cell) != "check" and not kinds.tagged(cell, kinds.EXPERIMENT) and cell.source.strip():
            steps.append(Step(index=index, id=name or str(cell.get("id", index)), source=cell.source))
    return Sheet(steps=tuple(steps), **settings)


def names_in(source: str, cell: str) -> tuple[str, ...]:
    """The parts that a graded cell needs: the names it reads that are neither its own, nor `check`, nor Python's."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError as error:
        raise ConfigError(f"the graded cell {cell} is no plain Python: {error}") from None
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    stored |= {alias.asname or alias.name.partition(".")[0] for node in nodes
               if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    stored |= {each.arg for each in nodes if isinstance(each, ast.arg)}
    read = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return tuple(dict.fromkeys(name for name in read if name not in stored | _FOUND_BY_DEFAULT))


def digest_of(folder: Path, pattern: str = "*", skip: str = "/", without: Collection[str] = ()) -> str:
    """A digest over the names and contents of the files below a folder, without a suffix and some names."""
    sha = hashlib.sha256()
    for file in sorted(folder.rglob(pattern)):
        if file.is_file() and not file.is_symlink() and file.suffix != skip and file.name not in without:
            sha.update(f"{file.relative_to(folder)}\0{file_digest(file)}\0".encode("utf-8", "surrogateescape"))
    return sha.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def code_digest() -> str:
    """Which ftlab this is, to the byte: a check that was mended gives other marks under the same version."""
    return f"{ftlab.__version__}-{digest_of(Path(ftlab.__file__).parent, '*.py')}"
