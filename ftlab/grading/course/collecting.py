"""`ftlab collect`: what students handed in, from a folder or an archive, into `submitted/<student>/<lab>/`.

Archives are read in memory and only for what we look for; the paths that are written are made of a lab's name, a
student's name that was checked, and fixed names. Links are never followed.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from ftlab.errors import ConfigError
from ftlab.grading.course.course import LAB, Course
from ftlab.grading.course.inbox import Found, files
from ftlab.grading.course.parcel import MAX_PARCEL, STUDENT, Manifest, Parcel, digest, is_parcel
from ftlab.grading.course.record import Record
from ftlab.grading.course.release import swap

_NAMED = re.compile(r"(?P<lab>lab\d\d)[-_](?P<student>[^/]+?)\.(ipynb|zip)$")  # what ftlab submit calls its files
_FOLDERS = re.compile(r"(^|/)(?P<student>[^/]+)/(?P<lab>lab\d\d)/[^/]+\.ipynb$")  # nbgrader's own folders


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What became of one file."""

    file: str
    student: str = ""
    lab: str = ""
    outcome: str  # "taken", "as before", "older", "refused"
    why: str = ""
    notes: tuple[str, ...] = ()  # what an instructor should know though it was taken


def collect(course: Course, place: Path, pattern: str = "") -> list[Taken]:
    """Take in everything in a folder, an archive or a single file; one that is refused does not stop the others.

    `pattern` is a regular expression with a group `student` (and perhaps `lab`), searched in each file's path: it then
    decides whose it is. Raises ConfigError if the place cannot be read.
    """
    by_path = _compiled(pattern)
    known = course.labs()
    results: list[Taken] = []
    best: dict[tuple[str, str], tuple[Parcel, Found, tuple[str, ...]]] = {}
    for found in files(place):
        try:
            parcel, notes = _open(course, found, by_path, known)
        except ConfigError as error:
            results.append(Taken(file=found.name, outcome="refused", why=str(error.message)))
            continue
        key = (parcel.manifest.student, parcel.manifest.lab)
        rival = best.get(key)
        if rival and _moment(rival[0].manifest.made) > _moment(parcel.manifest.made):
            results.append(_taken(parcel, found, "older", f"{rival[1].name} is newer"))
            continue
        if rival:
            results.append(_taken(rival[0], rival[1], "older", f"{found.name} is newer"))
        best[key] = (parcel, found, notes)
    for parcel, found, notes in best.values():
        outcome, why = _store(course, parcel)
        results.append(replace(_taken(parcel, found, outcome, why), notes=notes))
    return sorted(results, key=lambda each: (each.lab, each.student, each.file))


# ---- what it is, and whose ----------------------------------------------------------------------------------


def _open(course: Course, found: Found, by_path: re.Pattern[str] | None,
          known: list[str]) -> tuple[Parcel, tuple[str, ...]]:
    """The parcel, with the name of student and lab that it is filed under, and what is odd about it."""
    if len(found.raw) > MAX_PARCEL:
        raise ConfigError(f"it is larger than {MAX_PARCEL >> 20} MB")
    named = (by_path or _NAMED).search(found.name) or (None if by_path else _FOLDERS.search(found.name))
    if by_path and not named:
        raise ConfigError("its path does not match the pattern")
    groups = named.groupdict() if named else {}
    parcel = Parcel.read(found.raw, "it") if is_parcel(found.raw) else _bare(course, found, groups)
    notes = [f"{', '.join(parcel.altered)} changed after packing"] if parcel.altered else []
    manifest = parcel.manifest
    student = str(groups.get("student") if by_path else manifest.student)
    if student != manifest.student:
        notes.append(f"its manifest says {manifest.student[:64]!r}, its path {student!r}")
    if not STUDENT.fullmatch(student):
        raise ConfigError(f"{student[:64]!r} cannot be a student's name: letters, digits and ._@- only")
    if manifest.lab not in known:
        raise ConfigError(f"it is for {manifest.lab[:20]!r}; the labs are {', '.join(known)}")
    _moment(manifest.made)
    notes += [f"packed from another release ({manifest.release})"] if _stale(course, manifest) else []
    return Parcel(replace(manifest, student=student), parcel.files), tuple(notes)


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


def _moment(text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text[:40]!r} is no time") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


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


# ---- where it goes ------------------------------------------------------------------------------------------


def _store(course: Course, parcel: Parcel) -> tuple[str, str]:
    """Write a submission; gives its outcome and why."""
    manifest = parcel.manifest
    place = course.submitted / manifest.student / manifest.lab
    before = _before(place)
    if before and before.files == manifest.files:
        return "as before", ""
    if before and _moment(before.made) > _moment(manifest.made):
        return "older", f"the one that is there is of {before.made}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".collect-", dir=course.submitted) as temporary:
        fresh = Path(temporary) / manifest.lab
        (fresh / "evidence").mkdir(parents=True)
        for name, raw in parcel.files.items():
            (fresh / name).write_bytes(raw)
        if not any((fresh / "evidence").iterdir()):
            (fresh / "evidence").rmdir()
        (fresh / "manifest.json").write_text(json.dumps(asdict(manifest), indent=1))
        at = _moment(manifest.made).astimezone(UTC)
        (fresh / "timestamp.txt").write_text(f"{at:%Y-%m-%d %H:%M:%S} UTC\n")  # nbgrader goes by it for lateness
        swap(fresh, place)
    return "taken", f"in place of the one of {before.made}" if before else ""


def _before(place: Path) -> Manifest | None:
    try:
        data = json.loads((place / "manifest.json").read_text())
        return Manifest(**data)
    except (OSError, ValueError, TypeError):
        return None


def _taken(parcel: Parcel, found: Found, outcome: str, why: str) -> Taken:
    return Taken(file=found.name, student=parcel.manifest.student, lab=parcel.manifest.lab, outcome=outcome, why=why)
