"""`labs/` out of `solutions/`, by nbgrader's own steps: first into a temporary folder, then swapped in.

The result is the same bytes each time. A source that is broken leaves the old release as it was.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nbgrader.converters import GenerateAssignment
from nbgrader.converters.base import NbGraderException
from nbgrader.coursedir import CourseDirectory

from ftlab.cluster.temporary import TemporaryFolder
from ftlab.errors import ConfigError, FtlabError
from ftlab.grading.course.course import Course
from ftlab.grading.course.record import Record, edited


def release(course: Course, labs: list[str], force: bool = False) -> list[str]:
    """Generate labs and put them in place of the old ones; gives those that changed.

    Raises ConfigError if somebody worked in a folder that would be replaced, unless it is forced.
    """
    if not force:
        _refuse_to_overwrite(course, labs)
    with generated(course, labs) as fresh:
        changed = [lab for lab in labs if tree(fresh / lab) != tree(course.releases / lab)]
        for lab in changed:
            swap(fresh / lab, course.releases / lab)
    return changed


@contextlib.contextmanager
def generated(course: Course, labs: list[str]) -> Iterator[Path]:
    """A temporary folder, on the disk of the course, with the labs as students would get them."""
    build = course.root / "build"
    build.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="release-", dir=build) as place:
            for lab in labs:
                generate(course, lab, Path(place) / "labs")
            yield Path(place) / "labs"
    finally:
        with contextlib.suppress(OSError):
            build.rmdir()  # unless something else lives there


def generate(course: Course, lab: str, into: Path, gradebook: str = "") -> None:
    """One lab into the folder `into/lab`; its cells go into a gradebook (a database URL), if one is given."""
    course.notebook(lab)
    config = copy.deepcopy(course.config)
    config.CourseDirectory.update(release_directory=str(into), assignment_id=lab)
    config.GenerateAssignment.pop("post_convert_hook", None)
    if gradebook:
        config.CourseDirectory.db_url = gradebook
    else:
        config.GenerateAssignment.no_database = True
        config.SaveCells.enabled = False
    into.mkdir(parents=True, exist_ok=True)
    converter = GenerateAssignment(coursedir=CourseDirectory(config=config), config=config)
    with _listening(converter.log) as heard:
        try:
            converter.start()
        except NbGraderException as error:
            raise FtlabError(f"{lab} cannot be released: {error}", seen=_reason(heard),
                             hint=f"nbgrader generate_assignment {lab} --debug") from None
    Record.of(into / lab).write(into / lab)


def register(course: Course, lab: str) -> None:
    """Tell the course's gradebook of a lab, as `nbgrader generate_assignment` would; `labs/` stays as it is.

    Grading needs that: hidden tests, points and locked cells come from the gradebook. May be called again; raises
    FtlabError when cells came or went after the first submission was graded.
    """
    with TemporaryFolder("register") as place:
        generate(course, lab, place, str(course.directory.db_url))


def tree(folder: Path) -> dict[str, bytes]:
    """Each file below a folder → its bytes."""
    return {each.relative_to(folder).as_posix(): each.read_bytes()
            for each in sorted(folder.rglob("*")) if each.is_file() and ".ipynb_checkpoints" not in each.parts}


def _refuse_to_overwrite(course: Course, labs: list[str]) -> None:
    for lab in labs:
        worked = edited(course.releases / lab)
        if worked:
            raise ConfigError(f"{course.releases / lab} was edited since its release: {', '.join(worked[:3])}",
                              hint="move that work elsewhere, or --force to replace it")


def swap(fresh: Path, place: Path) -> None:
    """The new folder in place of the old one; the old one is put back if that fails."""
    place.parent.mkdir(parents=True, exist_ok=True)
    old = fresh.with_name(f"{fresh.name}.old")
    if place.exists():
        place.rename(old)
    try:
        fresh.rename(place)
    except OSError:
        if old.exists():
            old.rename(place)
        raise
    if old.exists():
        shutil.rmtree(old)


@contextlib.contextmanager
def _listening(log: logging.Logger) -> Iterator[list[str]]:
    """Keep what nbgrader logs to ourselves: it is told only when something goes wrong."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    handlers, level, propagate = log.handlers[:], log.level, log.propagate
    log.handlers, log.propagate = [Ear()], False
    log.setLevel(logging.WARNING)
    try:
        yield heard
    finally:
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


def _reason(heard: list[str]) -> str:
    """The last line of each traceback that nbgrader logged, else what it logged last."""
    raised = [text.strip().splitlines()[-1] for text in heard if "Traceback" in text]
    return "; ".join(raised or heard[-1:])[:1500]
