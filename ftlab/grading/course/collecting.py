"""`ftlab collect`: what students handed in, from a folder or an archive, into `received/` and `submitted/`.

Whatever a student can write is his word only: the manifest, the name of a file, the dates in an archive. So a file
whose words contradict each other is refused, an archive is one student's unless the instructor says that it is the
download of a course, and what counts is the time of receipt. Nothing that was received is ever overwritten.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path, PurePosixPath

from ftlab.errors import ConfigError
from ftlab.grading.course import roster as rosters
from ftlab.grading.course.course import LAB, Course
from ftlab.grading.course.downloads import sender
from ftlab.grading.course.inbox import Found, files
from ftlab.grading.course.parcel import MAX_PARCEL, STUDENT, Manifest, Parcel, digest, is_parcel
from ftlab.grading.course.received import FOLDER, HandIn, Received
from ftlab.grading.course.record import Record
from ftlab.grading.course.roster import Roster

_NAMED = re.compile(r"(?P<lab>lab\d\d)[-_](?P<student>[^/]+?)( ?\(\d+\))?\.(ipynb|zip)$")  # what ftlab submit makes
_FOLDERS = re.compile(r"(^|/)(?P<student>[^/]+)/(?P<lab>lab\d\d)/[^/]+\.(ipynb|zip)$")  # nbgrader's own folders


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What became of one file."""

    file: str
    student: str = ""
    lab: str = ""
    outcome: str  # "taken", "as before", "older", "refused"
    why: str = ""
    notes: tuple[str, ...] = ()  # what an instructor should know though it was taken
    kept: str = ""  # the folder in received/


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the instructor says about a place: how it is known whose a file is."""

    pattern: str = ""  # a regular expression with a group `student`, perhaps `lab`, searched in each path: it decides
    download: bool = False  # of a learning platform: its paths decide, and it holds the work of many


def collect(course: Course, place: Path, rules: Rules | None = None) -> list[Taken]:
    """Take in everything in a folder, an archive or a single file; one that is refused does not stop the others.

    Raises ConfigError if there is no such place, or the roster cannot be read.
    """
    desk = _Desk(course, rules or Rules())
    crowded = {} if desk.rules.download or desk.by_path else _several(desk, place)
    results: list[Taken] = []
    fresh: list[tuple[Taken, HandIn]] = []
    for found in files(place):
        try:
            if found.archive in crowded:
                raise ConfigError(crowded[found.archive])
            taken, hand_in = desk.keep(found)
        except ConfigError as error:
            results.append(Taken(file=found.name, outcome="refused", why=str(error.message)))
        except Exception as error:  # whatever one file does, the next is looked at
            results.append(Taken(file=found.name, outcome="refused", why=f"{type(error).__name__}: {error}"[:300]))
        else:
            fresh.append((taken, hand_in))
    results += list(_settled(course, fresh))
    return sorted(results, key=lambda each: (each.lab, each.student, each.file))


def choose(course: Course, named: str) -> Taken:
    """Let a hand-in count that is named as `lab01/alice/20261118T…-…`, or `lab01/alice/newest`. Raises ConfigError."""
    parts = PurePosixPath(named.rstrip("/")).parts[-3:]
    if len(parts) != 3 or parts[0] not in course.labs() or not STUDENT.fullmatch(parts[1]):
        raise ConfigError(f"{named} names no hand-in",
                          hint=f"such as lab01/alice/20261118T080000Z-0a1b2c3d; see {FOLDER}/")
    lab, student, name = parts
    counts = Received(course, lab, student).choose(name)
    return Taken(file=counts.source, student=student, lab=lab, outcome="taken", why=str(counts), kept=counts.name)


def _settled(course: Course, fresh: list[tuple[Taken, HandIn]]) -> Iterator[Taken]:
    """Put what counts into `submitted/`, and say of each file whether it is that."""
    for student, lab in sorted({(taken.student, taken.lab) for taken, _ in fresh}):
        received = Received(course, lab, student)
        before = received.all()
        counts = received.submit()
        others = [each for each in before if each.name != counts.name]
        for taken, hand_in in fresh:
            if (taken.student, taken.lab) == (student, lab):
                yield _outcome(taken, hand_in, counts, others, received.choice())


def _outcome(taken: Taken, hand_in: HandIn, counts: HandIn, others: list[HandIn], choice: str) -> Taken:
    if hand_in.name == counts.name:
        earlier = [each for each in others if each.received <= counts.received]
        why = f"in place of the one {earlier[-1]}" if earlier and taken.outcome == "taken" else taken.why
        return replace(taken, why=why)
    by = "chosen by you" if choice == counts.name else "newer"
    return replace(taken, outcome="older" if taken.outcome == "taken" else taken.outcome,
                   why=f"kept; the one that counts is {by}: {counts}")


def _several(desk: _Desk, place: Path) -> dict[str, str]:
    """The archives that hold the work of more than one, and why they are refused."""
    students: dict[str, set[str]] = {}
    platform = ""
    for found in files(place):
        if found.archive and not found.damaged:
            try:
                students.setdefault(found.archive, set()).add(desk.open(found)[0].manifest.student)
            except Exception:  # it is told of when its turn comes
                continue
            known = sender(found.name.removeprefix(f"{found.archive}/"))
            platform = known.layout if known else platform
    hint = f" (its paths look like those of {platform})" if platform else ""
    return {name: f"the archive holds the work of {len(who)} students ({', '.join(sorted(who)[:3])}...): if it is the "
                  f"download of a course and no student's, add --download{hint}"
            for name, who in students.items() if len(who) > 1}


class _Desk:
    """What is needed to say what a file is, and whose."""

    def __init__(self, course: Course, rules: Rules) -> None:
        self.course, self.rules = course, rules
        self.by_path, self.labs = _compiled(rules.pattern), course.labs()
        self.roster = Roster.read(course.root)

    def keep(self, found: Found) -> tuple[Taken, HandIn]:
        """Keep what was handed in. Raises ConfigError with the reason to refuse it."""
        parcel, notes = self.open(found)
        student, lab = parcel.manifest.student, parcel.manifest.lab
        hand_in, new = Received(self.course, lab, student).keep(parcel, found.name, self._received(found))
        taken = Taken(file=found.name, student=student, lab=lab, outcome="taken" if new else "as before",
                      notes=tuple(notes), kept=hand_in.name)
        return taken, hand_in

    def open(self, found: Found) -> tuple[Parcel, list[str]]:
        """The parcel with the student and lab that it is filed under, and what is odd about it."""
        if found.damaged:
            raise ConfigError(found.damaged)
        if len(found.raw) > MAX_PARCEL:
            raise ConfigError(f"it is larger than {MAX_PARCEL >> 20} MB")
        groups = self._path_says(found)
        whole = is_parcel(found.raw)
        parcel = Parcel.read(found.raw, "it") if whole else _bare(self.course, found, groups)
        notes = [f"{', '.join(parcel.altered)} changed after packing"] if parcel.altered else []
        manifest, student = parcel.manifest, str(groups.get("student") or parcel.manifest.student)
        if student != manifest.student and not (self.by_path or self.rules.download):
            raise ConfigError(f"whose is it? its name says {student[:64]!r}, its manifest {manifest.student[:64]!r}: "
                              f"ask them, then --pattern or another name decides")
        if student != manifest.student:
            notes.append(f"IDENTITY: its manifest says {manifest.student[:64]!r}, its path {student!r}, which counts")
        if not groups.get("student"):
            notes.append("IDENTITY: only its manifest says whose it is")
        self._refuse(student, manifest)
        notes += [f"packed from another release ({manifest.release})"] if _stale(self.course, manifest) else []
        return Parcel(replace(manifest, student=student), parcel.files), notes

    def _refuse(self, student: str, manifest: Manifest) -> None:
        if not STUDENT.fullmatch(student):
            raise ConfigError(f"{student[:64]!r} cannot be a student's name: letters, digits and ._@- only")
        if self.roster is not None and student not in self.roster.ids:
            meant = self.roster.find(student)
            raise ConfigError(f"{student!r} is not in {rosters.FILE}" + (f": is {meant!r} meant?" if meant else ""))
        if manifest.lab not in self.labs:
            raise ConfigError(f"it is for {manifest.lab[:20]!r}; the labs are {', '.join(self.labs)}")

    def _path_says(self, found: Found) -> dict[str, str]:
        """Student and lab, as far as the path says."""
        if self.by_path:
            named = self.by_path.search(found.name)
            if not named:
                raise ConfigError("its path does not match the pattern")
            return {key: text for key, text in named.groupdict().items() if text}
        inside = found.name.removeprefix(f"{found.archive}/") if found.archive else found.name
        if self.rules.download and (who := sender(inside)):
            student = (self.roster.find(who.name, who.number) if self.roster else "") or who.own_id
            return {"student": student, "lab": who.lab or _lab_in(PurePosixPath(inside).name)}
        said = [named.groupdict() for each in (found.archive, inside)
                if (named := _NAMED.search(each) or _FOLDERS.search(each))]
        students = {each["student"] for each in said}
        if len(students) > 1:
            raise ConfigError(f"whose is it? its archive is named for {said[0]['student']!r}, it itself for "
                              f"{said[1]['student']!r}")
        return {key: str(text) for key, text in (said[-1] if said else {}).items()}

    def _received(self, found: Found) -> datetime:
        """When it came: of the download of a course, as the platform says; else when its file, or the archive around
        it, was written to this machine. Never what a student's clock says."""
        return min(found.at, found.inside_at) if self.rules.download and found.inside_at else found.at


def _bare(course: Course, found: Found, groups: dict[str, str]) -> Parcel:
    """A notebook that was handed in without `ftlab submit`."""
    if not found.name.endswith(".ipynb"):
        raise ConfigError("it is neither a notebook nor a file that ftlab submit made")
    lab, student = groups.get("lab") or _lab_in(found.name), groups.get("student", "")
    if not lab or not student:
        raise ConfigError("whose is it, and for which lab? call it lab01-STUDENT.ipynb, or give a --pattern")
    name = course.notebook(lab).name if lab in course.labs() else PurePosixPath(found.name).name
    manifest = Manifest(lab=lab, notebook=name, student=student, made=found.at.isoformat(timespec="seconds"),
                        files={name: digest(found.raw)})
    return Parcel(manifest, {name: found.raw})


def _lab_in(name: str) -> str:
    found = LAB.search(name)
    return found[0] if found else ""


def _stale(course: Course, manifest: Manifest) -> bool:
    record = Record.read(course.releases / manifest.lab)
    return bool(record and manifest.release and manifest.release != record.digest)


def _compiled(pattern: str) -> re.Pattern[str] | None:
    if not pattern:
        return None
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"--pattern is no regular expression: {error}") from None
    if "student" not in compiled.groupindex:
        raise ConfigError("--pattern needs a group of the name student",
                          hint=r"for example --pattern '(?P<student>[a-z0-9]+)_.*\.zip'")
    return compiled
