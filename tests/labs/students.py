"""Submissions for tests: the released notebook with answers in it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import nbformat

from ftlab.grading.course import cells
from ftlab.grading.course.course import Course
from ftlab.grading.course.feedback import without_regions
from ftlab.grading.course.parcel import Manifest, Parcel, digest
from ftlab.grading.course.record import Record

MARKERS = ("### BEGIN SOLUTION", "### END SOLUTION")


def reference(course: Course, lab: str) -> dict[str, str]:
    """The answers of the source: cell → text, without markers and mark schemes."""
    found = {}
    for cell in cells.read(course.notebook(lab)).cells:
        if cells.kind(cell) in ("stub", "manual"):
            lines = [line for line in cell.source.splitlines() if line.strip() not in MARKERS]
            found[cell.id] = without_regions("\n".join(lines))
    return found


def submission(course: Course, lab: str, student: str, answers: Mapping[str, str]) -> Parcel:
    """What `ftlab submit` would pack, without running it."""
    record = Record.read(course.releases / lab)
    assert record is not None
    notebook = nbformat.from_dict(record.content)
    for cell in notebook.cells:
        cell.source = answers.get(cell.id, "".join(cell.source))
    raw = nbformat.writes(notebook).encode()
    manifest = Manifest(lab=lab, notebook=record.notebook, student=student, release=record.digest,
                        made=datetime.now(UTC).isoformat(), files={record.notebook: digest(raw)})
    return Parcel(manifest, {record.notebook: raw})


def full_points(course: Course, lab: str) -> dict[str, float]:
    """Each cell that is graded by its result → its points."""
    return {cell.id: cells.points(cell) for cell in cells.read(course.notebook(lab)).cells
            if cells.kind(cell) == "check"}
