"""Files that may be submissions, out of a folder, an archive, or archives in a folder.

One after the other, each read in memory up to a limit; links are never followed, and no name in an archive becomes a
path. An archive that is damaged, or that would unpack to too much, is told of by its name, and the next file follows.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ftlab.errors import ConfigError
from ftlab.grading.course.parcel import MANIFEST, MAX_PARCEL

_MAX_ENTRIES = 20_000  # of one archive with many submissions
_MAX_DIRECTORY = 8 << 20  # bytes of a zip's list of files: Python reads it as a whole
_MAX_UNPACKED = 8 << 30  # bytes of one tar
_ZIP_END = struct.Struct("<4s4H2LH")  # the record at the end of a zip; its sixth field is the size of the list
_PACKED: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.GzipFile, b"BZh": bz2.BZ2File,
                                               b"\xfd7zXZ": lzma.LZMAFile}


@dataclass(frozen=True, kw_only=True)
class Found:
    """A file that may be a submission; one that is too long is one byte longer than the limit."""

    name: str  # its path, with that of the archive before it
    raw: bytes = b""
    archive: str = ""  # the archive that it was in
    at: datetime  # when the file was written to this machine: of one in an archive, when the archive was
    inside_at: datetime | None = None  # of one in an archive: what the archive says
    damaged: str = ""  # why it, or the rest of the archive, cannot be read


def files(place: Path) -> Iterator[Found]:
    """Parcels and notebooks at a place; archives inside of it are opened once, not archives in those.

    Raises ConfigError if there is no such place.
    """
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
    """What is in one file; whatever reading it raises, it is that file's."""
    at = datetime.now(UTC)
    try:
        at = _time(path.stat().st_mtime)
        yield from _opened(path, name, at)
    except Exception as error:
        words = error.message if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"[:200]
        yield Found(name=name, at=at, damaged=f"it cannot be read to its end: {words}")


def _opened(path: Path, name: str, at: datetime) -> Iterator[Found]:
    if path.suffix == ".ipynb":
        yield Found(name=name, raw=_limited(path), at=at)
    elif zipfile.is_zipfile(path):
        _refuse_long_list(path)
        with zipfile.ZipFile(path) as archive:
            if MANIFEST in archive.namelist():
                yield Found(name=name, raw=_limited(path), at=at)
            else:
                yield from _zipped(archive, name, at)
    elif path.name.endswith((".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")):
        with _unpacked(path) as content, tarfile.open(fileobj=content, mode="r:") as tar:
            yield from _tarred(tar, name, at)
    elif path.suffix == ".zip":
        yield Found(name=name, at=at, damaged="it is no zip, or only a part of one")


def _limited(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_PARCEL + 1)


def _zipped(archive: zipfile.ZipFile, name: str, at: datetime) -> Iterator[Found]:
    listed = archive.infolist()
    _refuse_too_many(len(listed))
    for each in listed:
        if not _wanted(each.filename) or stat.S_ISLNK(each.external_attr >> 16):
            continue
        entry = Found(name=f"{name}/{each.filename}", archive=name, at=at, inside_at=_zip_time(each.date_time))
        try:
            with archive.open(each) as file:
                raw = file.read(MAX_PARCEL + 1)
        except Exception as error:  # a dozen kinds, by what was damaged and how it was packed
            yield _damaged(entry, error)
        else:
            yield _with(entry, raw)


def _tarred(tar: tarfile.TarFile, name: str, at: datetime) -> Iterator[Found]:
    for count, each in enumerate(tar):
        _refuse_too_many(count)
        file = tar.extractfile(each) if each.isreg() and _wanted(each.name) else None
        if file:
            yield Found(name=f"{name}/{each.name}", raw=file.read(MAX_PARCEL + 1), archive=name, at=at,
                        inside_at=_time(each.mtime))


class _Bounded(io.RawIOBase):
    """A file that is unpacked as it is read: never too much at once, nor in all, whatever its headers ask for."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1) -> bytes:
        """So many bytes."""
        if not 0 <= size <= 2 * MAX_PARCEL or self._file.tell() + size > _MAX_UNPACKED:
            raise ConfigError("it would unpack to too much")
        return self._file.read(size)

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        if position > _MAX_UNPACKED:
            raise ConfigError(f"it would unpack to more than {_MAX_UNPACKED >> 30} GB")
        return self._file.seek(position, whence)

    def tell(self) -> int:
        """Where it is."""
        return self._file.tell()

    def close(self) -> None:
        """Close both."""
        self._file.close()
        super().close()


def _unpacked(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        begin = file.read(6)
    kind = next((way for magic, way in _PACKED.items() if begin.startswith(magic)), io.FileIO)
    return _Bounded(kind(path))  # type: ignore[return-value]


def _refuse_long_list(path: Path) -> None:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16) - _ZIP_END.size))
        tail = file.read()
    last = tail.rfind(b"PK\5\6")
    if last >= 0 and len(tail) - last >= _ZIP_END.size and _ZIP_END.unpack_from(tail, last)[5] > _MAX_DIRECTORY:
        raise ConfigError(f"its list of files is longer than {_MAX_DIRECTORY >> 20} MB")


def _refuse_too_many(count: int) -> None:
    if count > _MAX_ENTRIES:
        raise ConfigError(f"it holds more than {_MAX_ENTRIES} files", hint="collect it in parts")


def _wanted(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix in (".ipynb", ".zip") and not path.name.startswith(".") and "__MACOSX" not in path.parts


def _damaged(entry: Found, error: Exception) -> Found:
    return Found(name=entry.name, archive=entry.archive, at=entry.at, damaged=f"{type(error).__name__}: {error}"[:200])


def _with(entry: Found, raw: bytes) -> Found:
    return Found(name=entry.name, raw=raw, archive=entry.archive, at=entry.at, inside_at=entry.inside_at)


def _time(seconds: float) -> datetime:
    """When a file was written; never later than now, however its clock went, and never so early that no calendar has
    it."""
    now = datetime.now(UTC)
    try:
        return min(now, datetime.fromtimestamp(max(0.0, seconds), UTC))
    except (ValueError, OverflowError, OSError):
        return now


def _zip_time(at: tuple[int, ...]) -> datetime:
    try:
        return min(datetime.now(UTC), datetime(*at[:6], tzinfo=UTC))  # type: ignore[arg-type, misc]
    except ValueError:
        return datetime.now(UTC)
