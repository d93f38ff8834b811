"""Everything that was ever handed in: `received/<lab>/<student>/<time of receipt>-<digest>/`, never overwritten.

One of them counts, and lies in `submitted/<student>/<lab>/`, where nbgrader looks: the one that was received last, or
the one that the instructor chose. What lay there before and came from elsewhere is kept here first.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from ftlab.errors import ConfigError
from ftlab.grading.course.course import Course
from ftlab.grading.course.parcel import MANIFEST, Parcel
from ftlab.grading.course.record import digests
from ftlab.grading.course.release import swap

FOLDER = "received"  # in the course's folder
RECEIPT = "receipt.json"
_CHOICE = "chosen.json"
_STAMP = "timestamp.txt"  # nbgrader goes by it for lateness


@dataclass(frozen=True)
class HandIn:
    """One of a student's hand-ins for one lab."""

    place: Path
    received: datetime
    source: str  # the file that it came in
    content: str  # a digest of the student's files

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        return self.place.name

    def __str__(self) -> str:
        return f"received {self.received:%Y-%m-%d %H:%M:%S} UTC in {self.source}"


class Received:
    """The hand-ins of one student for one lab."""

    def __init__(self, course: Course, lab: str, student: str) -> None:
        self._folder = course.root / FOLDER / lab / student
        self._submitted = course.submitted / student / lab

    def all(self) -> list[HandIn]:
        """By the time of receipt."""
        found = [_read(each) for each in self._folder.iterdir()] if self._folder.is_dir() else []
        return sorted((each for each in found if each), key=lambda each: (each.received, each.name))

    def keep(self, parcel: Parcel, source: str, at: datetime) -> tuple[HandIn, bool]:
        """Write one, unless the same files are there; with whether it is new."""
        content = _content(parcel.files)
        same = [each for each in self.all() if each.content == content]
        if same:
            return same[0], False
        files = {**parcel.files, MANIFEST: json.dumps(asdict(parcel.manifest), indent=1).encode(),
                 _STAMP: f"{at:%Y-%m-%d %H:%M:%S} UTC\n".encode()}
        return self._write(files, content, source, at), True

    def counting(self) -> HandIn:
        """The one that counts. Raises ConfigError if there is none."""
        hand_ins = self.all()
        if not hand_ins:
            raise ConfigError(f"there is nothing in {self._folder}")
        named = self.choice()
        return next((each for each in hand_ins if each.name == named), hand_ins[-1])

    def choice(self) -> str:
        """The name of the one that the instructor chose; empty if nothing was chosen."""
        try:
            return str(json.loads((self._folder / _CHOICE).read_text())["name"])
        except (OSError, ValueError, LookupError, TypeError):
            return ""

    def choose(self, name: str) -> HandIn:
        """Let this one count, whatever comes later; "newest" takes that back. Raises ConfigError if it is not there."""
        names = [each.name for each in self.all()]
        if name == "newest":
            (self._folder / _CHOICE).unlink(missing_ok=True)
        elif name in names:
            (self._folder / _CHOICE).write_text(json.dumps({"name": name}))
        else:
            raise ConfigError(f"there is no {name} in {self._folder}", hint=f"one of {', '.join(names)} or newest")
        return self.submit()

    def submit(self) -> HandIn:
        """Put the one that counts where nbgrader looks, if it is not there yet."""
        self._keep_foreign()
        counting = self.counting()
        if _same(counting.place, self._submitted):
            return counting
        self._submitted.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".collect-", dir=self._submitted.parents[1]) as temporary:
            fresh = Path(temporary) / self._submitted.name
            shutil.copytree(counting.place, fresh, ignore=shutil.ignore_patterns(RECEIPT), symlinks=True)
            swap(fresh, self._submitted)
        return counting

    def _keep_foreign(self) -> None:
        """What lies in `submitted/` and did not come from here is a hand-in too."""
        if not self._submitted.is_dir() or self._submitted.is_symlink():
            return
        if any(_same(each.place, self._submitted) for each in self.all()):
            return
        files = {path.relative_to(self._submitted).as_posix(): path for path in sorted(self._submitted.rglob("*"))
                 if path.is_file() and not path.is_symlink()}
        own = {name: path for name, path in files.items() if name not in (MANIFEST, _STAMP)}
        newest = max((path.stat().st_mtime for path in files.values()), default=0.0)
        at = min(datetime.now(UTC), datetime.fromtimestamp(newest, UTC))
        name = hashlib.sha256(json.dumps(digests(self._submitted), sort_keys=True).encode()).hexdigest()
        self._write({name: path.read_bytes() for name, path in files.items()},
                    _content({name: path.read_bytes() for name, path in own.items()}), "submitted/", at, name)

    def _write(self, files: dict[str, bytes], content: str, source: str, at: datetime, mark: str = "") -> HandIn:
        self._folder.mkdir(parents=True, exist_ok=True)
        place = self._folder / f"{at:%Y%m%dT%H%M%SZ}-{(mark or content)[:8]}"
        receipt = {"received": at.isoformat(), "source": source, "content": content}
        with tempfile.TemporaryDirectory(prefix=".new-", dir=self._folder) as temporary:
            fresh = Path(temporary) / "hand-in"
            for name, raw in {**files, RECEIPT: json.dumps(receipt, indent=1).encode()}.items():
                (fresh / name).parent.mkdir(parents=True, exist_ok=True)
                (fresh / name).write_bytes(raw)
            fresh.rename(place)
        return HandIn(place, at, source, content)


def _content(files: dict[str, bytes]) -> str:
    sha = hashlib.sha256()
    for name, raw in sorted(files.items()):
        sha.update(f"{name}\0{hashlib.sha256(raw).hexdigest()}\0".encode("utf-8", "surrogateescape"))
    return sha.hexdigest()


def _read(place: Path) -> HandIn | None:
    try:
        receipt = json.loads((place / RECEIPT).read_text())
        return HandIn(place, datetime.fromisoformat(receipt["received"]), str(receipt["source"]),
                      str(receipt["content"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _same(kept: Path, there: Path) -> bool:
    ours = {name: digest for name, digest in digests(kept).items() if name != RECEIPT}
    return there.is_dir() and ours == digests(there)
