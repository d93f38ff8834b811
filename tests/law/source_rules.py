"""Small laws on single files: where the environment is read, who prints, what a text file may name."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

READERS = ("environ", "environb", "getenv", "getenvb")

# written in two halves, so that this file passes its own law
_HOSTS = (
    ("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "(org|com)"), ("yarnpkg", "com"), ("pytorch", r"org/whl"),
    ("deb.debian", "org"), ("anaconda", "(org|com)"), ("ghcr", "io"), ("quay", "io"), ("nvcr", "io"), ("gcr", "io"),
    ("registry.k8s", "io"), ("docker", "io/"), ("registry-1.docker", "io"), ("rubygems", "org"), ("crates", "io"),
)
HOSTS = re.compile("|".join(rf"\b{left}\.{right}" for left, right in _HOSTS), re.IGNORECASE)


def environment_reads(source: str) -> list[int]:
    """Lines that read an environment variable; setting one (`os.environ[x] = y`, `.update`) is not reading."""
    tree = ast.parse(source)
    writes = {id(child) for node in ast.walk(tree) for child in _written(node)}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in READERS and id(node) not in writes:
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            lines.extend(node.lineno for alias in node.names if alias.name in READERS)
    return lines


def _written(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return [node.value]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
        return [node.func.value]
    return []


def prints(source: str) -> list[int]:
    """Lines that call print()."""
    return [node.lineno for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"]


def own_limits(source: str, longest_s: float = 5.0) -> list[int]:
    """Lines of a test that give a time limit as a number, or add one to the clock: limits stand in tests/limits.py."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            given = [word.value for word in node.keywords if word.arg == "timeout"]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and "monotonic()" in ast.unparse(node.left):
            given = [node.right]
        else:
            continue
        lines += [each.lineno for each in given
                  if isinstance(each, ast.Constant) and isinstance(each.value, int | float) and each.value >= longest_s]
    return lines


def ignored_patterns(gitignore: str) -> list[str]:
    """The plain patterns of a .gitignore, without slashes at either end."""
    lines = (line.strip() for line in gitignore.splitlines())
    return [line.strip("/") for line in lines if line and not line.startswith(("#", "!"))]


def project_files(root: Path) -> list[Path]:
    """Every file that belongs to the project: all but .git and what .gitignore names."""
    patterns = [".git", *ignored_patterns((root / ".gitignore").read_text())]
    found: list[Path] = []
    todo = [root]
    while todo:
        for entry in sorted(todo.pop().iterdir()):
            inner = str(entry.relative_to(root))
            if any(fnmatch(entry.name, each) or fnmatch(inner, each) for each in patterns):
                continue
            if entry.is_dir() and not entry.is_symlink():
                todo.append(entry)
            elif entry.is_file():
                found.append(entry)
    return found
