"""What was released, kept beside the notebook students work in: `.release.json`.

`ftlab submit` puts missing cells back from it, and `ftlab labs release` sees by it whether somebody has worked in a
folder that it is about to replace. It holds nothing that the released notebook does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ftlab.errors import ConfigError
from ftlab.grading.course import cells

FILE = ".release.json"
_IGNORED = (".ipynb_checkpoints", "__pycache__")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One lab as it was released."""

    lab: str
    notebook: str  # the name of its file
    files: dict[str, str] = field(default_factory=dict)  # each file of the release → SHA-256
    content: dict[str, Any] = field(default_factory=dict)  # the notebook itself

    @property
    def digest(self) -> str:
        """Which release this is."""
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def of(cls, folder: Path) -> Record:
        """Of a folder that was just generated."""
        [notebook] = sorted(folder.glob("*.ipynb"))
        return cls(lab=folder.name, notebook=notebook.name, files=digests(folder),
                   content=json.loads(notebook.read_text(encoding="utf-8")))

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """Of a folder in which somebody may have worked since; None if there is no record in it."""
        file = folder / FILE
        if not file.is_file():
            return None
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file} is damaged: {error}", hint="get a fresh copy of the lab's folder") from None

    def write(self, folder: Path) -> None:
        """Beside the notebook."""
        text = json.dumps(asdict(self), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        (folder / FILE).write_text(text + "\n", encoding="utf-8")


def keep(assignment: str, student: str, notebooks: Iterable[str]) -> None:
    """The hook that `nbgrader generate_assignment` calls when a lab is written; it runs in the course's folder."""
    from ftlab.grading.course.course import Course

    folder = Course.find().releases / assignment
    Record.of(folder).write(folder)


def edited(folder: Path) -> list[str]:
    """The files in a release's folder that somebody changed or added; running a notebook is no change."""
    record = Record.read(folder)
    if record is None:
        return sorted(digests(folder)) if folder.is_dir() else []
    now = digests(folder)
    changed = [name for name, digest in now.items() if record.files.get(name) != digest]
    return sorted(name for name in changed if name != record.notebook or _rewritten(folder / name, record.content))


def digests(folder: Path) -> dict[str, str]:
    """Each file below a folder → SHA-256, without the record itself and what editors leave."""
    found = sorted(each for each in folder.rglob("*") if each.is_file() and each.name != FILE)
    return {each.relative_to(folder).as_posix(): hashlib.sha256(each.read_bytes()).hexdigest()
            for each in found if not set(_IGNORED) & set(each.parts)}


def _rewritten(notebook: Path, content: dict[str, Any]) -> bool:
    try:
        now = cells.read(notebook)
    except ConfigError:
        return True
    then = cells.parse(json.dumps(content), "the release")
    return [each.source for each in now.cells] != [each.source for each in then.cells]
