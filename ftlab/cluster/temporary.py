"""Temporary folders that do not pile up: below the user's run folder, where `ftlab doctor` and `ftlab reap` look.

    with TemporaryFolder("drill") as folder:
        ...

Beside each folder lies a file that its owner has locked (`flock`). The kernel frees the lock when the owner is gone,
however it ended, also if its pid belongs to somebody else by now; so a lock that can be taken proves that the folder is
abandoned. A folder goes with its owner. Where the owner was killed, the next folder that is made, and `ftlab reap`,
remove it. A process that the owner forked keeps the lock as well, as it may use the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ftlab.config import is_private, runs_dir
from ftlab.errors import ConfigError

_LOCK = ".lock"


class TemporaryFolder:
    """A new private folder; it goes when it is closed, with this object, or with this process."""

    def __init__(self, purpose: str, within: Path | None = None) -> None:
        """`purpose` is the first word of its name; `within` is a folder of the caller's to put it into."""
        parent = within if within is not None else private_base()
        sweep(parent)
        self.path, lock = _locked(parent.resolve(), purpose)
        self._end = weakref.finalize(self, _remove_own, self.path, lock, os.getpid())
        self.path.mkdir(mode=0o700)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove it with all that is in it; may be called twice."""
        self._end()


def private_base() -> Path:
    """The run folder of this user, made if need be; nobody else can list it."""
    while True:  # somebody else may take its name in just this moment
        base = runs_dir()
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder for running clusters cannot be made: {base}: {error.strerror}",
                              hint="export FTLAB_RUNS=/a/folder/of/yours") from None
        if is_private(base):
            if base.stat().st_mode & 0o066:
                base.chmod(0o700)
            return base


def has_lock(folder: Path) -> bool:
    """Whether this is one of these folders, in use or not."""
    return _lock_of(folder).is_file()


def in_use(folder: Path) -> bool:
    """Whether a folder's owner lives; also true where that cannot be found out."""
    try:
        with _lock_of(folder).open("rb") as lock:
            return not _take(lock)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def abandoned(parent: Path) -> Iterator[Path]:
    """The folders in here whose owners are gone; of some only the lock may be left."""
    for lock in sorted(parent.glob(f"*{_LOCK}")):
        folder = lock.with_name(lock.name.removesuffix(_LOCK))
        if not in_use(folder):
            yield folder


def sweep(parent: Path) -> None:
    """Remove what is abandoned in here; what cannot be removed stays, and `ftlab doctor` tells of it."""
    for folder in abandoned(parent):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            remove_abandoned(folder)


def remove_abandoned(folder: Path) -> None:
    """Remove a folder with its lock, unless its owner lives or somebody else is about to remove it."""
    with contextlib.suppress(FileNotFoundError), _lock_of(folder).open("rb") as lock:
        if _take(lock):
            remove(folder)
            _lock_of(folder).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Delete a folder, also where student's code took the rights away; one that is not there is no error."""

    def retry(function: Callable[..., Any], path: str, error: Any) -> None:
        if isinstance(error[1], FileNotFoundError):
            return
        os.chmod(os.path.dirname(path), 0o700)
        if not os.path.islink(path):  # what a link leads to is not ours to change
            os.chmod(path, 0o700)
        function(path)

    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(folder, onerror=retry)
    except RecursionError:  # folders in folders, a thousand deep
        subprocess.run(["rm", "-rf", "--", str(folder)], check=True, timeout=60)


def _locked(parent: Path, purpose: str) -> tuple[Path, IO[bytes]]:
    """A new name in a folder, and its lock, which is ours."""
    while True:
        path = parent / f"{purpose}-{secrets.token_hex(4)}"
        lock = _lock_of(path).open("xb")
        if _take(lock) and _lock_of(path).exists():  # else somebody who sweeps was quicker, and took it for abandoned
            return path, lock


def _take(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


def _remove_own(path: Path, lock: IO[bytes], owner: int) -> None:
    if os.getpid() != owner:  # in a fork of the owner, which goes on
        return
    remove(path)
    _lock_of(path).unlink(missing_ok=True)
    lock.close()
