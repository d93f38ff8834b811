"""Files that may be submissions, out of a folder, an archive, or archives in a folder.

They are read in memory, each up to a limit; links are never followed, and no name in an archive becomes a path.
"""

from __future__ import annotations

import os
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from ftlab.errors import ConfigError
from ftlab.grading.course.parcel import MANIFEST, MAX_PARCEL

_MAX_ENTRIES = 20_000  # of one archive with many submissions


@dataclass(frozen=True, kw_only=True)
class Found:
    """A file that may be a submission; one that is too long is one byte longer than the limit."""

    name: str  # its path, with that of the archive before it
    raw: bytes
    at: datetime  # when it was written


def files(place: Path) -> Iterator[Found]:
    """Parcels and notebooks at a place; archives inside of it are opened once, not archives in those."""
    if place.is_dir():
        for folder, _, names in os.walk(place):
            for name in sorted(names):
                path = Path(folder, name)
                if not path.is_symlink() and path.is_file():
                    yield from _file(path, path.relative_to(place).as_posix())
    elif place.is_file():
        yield from _file(place, place.name)
    else:
        raise ConfigError(f"there is no {place}", hint="name a folder or an archive with what students handed in")


def _file(path: Path, name: str) -> Iterator[Found]:
    at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    if path.suffix == ".ipynb":
        yield Found(name=name, raw=_limited(path), at=at)
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if MANIFEST in archive.namelist():
                yield Found(name=name, raw=_limited(path), at=at)
            else:
                yield from _zipped(archive, name)
    elif path.suffix in (".tar", ".tgz", ".gz", ".bz2", ".xz") and tarfile.is_tarfile(path):
        with tarfile.open(path) as tar:
            yield from _tarred(tar, name)
    elif path.suffix == ".zip":
        yield Found(name=name, raw=_limited(path), at=at)  # a broken one, to be refused by its name


def _limited(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_PARCEL + 1)


def _zipped(archive: zipfile.ZipFile, name: str) -> Iterator[Found]:
    listed = archive.infolist()
    _refuse_too_many(len(listed), name)
    for each in listed:
        if _wanted(each.filename) and not stat.S_ISLNK(each.external_attr >> 16):
            try:
                with archive.open(each) as file:
                    raw = file.read(MAX_PARCEL + 1)
            except (zipfile.BadZipFile, RuntimeError, OSError, NotImplementedError):
                raw = b""
            yield Found(name=f"{name}/{each.filename}", raw=raw, at=_zip_time(each.date_time))


def _tarred(tar: tarfile.TarFile, name: str) -> Iterator[Found]:
    for count, each in enumerate(tar):
        _refuse_too_many(count, name)
        file = tar.extractfile(each) if each.isreg() and _wanted(each.name) else None
        if file:
            yield Found(name=f"{name}/{each.name}", raw=file.read(MAX_PARCEL + 1),
                         at=datetime.fromtimestamp(each.mtime, UTC))


def _refuse_too_many(count: int, name: str) -> None:
    if count > _MAX_ENTRIES:
        raise ConfigError(f"{name} holds more than {_MAX_ENTRIES} files", hint="collect it in parts")


def _wanted(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix in (".ipynb", ".zip") and not path.name.startswith(".") and "__MACOSX" not in path.parts


def _zip_time(at: tuple[int, ...]) -> datetime:
    try:
        return datetime(*at[:6], tzinfo=UTC)  # type: ignore[arg-type, misc]
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
