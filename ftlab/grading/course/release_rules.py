"""What the generated labs must be like: as the sources say, with nothing in them that students should not see."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from nbformat import NotebookNode

from ftlab.errors import ConfigError
from ftlab.grading.course import cells
from ftlab.grading.course.problem import Problem
from ftlab.grading.course.record import FILE
from ftlab.grading.course.release import tree

_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|<(?:img|a)\s[^>]*?(?:src|href)=[\"']([^\"']+)[\"']")
_TELLING = 20  # a line of a solution that is at least so long, and found in a release, gives something away


def drift(fresh: Path, place: Path, name: str) -> Iterator[Problem]:
    """Where the release that is there differs from the one that the source gives now."""
    made, there = tree(fresh), tree(place)
    for file in sorted(made.keys() | there.keys()):
        if file == FILE and made.get(file) != there.get(file) and file in there:
            continue  # the notebook's own line says it
        if file not in there:
            yield Problem(f"{name}/{file}", "is not there", "ftlab labs release")
        elif file not in made:
            yield Problem(f"{name}/{file}", "comes from no source", "remove it, or move it to the sources")
        elif made[file] != there[file]:
            yield Problem(f"{name}/{file}", f"is not what its source gives{_first_difference(made[file], there[file])}",
                          "ftlab labs release (edit the source, not the release)")


def secrets(source: NotebookNode, place: Path, name: str) -> Iterator[Problem]:
    """Solutions, hidden tests and mark schemes that got into a release, in any of its files."""
    telling = secret_lines(source)
    for file, raw in tree(place).items():
        text = _plain_text(file, raw)
        if cells.SECRETS.search(text):
            yield Problem(f"{name}/{file}", f"still has the marker {cells.SECRETS.search(text)[0]!r}",  # type: ignore[index]
                          "ftlab labs release; if it stays, correct the markers in the source")
        leaked = next((line for line in telling if line in text), None)
        if leaked:
            yield Problem(f"{name}/{file}", f"gives away {leaked[:60]!r}",
                          "put the markers around all of it, and do not repeat it elsewhere")


def secret_lines(source: NotebookNode) -> list[str]:
    """The lines between markers that are long enough to be telling, and stand nowhere else in the source."""
    inside: list[str] = []
    outside: list[str] = []
    for cell in source.cells:
        depth = 0
        for line in cell.source.splitlines():
            marker = cells.SECRETS.search(line)
            if marker:
                depth += 1 if marker[1] == "BEGIN" else -1
            else:
                (inside if depth > 0 else outside).append(line.strip())
    common = "\n".join(outside)
    return [line for line in inside if len(line) >= _TELLING and line not in common]


def links(place: Path, name: str) -> Iterator[Problem]:
    """Relative links of a released notebook that lead nowhere."""
    for notebook in sorted(place.glob("*.ipynb")):
        for cell in cells.read(notebook).cells:
            if cell.cell_type != "markdown":
                continue
            for target in _targets(cell.source):
                if not (place / unquote(target.partition("#")[0])).exists():
                    yield Problem(f"{name}/{notebook.name} {cell.id}", f"its link {target} leads nowhere",
                                  "put the file into the lab's folder, or correct the link")


def _targets(text: str) -> list[str]:
    plain = re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    found = [one or other for one, other in _LINK.findall(plain)]
    return [each for each in found if not re.match(r"([a-z][a-z0-9+.-]*:|#)", each)]


def _plain_text(file: str, raw: bytes) -> str:
    """What a reader would see: of a notebook its sources, of other files their text."""
    text = raw.decode("utf-8", "replace")
    if file != FILE and not file.endswith(".ipynb"):
        return text
    try:
        data = json.loads(text)
        notebook = cells.parse(json.dumps(data.get("content", data)), file)
    except (ValueError, ConfigError):
        return text
    return "\n".join(cell.source + json.dumps(cell.get("outputs", [])) for cell in notebook.cells)


def _first_difference(made: bytes, there: bytes) -> str:
    """Which cell is the first that differs, where that can be told."""
    try:
        one, other = (cells.parse(raw.decode(), "").cells for raw in (made, there))
    except (ConfigError, UnicodeDecodeError):
        return ""
    for left, right in zip(one, other, strict=False):
        if left != right:
            return f" (cell {left.id})"
    return "" if len(one) == len(other) else f" ({len(other)} cells, not {len(one)})"
