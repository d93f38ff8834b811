"""Submissions as they lie in `submitted/`, taken in as nbgrader can grade them: whole, named right, and files only.

`submitted/` itself is never changed. A link is left out and told of; a notebook under another name is recognised by its
cells; one that cannot be read at all is a problem of that submission and of no other. What is too large to be graded is
not read either: a file of 60 GB costs as much as one of a megabyte.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nbgrader.utils import find_all_files

from ftlab.errors import ConfigError
from ftlab.grading.course import cells
from ftlab.grading.course.course import Course
from ftlab.grading.course.record import FILE, Record
from ftlab.grading.course.repair import repair
from ftlab.grading.marking.sheet import file_digest

_MAX_NOTEBOOK = 20 << 20  # bytes
_MAX_BESIDE = 50 << 20  # bytes of all other files together
_MAX_FILES = 2000  # files, folders and links in all


@dataclass
class Submission:
    """What one student handed in for one lab."""

    student: str
    folder: Path  # in submitted/
    notes: list[str] = field(default_factory=list)
    problem: str = ""  # why it cannot be graded

    @property
    def digest(self) -> str:
        """Of all that was handed in; of a file that is too large to be graded only its size counts. Raises ConfigError
        for more files than we look at, OSError for one that cannot be read."""
        sha = hashlib.sha256()
        for name, path in _entries(self.folder):
            kind = "link" if path.is_symlink() else _content(path)
            sha.update(f"{name}\0{kind}\0".encode("utf-8", "surrogateescape"))
        return sha.hexdigest()


def find(course: Course, lab: str, students: list[str]) -> list[Submission]:
    """Who handed in a lab; all, or only these. Raises ConfigError if one of them did not, or nobody did."""
    found = sorted(each.parent.name for each in course.submitted.glob(f"*/{lab}") if os.path.lexists(each))
    missing = sorted(set(students) - set(found))
    if missing or not found:
        raise ConfigError(f"nothing was handed in for {lab} by {', '.join(missing) or 'anybody'}",
                          seen=f"{course.submitted} holds {len(found)} submissions of {lab}",
                          hint="ftlab collect FOLDER_OR_ARCHIVE brings them there")
    return [Submission(name, course.submitted / name / lab) for name in found if not students or name in students]


def take_in(submission: Submission, course: Course, release: Record, into: Path) -> None:
    """Put a clean copy of a submission into a folder; its notes and its problem say what was found."""
    if into.exists():
        shutil.rmtree(into)
    into.mkdir(parents=True)
    if submission.folder.is_symlink() or submission.folder.parent.is_symlink():
        submission.problem = "its folder is a symbolic link"
        return
    try:
        links = [name for name, path in _entries(submission.folder) if path.is_symlink()]
        submission.notes += [f"{name} is a symbolic link: left out" for name in links]
        text = notebook_text(submission, release)
        whole = repair(text, release)
    except ConfigError as error:
        submission.problem = error.message
        return
    submission.notes += whole.notes
    cells.write(whole.notebook, into / release.notebook)
    _copy_beside(submission, course, into)
    source = course.sources / release.lab
    for name in find_all_files(str(source), [*course.directory.ignore, "*.ipynb"]):  # the course's files win
        _copy(Path(name), into / Path(name).relative_to(source))


def notebook_text(submission: Submission, release: Record) -> str:
    """The text of the notebook; one under another name counts if it is the only one that has cells of this lab."""
    named = submission.folder / release.notebook
    if _is_file(named):
        return _read(named)
    known = {cell["id"] for cell in release.content["cells"]}
    texts = {path: _read(path) for name, path in _entries(submission.folder)
             if path.suffix == ".ipynb" and ".ipynb_checkpoints" not in path.parts and _is_file(path)}
    ours = {path: text for path, text in texts.items() if sum(f'"{name}"' in text for name in known) * 2 > len(known)}
    if len(ours) != 1:
        others = ", ".join(sorted(path.name for path in texts)) or "no notebook"
        raise ConfigError(f"there is no {release.notebook}" + (", or only a link" if named.is_symlink() else "") +
                          f"; instead: {others}")
    [(path, text)] = ours.items()
    submission.notes.append(f"{path.name} was taken for {release.notebook}")
    return text


def _content(path: Path) -> str:
    size = path.stat().st_size
    return f"{size} bytes" if size > max(_MAX_NOTEBOOK, _MAX_BESIDE) else file_digest(path)


def _read(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        raw = file.read(_MAX_NOTEBOOK + 1)
    if len(raw) > _MAX_NOTEBOOK:
        raise ConfigError(f"{path.name} is larger than {_MAX_NOTEBOOK >> 20} MB: outputs of a loop?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name} is no notebook: {error}") from None


def _copy_beside(submission: Submission, course: Course, into: Path) -> None:
    room = _MAX_BESIDE
    for name in find_all_files(str(submission.folder), [*course.directory.ignore, "*.ipynb", FILE]):
        path = Path(name)
        if not _is_file(path):
            continue
        room -= path.stat().st_size
        if room < 0:
            submission.notes.append(f"files beyond {_MAX_BESIDE >> 20} MB in all were left out, from {path.name} on")
            return
        _copy(path, into / path.relative_to(submission.folder))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target, follow_symlinks=False)
    target.chmod(0o644)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """Files and links below a folder, links not followed."""
    if folder.is_symlink():
        yield "", folder
        return
    seen = 0
    for parent, folders, files in os.walk(folder):
        seen += len(folders) + len(files)
        if seen > _MAX_FILES:
            raise ConfigError(f"it holds more than {_MAX_FILES} files and folders")
        for name in sorted([*files, *(each for each in folders if Path(parent, each).is_symlink())]):
            path = Path(parent, name)
            if _is_file(path) or path.is_symlink():
                yield str(path.relative_to(folder)), path
