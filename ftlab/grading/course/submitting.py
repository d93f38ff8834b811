"""`ftlab submit`: a student's notebook is made whole, run from a fresh kernel in a copy of its folder, and packed."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from ftlab import __version__
from ftlab.cluster.temporary import TemporaryFolder
from ftlab.errors import ConfigError
from ftlab.grading.course import cells
from ftlab.grading.course.course import LAB, Course
from ftlab.grading.course.parcel import EVIDENCE, MAX_FILE, Manifest, Parcel, digest
from ftlab.grading.course.record import Record
from ftlab.grading.course.repair import repair
from ftlab.grading.course.running import CELL_S, Ran, run

Told = Callable[[Ran, int], None]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Where a student's work is, and what was released to them."""

    notebook: Path
    record: Record
    notes: list[str] = field(default_factory=list)  # what was odd about finding it


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What came of running it."""

    parcel: Parcel
    ran: list[Ran]
    repairs: list[str]
    hidden: float  # points that only grading can tell
    written: float  # points that a person gives
    unanswered: list[str]  # written questions that were left as they were

    @property
    def failed(self) -> list[Ran]:
        """The cells that raised, or did not get all their points."""
        return [each for each in self.ran if each.error or each.earned < each.points]


def find_work(what: str) -> Work:
    """By the name of a lab, a folder or a notebook. Raises ConfigError with what was looked at."""
    path = Path(what)
    if path.suffix == ".ipynb" or path.is_file():
        return _by_notebook(path)
    folders = [path, Path("labs") / what, *_in_course(what)] if LAB.fullmatch(what) else [path]
    if LAB.fullmatch(what) and (here := Record.read(Path())) is not None and here.lab == what:
        folders = [Path()]
    for folder in folders:
        record = Record.read(folder)
        if record:
            return _in_folder(folder, record)
    raise ConfigError(f"found no lab at {what!r}", seen=f"looked in {', '.join(str(each) for each in folders)}",
                      hint="name the lab (lab01), its folder, or the notebook itself")


def submit(work: Work, student: str, told: Told, *, quick: bool = False, cell_s: float = CELL_S) -> Submission:
    """Repair, run and pack; the student's own file is left as it is. Raises ConfigError if it is no notebook."""
    try:
        text = work.notebook.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read {work.notebook}: {error}") from None
    fixed = repair(text, work.record)
    packed = nbformat.writes(fixed.notebook).encode() + b"\n"
    with TemporaryFolder("submit") as place:
        folder = _copy(work.notebook.parent, place / work.record.lab)
        ran = run(fixed.notebook, folder, told, cell_s=cell_s, skip=_experiment if quick else lambda cell: False)
        files = {work.record.notebook: packed, **_evidence(folder)}
    notes = [*work.notes, *fixed.notes]
    manifest = Manifest(
        lab=work.record.lab, notebook=work.record.notebook, student=student, release=work.record.digest,
        made=datetime.now(UTC).isoformat(timespec="seconds"), versions=versions(), repairs=notes,
        files={name: digest(raw) for name, raw in files.items()},
        earned=sum(each.earned for each in ran), points=sum(each.points for each in ran))
    graded = {cell.id: cell for cell in fixed.notebook.cells if cells.points(cell)}
    return Submission(
        parcel=Parcel(manifest, files), ran=ran, repairs=notes, unanswered=_unanswered(fixed.notebook, work.record),
        hidden=sum(cells.points(cell) for cell in graded.values() if cells.hidden(cell)),
        written=sum(cells.points(cell) for cell in graded.values() if cells.kind(cell) == "manual"))


def versions() -> dict[str, str]:
    """What this was run with."""
    found = {"ftlab": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "nbgrader"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _by_notebook(path: Path) -> Work:
    if not path.is_file():
        raise ConfigError(f"there is no {path}", hint="ftlab submit lab01 finds it by itself")
    record = Record.read(path.parent) or _best_match(path)
    renamed = f"the notebook was called {path.name}: packed as {record.notebook}"
    return Work(notebook=path, record=record, notes=[renamed] if path.name != record.notebook else [])


def _in_folder(folder: Path, record: Record) -> Work:
    expected = folder / record.notebook
    if expected.is_file():
        return Work(notebook=expected, record=record)
    others = sorted(each for each in folder.glob("*.ipynb") if each.is_file())
    if len(others) != 1:
        raise ConfigError(f"there is no {expected}, and {len(others)} other notebooks beside it",
                          hint="name the notebook: ftlab submit path/to/it.ipynb")
    return _by_notebook(others[0])


def _best_match(path: Path) -> Record:
    """The release that a notebook, which lies elsewhere, was made from: the one whose cells it has."""
    releases = [record for folder in _release_folders() if (record := Record.read(folder))]
    names = {cells.grade_id(cell) or cell.get("id", "") for cell in cells.read(path).cells}
    ranked = sorted(releases, key=lambda each: len(names & {cell["id"] for cell in each.content["cells"]}))
    if not ranked or not names & {cell["id"] for cell in ranked[-1].content["cells"]}:
        raise ConfigError(f"{path} belongs to no lab that is known here",
                          hint="put it into the lab's folder (beside .release.json), or go to the folder with labs/")
    return ranked[-1]


def _release_folders() -> list[Path]:
    try:
        releases = Course.find().releases
    except ConfigError:
        releases = Path("labs")
    return sorted(each for each in releases.iterdir() if each.is_dir()) if releases.is_dir() else []


def _in_course(lab: str) -> list[Path]:
    return [folder for folder in _release_folders() if folder.name == lab]


def _copy(folder: Path, to: Path) -> Path:
    """The files beside the notebook, for the run; not what earlier runs left."""
    left = shutil.ignore_patterns(".*", "*.ipynb", "__pycache__", "runs", "checkpoints", f"*{EVIDENCE}", "*.zip")
    return Path(shutil.copytree(folder, to, ignore=left))


def _evidence(folder: Path) -> dict[str, bytes]:
    """The event logs that this very run wrote."""
    logs = sorted(each for each in folder.rglob(f"*{EVIDENCE}") if each.is_file() and each.stat().st_size <= MAX_FILE)
    return {f"evidence/{each.name}": each.read_bytes() for each in logs[:20]}


def _experiment(cell: NotebookNode) -> bool:
    return cells.tagged(cell, cells.EXPERIMENT)


def _unanswered(notebook: NotebookNode, record: Record) -> list[str]:
    released = {cell["id"]: "".join(cell["source"]) for cell in record.content["cells"]}
    return [cell.id for cell in notebook.cells if cells.kind(cell) == "manual" and cell.source == released.get(cell.id)]
