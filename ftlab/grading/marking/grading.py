"""`ftlab grade`: all submissions of a lab, several at once, then nbgrader's own Autograde writes the gradebook.

First every submission is taken in and sanitized by nbgrader's own steps; those that were not marked before go to the
workers, and each record is kept as soon as it is there: after a crash or Ctrl-C only the rest is left to do. Then
Autograde runs for one student after the other, as only one may write to the gradebook; our preprocessor finds the
record under the same key and runs nothing. What was graded before, from the same bytes, is left as it is.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import nbformat
from nbgrader.api import Gradebook, MissingEntry
from nbgrader.converters import Autograde
from nbgrader.coursedir import CourseDirectory
from nbgrader.plugins.export import CsvExportPlugin
from traitlets.config import Config

from ftlab.cluster.sandbox import Limits, choose
from ftlab.errors import ClusterError, FtlabError
from ftlab.grading.course.course import Course
from ftlab.grading.course.record import Record as Release
from ftlab.grading.course.release import generate
from ftlab.grading.marking.intake import Submission, find, take_in
from ftlab.grading.marking.pool import Pool
from ftlab.grading.marking.preprocessors import AUTOGRADE, SANITIZE, STATE, SandboxedExecute
from ftlab.grading.marking.record import Record, Records
from ftlab.grading.marking.sheet import Sheet, code_digest, digest_of

Progress = Callable[[str, int, int], None]  # what, so many done, of so many


@dataclass
class Graded:
    """How one submission went."""

    student: str
    score: float = 0.0
    points: float = 0.0  # at most
    manual: bool = False  # something is left for a person to grade
    seconds: float = 0.0  # in its sandbox; 0 if nothing was run
    unchanged: bool = False  # it was graded before, from the same bytes
    notes: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)  # what an instructor has to look at
    problem: str = ""  # why it could not be graded: it counts 0
    failed: str = ""  # why the grader could not grade it: nothing is written, and the next run tries again


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to grade."""

    jobs: int = 0  # submissions at once; 0: as many as there are cores
    students: tuple[str, ...] = ()  # only these; empty: all
    again: bool = False  # even what was graded before
    sandbox: str = "auto"
    limits: Limits = field(default_factory=Limits)


def grade(course: Course, lab: str, settings: Settings, progress: Progress, warn: Callable[[str], None]
          ) -> list[Graded]:
    """Grade the submissions of a lab; one that cannot be graded is told of in its row, and stops no other."""
    course.labs([lab])
    sandbox = choose(settings.sandbox, settings.limits)
    if sandbox.missing:
        warn(sandbox.warning())
    with _alone(course), _quiet():
        run = _Run(course, lab, settings, sandbox.kind)
        return run.grade(progress)


def export(course: Course, lab: str, file: str) -> None:
    """The marks of one lab as CSV, by nbgrader's own plugin."""
    with Gradebook(str(course.directory.db_url)) as gradebook:
        CsvExportPlugin(to=file, assignment=[lab]).export(gradebook)


class _Run:
    """One call of `ftlab grade`."""

    def __init__(self, course: Course, lab: str, settings: Settings, kind: str) -> None:
        self.course, self.lab, self.settings, self.kind = course, lab, settings, kind
        self.state = course.root / STATE
        self.state.mkdir(parents=True, exist_ok=True)
        (self.state.parent / ".gitignore").write_text("*\n")
        self.records = Records(self.state / "records")
        self.config = _config(course, kind)
        self.database = str(course.directory.db_url)
        self._doubtful: list[str] = []  # keys of records for this time only: the next run tries again

    def grade(self, progress: Progress) -> list[Graded]:
        release = self._register()
        found = find(self.course, self.lab, list(self.settings.students))
        rows = {each.student: Graded(each.student) for each in found}
        stamps = {each.student: self._stamp(each, release) for each in found}
        todo = [each for each in found if not self._as_before(rows[each.student], stamps[each.student])]
        sheets = {}
        for number, each in enumerate(todo, 1):
            if (sheet := self._prepare(each, rows[each.student], release)) is not None:
                sheets[each.student] = sheet
            progress("taking in", number, len(todo))
        self._mark(sheets, rows, progress)
        try:
            for number, each in enumerate(todo, 1):
                self._write(each, rows[each.student], stamps[each.student])
                progress("writing the gradebook", number, len(todo))
        finally:
            for key in self._doubtful:
                self.records.drop(key)
        with Gradebook(self.database) as gradebook:
            for row in rows.values():
                _fill_in(row, gradebook, self.lab)
        return [rows[name] for name in sorted(rows)]

    def _register(self) -> Release:
        """Have the gradebook know the lab as it is authored now; the release, to repair submissions by."""
        place, now = self.state / "release", self._source_digest()
        known = self.state / f"{self.lab}.source"
        if not known.is_file() or known.read_text() != now or not self._is_known():
            generate(self.course, self.lab, place, self.database)
            known.write_text(now)
        return Release.of(place / self.lab)

    def _source_digest(self) -> str:
        return digest_of(self.course.sources / self.lab) + str(self.database)

    def _is_known(self) -> bool:
        if not (self.state / "release" / self.lab).is_dir():
            return False
        with Gradebook(self.database) as gradebook:
            with contextlib.suppress(MissingEntry):
                return bool(gradebook.find_assignment(self.lab).notebooks)
        return False

    def _stamp(self, submission: Submission, release: Release) -> str:
        """All that the marks of a submission depend on."""
        facts = [submission.digest, self._source_digest(), release.digest, code_digest(), self.kind]
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()

    def _note(self, student: str) -> Path:
        return self.state / "graded" / self.lab / f"{student}.json"

    def _as_before(self, row: Graded, stamp: str) -> bool:
        """Whether it was graded from the same bytes and nobody threw that away; the row is filled in then."""
        if self.settings.again:
            return False
        try:
            note = json.loads(self._note(row.student).read_text())
        except (OSError, ValueError):
            return False
        autograded = Path(self.course.directory.format_path(self.course.directory.autograded_directory, row.student,
                                                            self.lab))
        if note.get("stamp") != stamp or note["troubles"] or not (note["problem"] or autograded.is_dir()):
            return False
        row.unchanged, row.notes, row.problem = True, note["notes"], note["problem"]
        return True

    def _prepare(self, submission: Submission, row: Graded, release: Release) -> Sheet | None:
        """The sheet of a submission that has to be marked; None if that is not possible, or was done before."""
        try:
            take_in(submission, self.course, release, self.state / "intake" / submission.student / self.lab)
            row.notes, row.problem = submission.notes, submission.problem
            if row.problem:
                return None
            sheet = self._sheet(submission.student, release.notebook)
            record = None if self.settings.again else self.records.find(sheet.key(self.kind))
            if record is None:
                return sheet
            row.notes = [*row.notes, *record.notes]
        except Exception as error:  # whatever a submission does to nbgrader, it is that one's problem
            row.problem = _in_words(error)
        return None

    def _sheet(self, student: str, notebook: str) -> Sheet:
        """What nbgrader's own sanitizing leaves of a submission, as a sheet."""
        converter = self._autograde(student)
        converter.exporter = converter.exporter_class(parent=converter, config=converter.config)
        converter._init_preprocessors()
        file = self.state / "intake" / student / self.lab / notebook
        resources = converter.init_single_notebook_resources(str(file))
        text, resources = converter.exporter.from_filename(str(file), resources=resources)
        execute = SandboxedExecute(parent=converter.exporter, config=converter.config)
        return execute.sheet(nbformat.reads(text, as_version=4), resources)

    def _mark(self, sheets: dict[str, Sheet], rows: dict[str, Graded], progress: Progress) -> None:
        def keep(student: str, record: Record) -> None:
            key = sheets[student].key(self.kind)
            self._doubtful += [key] if record.troubles else []
            self.records.keep(key, record)

        cores = os.cpu_count() or 1
        jobs = min(self.settings.jobs or cores, max(1, len(sheets)))
        limits = replace(self.settings.limits, cpus=max(1.0, cores / jobs))
        pool, marked = Pool(jobs, self.kind, limits), list[str]()
        with contextlib.closing(pool.marked(list(sheets.items()), keep)) as results:
            for student, found in results:
                marked.append(student)
                if isinstance(found, Exception):
                    rows[student].failed = _in_words(found)
                else:
                    row = rows[student]
                    row.notes, row.seconds, row.troubles = [*row.notes, *found.notes], found.seconds, found.troubles
                progress("grading", len(marked), len(sheets))

    def _write(self, submission: Submission, row: Graded, stamp: str) -> None:
        """Have nbgrader write what it knows now into the gradebook; a failure of ours costs no student anything."""
        if not row.problem and not row.failed:
            try:
                self._autograde(submission.student, force=True).start()
            except Exception as error:
                row.failed = _in_words(error)
        if row.failed:
            return
        if row.problem:
            with Gradebook(self.database) as gradebook:
                _zero(gradebook, self.lab, submission.student)
        file = self._note(submission.student)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**asdict(row), "stamp": stamp}))

    def _autograde(self, student: str, force: bool = False) -> Any:
        config = copy.deepcopy(self.config)
        config.CourseDirectory.update(student_id=_literally(student), assignment_id=self.lab)
        converter = Autograde(coursedir=CourseDirectory(config=config), config=config)
        converter.force = force
        return converter


def _config(course: Course, kind: str) -> Config:
    """The course's own settings, with submissions read from where they were taken in."""
    config = copy.deepcopy(course.config)
    config.CourseDirectory.submitted_directory = f"{STATE}/intake"
    config.Autograde.sanitize_preprocessors = SANITIZE
    config.Autograde.autograde_preprocessors = AUTOGRADE
    config.SandboxedExecute.sandbox = kind
    return config


def _literally(name: str) -> str:
    """nbgrader takes a student's name as a pattern for folders."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _fill_in(row: Graded, gradebook: Gradebook, lab: str) -> None:
    with contextlib.suppress(MissingEntry):
        found = gradebook.find_submission(lab, row.student)
        row.score, row.points, row.manual = float(found.score), float(found.max_score), bool(found.needs_manual_grade)


def _zero(gradebook: Gradebook, lab: str, student: str) -> None:
    """A submission that cannot be graded counts 0, as nbgrader itself does for a notebook that is missing."""
    gradebook.update_or_create_student(student)
    submission = gradebook.update_or_create_submission(lab, student)
    for notebook in submission.notebooks:
        for each in notebook.grades:
            each.auto_score, each.needs_manual_grade = 0.0, False
    gradebook.db.commit()


def _in_words(error: BaseException) -> str:
    return error.message if isinstance(error, FtlabError) else f"{type(error).__name__}: {error}"[:500]


@contextlib.contextmanager
def _alone(course: Course) -> Iterator[None]:
    """One `ftlab grade` at a time in a course: two would write the same gradebook."""
    place = course.root / STATE
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ClusterError(f"another `ftlab grade` is at work in {course.root}",
                               hint="wait for it, or end it: what it graded is kept") from None
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """nbgrader logs a dozen lines per submission; what matters stands in the rows."""
    log = logging.getLogger("traitlets")
    before, propagate = log.level, log.propagate
    log.setLevel(logging.CRITICAL)
    log.propagate = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SQLAlchemy's, about nbgrader's own queries
            yield
    finally:
        log.setLevel(before)
        log.propagate = propagate
