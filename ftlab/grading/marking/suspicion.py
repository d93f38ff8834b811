"""What a person should look at: cells that name what no answer needs. It takes no marks by itself.

The text of the cells is read, not what they do: code that sets out to hide these names can. Given cells name none of
them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ftlab.grading.marking.sheet import Sheet, Step
from ftlab.grading.stage.package import REFERENCE

_ALLOWED = re.compile(r"from ftlab\.grading import check\b|import ftlab\.grading\.check\b")
_WORDS = {
    "ftlab.grading": re.compile(r"\bftlab\s*\.\s*grading\b|\bgrading\.(stage|lab\d\d|marking)\b"),
    "frames of other functions": re.compile(r"\b(_getframe|currentframe|f_back|f_locals|f_globals|tb_frame|gi_frame|"
                                            r"getouterframes|setprofile|settrace)\b|\binspect\.stack\b"),
    "objects of other functions": re.compile(r"\bgc\.get_(objects|referrers)\b|\b__closure__\b|\bcell_contents\b"),
    "os._exit": re.compile(r"\b_exit\b"),
    "memory and descriptors of the process": re.compile(r"/proc/(self|\d)|\bctypes\b|\bos\.(fdopen|dup2?)\b"),
}


def suspicious(sheet: Sheet) -> list[str]:
    """One line for each cell of the student's that names such things."""
    told = []
    for step in sheet.steps:
        found = [] if step.graded else sorted({*_words(step.source), *_references(step, sheet.labs)})
        if found:
            told.append(f"LOOK at the cell {step.id[:80]!r}: it names {', '.join(found)}")
    return told


def _words(source: str) -> Iterator[str]:
    plain = _ALLOWED.sub("", source)
    yield from (name for name, words in _WORDS.items() if words.search(plain))


def _references(step: Step, labs: list[str]) -> Iterator[str]:
    """Names of the reference of what the lab asks for, where the cell reads them and does not make them itself."""
    try:
        nodes = list(ast.walk(ast.parse(step.source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    made = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    for lab in labs:
        for file, names in REFERENCE.get(lab, {}).items():
            module = ".".join(["ftlab", *file.removesuffix(".py").split("/")])
            yield from (f"{module}.{name}" for name in names if name in read - made)
