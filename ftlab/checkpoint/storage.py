"""Where checkpoints are kept: a folder of this machine, or anything that fsspec has a name for.

A storage holds *folders* of files. A file is whole and durable when `write` returns; that it can also be *found* after
a power failure is only sure after `sync`. On an object store a file appears when it is complete, so `sync` has nothing
to do there. Nothing is ever renamed: an object store cannot, and a marker that is written last needs no renaming.
`create` is the one conditional step that there is: of several who create the same file, one does, and it is whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

from ftlab.errors import CheckpointError, StorageError

Read = Callable[[int, Sequence[memoryview]], int]  # from a place in a file into memory: how many bytes came
_MANY = 512  # buffers in one system call
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE; only a hint, so its answer does not matter
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_BLOCK = 4096  # what goes straight to the disk is aligned to this, in memory and in the file
_LARGE = 1 << 20  # smaller pieces go through the page cache
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_libc = ctypes.CDLL(None, use_errno=True)


class Storage(Protocol):
    """Folders of files under one root."""

    url: str
    at_once: int  # bytes that it is best asked for at a time

    def folders(self) -> list[str]:
        """The names of all folders."""

    def files(self, folder: str) -> dict[str, int]:
        """The files in a folder and their sizes; empty if there is no such folder."""

    def write(self, folder: str, name: str, pieces: Iterable[memoryview | bytes]) -> None:
        """Write a whole file; its content is durable when this returns."""

    def create(self, folder: str, name: str, data: bytes) -> bool:
        """Write a small file into a folder that is there, unless it has one by that name; whether this call did it.

        Nobody ever sees a part of it: it is not there, or whole.
        """

    def sync(self, folder: str) -> None:
        """Make the names of a folder and its files durable."""

    def read(self, folder: str, name: str) -> bytes:
        """A small file."""

    def open(self, folder: str, name: str) -> contextlib.AbstractContextManager[Read]:
        """A large file, of which any part can be read into memory, by several threads at once."""

    def remove(self, folder: str, first: str) -> None:
        """Delete a folder, the file called `first` before the others."""


def open_storage(url: str) -> Storage:
    """The storage for a path or an fsspec URL; its root is made if it is not there."""
    if is_local(url):
        return LocalStorage(url.removeprefix("file://"))
    return ObjectStorage(url)


def is_local(url: str) -> bool:
    """Whether a path or a URL names a folder of this machine, so that no network is needed to reach it."""
    return urlparse(url).scheme in ("", "file")


class LocalStorage:
    """A folder of a POSIX file system, shared or not."""

    at_once = 2 << 20  # still in the cache when it goes through the digest

    def __init__(self, path: str) -> None:
        self.root = Path(path).expanduser().absolute()
        self.url = str(self.root)
        with _explained(f"cannot make the folder {self.root}"):
            self.root.mkdir(parents=True, exist_ok=True)

    def folders(self) -> list[str]:
        """The names of all folders."""
        with _explained(f"cannot look into {self.root}"):
            return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())

    def files(self, folder: str) -> dict[str, int]:
        """The files in a folder and their sizes."""
        with _explained(f"cannot look into {self.root / folder}"):
            try:
                return {entry.name: entry.stat().st_size for entry in os.scandir(self.root / folder)}
            except FileNotFoundError:
                return {}

    def write(self, folder: str, name: str, pieces: Iterable[memoryview | bytes]) -> None:
        """Write a file and fsync it."""
        with _explained(f"cannot write {self.root / folder / name}"):
            (self.root / folder).mkdir(exist_ok=True)
            fd = os.open(self.root / folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                at = 0
                for piece in pieces:
                    at += _write_all(fd, memoryview(piece).cast("B"), at)
                os.fsync(fd)
            finally:
                os.close(fd)

    def create(self, folder: str, name: str, data: bytes) -> bool:
        """Write and fsync a file that nobody knows, then give it its name."""
        path = self.root / folder / name
        with _explained(f"cannot create {path}"):
            unnamed = path.with_name(f"{name}.{secrets.token_hex(8)}")
            fd = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                _write_all(fd, memoryview(data), 0)
                os.fsync(fd)
                return _link(unnamed, path)
            finally:
                os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(unnamed)

    def sync(self, folder: str) -> None:
        """Fsync the folder and the root that holds it."""
        with _explained(f"cannot sync {self.root / folder}"):
            for path in (self.root / folder, self.root):
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def read(self, folder: str, name: str) -> bytes:
        """A small file."""
        with _explained(f"cannot read {self.root / folder / name}"):
            return (self.root / folder / name).read_bytes()

    @contextlib.contextmanager
    def open(self, folder: str, name: str) -> Iterator[Read]:
        """Read straight into memory."""
        with _explained(f"cannot read {self.root / folder / name}"):
            fd = os.open(self.root / folder / name, os.O_RDONLY)
            try:
                yield lambda offset, buffers: _read_all(fd, offset, buffers)
            finally:
                os.close(fd)

    def remove(self, folder: str, first: str) -> None:
        """Delete a folder; what is left after a crash in between is no checkpoint any more."""
        with _explained(f"cannot remove {self.root / folder}"):
            (self.root / folder / first).unlink(missing_ok=True)
            self.sync(folder)
            shutil.rmtree(self.root / folder)


class ObjectStorage:
    """Anything fsspec reaches: s3://, gs://, memory://, and so on."""

    at_once = 16 << 20  # each is a request of its own

    def __init__(self, url: str) -> None:
        import fsspec  # only who uses it pays for it

        self.url = url.rstrip("/")
        scheme = urlparse(url).scheme
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            extra = {"s3": "pip install 'ftlab[s3]'", "gs": "pip install 'ftlab[gs]'"}.get(scheme, "check the URL")
            raise StorageError(f"cannot open {url}: {error}", hint=extra) from None

    def folders(self) -> list[str]:
        """The names of all folders."""
        with _explained(f"cannot list {self.url}"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
            return sorted(_name(entry["name"]) for entry in found if entry["type"] == "directory")

    def files(self, folder: str) -> dict[str, int]:
        """The files in a folder and their sizes."""
        with _explained(f"cannot list {self.url}/{folder}"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(f"{self._root}/{folder}", detail=True)
            except FileNotFoundError:
                return {}
            return {_name(entry["name"]): int(entry["size"]) for entry in found if entry["type"] == "file"}

    def write(self, folder: str, name: str, pieces: Iterable[memoryview | bytes]) -> None:
        """Upload a file; it appears when it is complete."""
        with _explained(f"cannot write {self.url}/{folder}/{name}"):
            self._fs.makedirs(f"{self._root}/{folder}", exist_ok=True)
            with self._fs.open(f"{self._root}/{folder}/{name}", "wb") as file:
                for piece in pieces:
                    file.write(piece)

    def create(self, folder: str, name: str, data: bytes) -> bool:
        """Upload a file on condition that there is none (S3: `If-None-Match: *`)."""
        with _explained(f"cannot create {self.url}/{folder}/{name}"):
            try:
                self._fs.pipe_file(f"{self._root}/{folder}/{name}", data, mode="create")
            except FileExistsError:
                return False
            return True

    def sync(self, folder: str) -> None:
        """Nothing to do: what was uploaded is there."""

    def read(self, folder: str, name: str) -> bytes:
        """A small file."""
        with _explained(f"cannot read {self.url}/{folder}/{name}"):
            return bytes(self._fs.cat_file(f"{self._root}/{folder}/{name}"))

    @contextlib.contextmanager
    def open(self, folder: str, name: str) -> Iterator[Read]:
        """Download the part that is asked for."""
        path = f"{self._root}/{folder}/{name}"

        def read(offset: int, buffers: Sequence[memoryview]) -> int:
            size = sum(len(buffer) for buffer in buffers)
            data = memoryview(self._fs.cat_file(path, start=offset, end=offset + size) if size else b"")
            done = 0
            for buffer in buffers:
                part = data[done:done + len(buffer)]
                buffer[:len(part)] = part
                done += len(part)
            return done

        with _explained(f"cannot read {self.url}/{folder}/{name}"):
            self._fs.info(path)
            yield read

    def remove(self, folder: str, first: str) -> None:
        """Delete a folder, its marker before the rest."""
        with _explained(f"cannot remove {self.url}/{folder}"):
            if first in self.files(folder):
                self._fs.rm_file(f"{self._root}/{folder}/{first}")
            with contextlib.suppress(FileNotFoundError):  # on an object store a folder goes with its last file
                self._fs.rm(f"{self._root}/{folder}", recursive=True)


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _write_all(fd: int, data: memoryview, at: int) -> int:
    """Write everything: whole blocks straight from memory to the disk, without the copy into the page cache that would
    take memory bandwidth from training; the rest, and all of it where the file system cannot, through the cache."""
    left = _write_straight(fd, data) if len(data) >= _LARGE and _O_DIRECT else data
    start = at + len(data) - len(left)
    while left:
        left = left[os.write(fd, left):]
    if start < at + len(data) and hasattr(_libc, "sync_file_range"):  # fsync then finds little left to do
        _libc.sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(at + len(data) - start), _BEGIN_WRITING)
    return len(data)


def _write_straight(fd: int, data: memoryview) -> memoryview:
    """Write whole blocks past the page cache; what is left to write in the usual way."""
    flags, left = fcntl.fcntl(fd, fcntl.F_GETFL), data
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT)
        while len(left) >= _BLOCK:
            left = left[os.write(fd, left[:len(left) // _BLOCK * _BLOCK]):]
    except OSError as error:
        if error.errno != errno.EINVAL:  # not on this file system, or not from this memory
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return left


def _link(unnamed: Path, path: Path) -> bool:
    """Give a file its name, unless another one has it."""
    try:
        os.link(unnamed, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        return _rename(unnamed, path)  # a file system without hard links
    return True


def _rename(unnamed: Path, path: Path) -> bool:
    """Rename a file, unless there is one by the new name."""
    if _libc.renameat2(_AT_FDCWD, bytes(unnamed), _AT_FDCWD, bytes(path), _RENAME_NOREPLACE) == 0:
        return True
    number = ctypes.get_errno()
    if number == errno.EEXIST:
        return False
    raise OSError(number, os.strerror(number), str(path))


def _read_all(fd: int, offset: int, buffers: Sequence[memoryview]) -> int:
    """Fill all buffers from one place on, or up to the end of the file."""
    done = 0
    left = [buffer for buffer in buffers if len(buffer)]
    while left and (count := os.preadv(fd, left[:_MANY], offset + done)):
        done += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return done


@contextlib.contextmanager
def _explained(what: str) -> Iterator[Any]:
    """Whatever a client library raises becomes a StorageError that says what was being done."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        seen = f"{type(error).__name__}: {error}"
        raise StorageError(what, seen=seen[:500], hint=_HINTS.get(getattr(error, "errno", None) or 0, "")) from error


_HINTS = {28: "the disk is full: remove something, or keep fewer checkpoints (keep_last_n)",
          30: "the file system is read-only: mount it writable, or choose another folder",
          13: "no permission: choose a folder that you may write to",
          22: "can this file system neither link nor rename on condition? choose another folder"}
