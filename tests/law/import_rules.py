"""Which room may import what, read from the source with `ast` and never by importing it.

Imports inside functions, under `if TYPE_CHECKING`, relative ones and `import_module("...")` with a constant all count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("widgets", "grading"),
    ("bench", "drill", "engines"),
    ("cluster", "faults"),
    ("recovery", "train"),
    ("checkpoint", "health", "elastic", "metrics", "report"),
    ("short_traceback", "errors", "validation", "config", "events", "detection", "membership", "messages", "policy"),
)
TOP, BASE = (*LAYERS[0], *LAYERS[1]), LAYERS[-1]
LINE = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}

# third-party package -> the only rooms that may import it
FENCES: dict[str, frozenset[str]] = {
    "docker": frozenset({"cluster"}),
    "prometheus_client": frozenset({"metrics"}),
    "ray": frozenset({"engines"}),
    "ipywidgets": frozenset({"widgets"}),
    "nbgrader": frozenset({"grading"}),
    "tornado": frozenset({"recovery", "cluster"}),
    "torch": frozenset(LINE) - frozenset(BASE) - {"recovery", "metrics", "faults"},
}


@dataclass(frozen=True)
class Import:
    """One import statement: where it stands and the dotted name it asks for."""

    file: Path
    line: int
    target: str
    top_level: bool  # runs when the module is imported


def violations(package: Path) -> list[str]:
    """Every broken rule in the package at this folder, one line each; empty when all is well."""
    found: list[str] = []
    base_edges: dict[str, set[str]] = {}
    for file in sorted(package.rglob("*.py")):
        room = room_of(package, file)
        for each in imports_of(package, file):
            problem = _judge(package.name, room, each)
            if problem:
                found.append(f"{file.relative_to(package.parent)}:{each.line}: {problem}")
            target = _room_of_target(package.name, each.target)
            if room in BASE and target in BASE:
                base_edges.setdefault(room, set()).add(target)
        if room not in LINE and room not in ("__init__", "__main__"):
            found.append(f"{file.relative_to(package.parent)}: {room} is no room of the design")
    return found + [f"the base modules import each other in a circle: {circle}" for circle in _circles(base_edges)]


def room_of(package: Path, file: Path) -> str:
    """The room a file belongs to: the first part of its path inside the package, without `.py`."""
    return file.relative_to(package).parts[0].removesuffix(".py")


def imports_of(package: Path, file: Path) -> Iterator[Import]:
    """All imports in a file, with relative ones resolved; `from a import b` gives `a.b`."""
    inside = [package.name, *file.relative_to(package).parts[:-1]]  # the package that holds the file
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    later = {id(node) for scope in _deferred(tree) for node in ast.walk(scope)}
    for node in ast.walk(tree):
        for target in _targets(node, inside):
            yield Import(file, getattr(node, "lineno", 0), target, id(node) not in later)


def _targets(node: ast.AST, inside: list[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        start = inside[: len(inside) - node.level + 1] if node.level else []
        base = ".".join([*start, *([node.module] if node.module else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return [node.args[0].value] if not node.args[0].value.startswith(".") else []
    return []


def _deferred(tree: ast.Module) -> Iterator[ast.AST]:
    """The parts of a module that do not run when it is imported: functions and `if TYPE_CHECKING`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from node.body


def _room_of_target(package: str, target: str) -> str | None:
    """The room of an imported name; "" for the package itself or a name of its public surface; None for others."""
    parts = target.split(".")
    if parts[0] != package:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LINE else ""


def _judge(package: str, room: str, each: Import) -> str | None:
    target = _room_of_target(package, each.target)
    if room == "__init__":
        return f"imports the room {target} at module level" if target and each.top_level else None
    if room == "__main__" or room not in LINE:
        return None
    return _judge_third_party(room, each.target) if target is None else _judge_inside(package, room, target, each)


def _judge_inside(package: str, room: str, target: str, each: Import) -> str | None:
    if not target:
        dunder = each.target.rpartition(".")[2].startswith("__")
        if room in TOP or dunder:
            return None
        return f"{room} imports {each.target}: take the name from its room, not from the public surface"
    if target == room or LINE[target] > LINE[room] or (room in BASE and target in BASE):
        return None
    if LINE[target] == LINE[room]:
        return f"{room} imports its sibling {target}"
    return f"{room} imports {target}, which stands above it"


def _judge_third_party(room: str, target: str) -> str | None:
    name = target.split(".")[0]
    if name in FENCES and room not in FENCES[name]:
        return f"{room} imports {name}, which belongs to {', '.join(sorted(FENCES[name]))} only"
    if room in BASE and name not in sys.stdlib_module_names:
        return f"{room} imports {name}: the base line uses the standard library only"
    return None


def _circles(edges: dict[str, set[str]]) -> list[str]:
    """One line per module that can reach itself."""
    found = []
    for start in sorted(edges):
        reached, todo = set(), [*edges[start] - {start}]
        while todo:
            here = todo.pop()
            if here not in reached:
                reached.add(here)
                todo.extend(edges.get(here, ()))
        if start in reached:
            found.append(f"{start} -> ... -> {start}")
    return found
