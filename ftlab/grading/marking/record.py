"""What marking one notebook gave, kept under the digest of all that it depended on: marking it again is reading it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nbformat import NotebookNode, from_dict

from ftlab.grading.course.unicode_text import writable


@dataclass(frozen=True, kw_only=True)
class Record:
    """The outputs of all cells, the points of the graded ones, and what is to be told."""

    outputs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by the cell's index
    points: dict[str, float] = field(default_factory=dict)  # by the graded cell's name
    notes: list[str] = field(default_factory=list)  # what happened to the student's own cells
    troubles: list[str] = field(default_factory=list)  # what an instructor has to look at; such a record is not kept
    seconds: float = 0.0

    def put_into(self, notebook: NotebookNode) -> None:
        """Give the cells of a notebook their outputs; those that were not run get none."""
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "code":
                cell.outputs = [from_dict(writable(each)) for each in self.outputs.get(str(index), [])]
                cell.execution_count = None

    def to_json(self) -> str:
        """For the folder below, and for a worker's answer."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Record:
        """As it was written."""
        return cls(**json.loads(text))


class Records:
    """A folder of records by their keys; one that is being written is not there yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str) -> Record | None:
        """The record, if it is there and whole."""
        try:
            return Record.from_json((self.folder / f"{key}.json").read_text())
        except (OSError, ValueError, TypeError):
            return None

    def drop(self, key: str) -> None:
        """Forget one."""
        (self.folder / f"{key}.json").unlink(missing_ok=True)

    def keep(self, key: str, record: Record) -> None:
        """Write it under its key."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / f"{key}.{os.getpid()}.new"
        new.write_text(record.to_json())
        new.rename(self.folder / f"{key}.json")
