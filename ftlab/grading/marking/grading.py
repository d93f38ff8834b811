"""`ftlab grade`: all submissions of a lab, several at once, then nbgrader's own Autograde writes the gradebook.

First every submission is taken in and sanitized by nbgrader's own steps; those that were not marked before go to the
workers, and each record is kept as soon as it is there: after a crash or Ctrl-C only the rest is left to do. Then
Autograde runs for one student after the other, as only one may write to the gradebook; our preprocessor finds the
record under the same key and runs nothing. What was graded before, from the same bytes, is left as it is; only late
penalties are computed for all, each time.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import json
import logging
import os
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
from ftlab.errors import ClusterError, ConfigError, FtlabError
from ftlab.grading.course.course import Course
from ftlab.grading.course.record import Record as Release
from ftlab.grading.course.release import generate
from ftlab.grading.marking.intake import Submission, find, take_in
from ftlab.grading.marking.lateness import assign_penalty
from ftlab.grading.marking.pool import Pool
from ftlab.grading.marking.preprocessors import AUTOGRADE, SANITIZE, STATE, SandboxedExecute
from ftlab.grading.marking.record import Record, Records
from ftlab.grading.marking.sheet import Sheet, code_digest, digest_of

Progress = Callable[[str, int, int], None]  # what, so many done, of so many


@dataclass
class Graded:
    """How one submission went."""

    student: str
    score: float = 0.0  # what counts: the late penalty is taken off
    points: float = 0.0  # at most
    penalty: float = 0.0  # for being late
    late_s: float = 0.0  # so many seconds after the due date
    manual: bool = False  # something is left for a person to grade
    seconds: float = 0.0  # in its sandbox; 0 if nothing was run
    unchanged: bool = False  # it was graded before, from the same bytes
    notes: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)  # what an instructor has to look at
    problem: str = ""  # why it could not be graded: it counts 0, unless
    counts: str = ""  # ... an earlier hand-in was graded: which one, and it goes on counting as a whole
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
        self._common: list[str] = []  # what all marks of this run depend on
        self._doubtful: list[str] = []  # keys of records for this time only: the next run tries again

    def grade(self, progress: Progress) -> list[Graded]:
        found = find(self.course, self.lab, list(self.settings.students))
        release = self._register()
        self._common = [self._source_digest(), release.digest, code_digest(), self.kind]
        rows = {each.student: Graded(each.student) for each in found}
        stamps = {each.student: self._stamp(each, rows[each.student]) for each in found}
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
        for row in (row for row in rows.values() if not row.failed):
            try:
                assign_penalty(self.config, self.database, self.lab, row.student)
            except Exception as error:  # a plugin of the course's own
                row.failed = f"its late penalty: {_in_words(error)}"
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

    def _stamp(self, submission: Submission, row: Graded) -> str:
        """All that the marks of a submission depend on; one that cannot even be read has a problem from here on."""
        try:
            submission.student.encode()  # the gradebook knows text only
            facts = [submission.digest, *self._common]
        except UnicodeEncodeError:
            row.failed = "the name of its folder is no text: rename it"
            return ""
        except (OSError, ConfigError) as error:
            row.problem = _in_words(error)
            return ""
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()

    def _note(self, student: str) -> Path:
        return self.state / "graded" / self.lab / f"{student}.json"

    def _as_before(self, row: Graded, stamp: str) -> bool:
        """Whether it was graded from the same bytes and nobody threw that away; the row is filled in then."""
        if self.settings.again or not stamp:
            return False
        try:
            note = json.loads(self._note(row.student).read_text())
        except (OSError, ValueError):
            return False
        there = self._autograded(row.student).is_dir()
        if note.get("stamp") != stamp or note["troubles"] or not (there or (note["problem"] and not note["counts"])):
            return False
        row.unchanged, row.notes, row.problem, row.counts = True, note["notes"], note["problem"], note["counts"]
        return True

    def _autograded(self, student: str) -> Path:
        return Path(self.course.directory.format_path(self.course.directory.autograded_directory, student, self.lab))

    def _prepare(self, submission: Submission, row: Graded, release: Release) -> Sheet | None:
        """The sheet of a submission that has to be marked; None if that is not possible, or was done before."""
        if row.problem or row.failed:
            return None
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
        def keep(key: str, record: Record) -> None:
            self._doubtful += [key] if record.troubles else []
            self.records.keep(key, record)

        same: dict[str, list[str]] = {}  # key → the students whose notebooks are the same to the byte
        for student, sheet in sheets.items():
            same.setdefault(sheet.key(self.kind), []).append(student)
        cores = os.cpu_count() or 1
        jobs = min(self.settings.jobs or cores, max(1, len(same)))
        limits = replace(self.settings.limits, cpus=max(1.0, cores / jobs))
        pool, marked = Pool(jobs, self.kind, limits), 0
        todo = [(key, sheets[students[0]]) for key, students in same.items()]
        with contextlib.closing(pool.marked(todo, keep)) as results:
            for key, found in results:
                for student in same[key]:
                    _note_found(rows[student], found, first=student == same[key][0])
                marked += len(same[key])
                progress("grading", marked, len(sheets))

    def _write(self, submission: Submission, row: Graded, stamp: str) -> None:
        """Have nbgrader write what it knows now into the gradebook; a failure of ours costs no student anything."""
        try:
            if row.problem:
                with Gradebook(self.database) as gradebook:
                    if self._autograded(submission.student).is_dir():
                        row.counts = _earlier(gradebook, self.lab, submission.student)
                    if not row.counts:
                        _zero(gradebook, self.lab, submission.student)
            elif not row.failed:
                self._autograde(submission.student, force=True).start()
        except Exception as error:
            row.failed = _in_words(error)
        if row.failed:
            return
        file = self._note(submission.student)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**asdict(row), "stamp": stamp}))

    def _autograde(self, student: str, force: bool = False) -> Any:
        config = copy.deepcopy(self.config)
        config.CourseDirectory.update(student_id=student, assignment_id=self.lab)
        converter = _AutogradeOne(coursedir=CourseDirectory(config=config), config=config)
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


class _AutogradeOne(Autograde):
    """Of one student, whose name is a name: nbgrader takes it as a pattern for folders."""

    def init_notebooks(self) -> None:
        """The notebooks in the folder of that very name."""
        folder = str(self._format_source(self.coursedir.assignment_id, self.coursedir.student_id))
        self.notebooks: list[str] = []
        self.assignments: dict[str, list[str]] = {folder: sorted(str(each) for each in Path(folder).glob("*.ipynb"))}


def _note_found(row: Graded, found: Record | Exception, first: bool) -> None:
    """What marking gave, in the row of one of those who handed in the same; the time is that of the first."""
    if isinstance(found, Exception):
        row.failed = _in_words(found)
        return
    row.notes, row.troubles = [*row.notes, *found.notes], found.troubles
    row.seconds = found.seconds if first else 0.0


def _fill_in(row: Graded, gradebook: Gradebook, lab: str) -> None:
    with contextlib.suppress(MissingEntry, UnicodeEncodeError):
        found = gradebook.find_submission(lab, row.student)
        row.penalty, row.late_s = float(found.late_submission_penalty or 0), float(found.total_seconds_late or 0)
        row.score = max(0.0, float(found.score) - row.penalty)
        row.points, row.manual = float(found.max_score), bool(found.needs_manual_grade)


def _earlier(gradebook: Gradebook, lab: str, student: str) -> str:
    """Which hand-in the marks in the gradebook are of; its comments and feedback are too."""
    with contextlib.suppress(MissingEntry):
        at = gradebook.find_submission(lab, student).timestamp
        return f"the one {f'of {at:%Y-%m-%d %H:%M:%S} UTC, ' if at else ''}that was graded before"
    return ""


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
