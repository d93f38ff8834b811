"""Where untrusted code runs: the strongest isolation that this machine offers, and in words what it lacks.

Three kinds, from strong to weak. A *container* (`confined.py`): no network but its own loopback, a read-only root, no
capabilities, an unprivileged user, limits on memory, processes, cores and disk. *Namespaces* (`jail.py`), for Linux
without an engine: the same view of the files and the network, made by hand; memory is limited as a whole only where
cgroups may be made. *Limits*: rlimits and nothing else, for machines that allow neither.

Each kind starts one process, the server of a stage, and gives it two folders of the host under their own names: the
desk (read-only, we write requests there) and the room (its own to write). It sees the Python environment and the
package ftlab, or a copy of that with less in it, read-only; not the rest of the repository, nor the course, nor the
home of the user.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from ftlab.cluster.image import RUNTIME, outermost
from ftlab.config import quiet_environment
from ftlab.errors import ConfigError

DESK, ROOM = "desk", "room"  # in a stage's work folder
PACKAGE = "package"  # there too, if ftlab is to be seen otherwise than it is: what stands in its place
KINDS = ("container", "namespaces", "limits")
_MAX_FILES = 100_000  # in a room
_FIRST_USER, _USERS = 1_500_000_000, 1 << 24  # beyond those that people, services and containers are given


class Server(Protocol):
    """What a stage wants of the process that it talks to; `subprocess.Popen` has most of it."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    user: int | None  # as whom it runs, if not as we do
    wiped: tuple[str, ...]  # folders of its own that can be emptied between two tasks

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises subprocess.TimeoutExpired."""

    def kill(self) -> None:
        """End it with everything below it."""


Opener = Callable[[list[str], Path, Any], Server]  # argv, work folder, log file → the server


class Local(subprocess.Popen[bytes]):
    """A server that is a plain child of this process."""

    user: int | None = None
    wiped: tuple[str, ...] = ()

    def kill(self) -> None:
        """End it with everything below it."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
        super().kill()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What untrusted code may take."""

    memory_mb: int = 3072  # all its processes together, /tmp and /dev/shm included
    pids: int = 512  # processes and threads
    cpus: float = 1.0  # cores
    tmp_mb: int = 1024  # in /tmp
    disk_mb: int = 2048  # in its room

    def __post_init__(self) -> None:
        if self.memory_mb < 512:
            raise ConfigError(f"memory_mb must be at least 512: torch and a few forks of it have to fit (got "
                              f"{self.memory_mb})")
        if self.pids < 32 or self.cpus < 0.1:
            raise ConfigError(f"pids must be at least 32 and cpus at least 0.1 (got {self.pids} and {self.cpus:g})")


@dataclass(frozen=True)
class Sandbox:
    """One kind of isolation, ready to be used: `Stage(opener=sandbox.opener)`."""

    kind: str
    opener: Opener
    missing: tuple[str, ...] = ()  # what it does not keep apart, in words

    def warning(self) -> str:
        """What an instructor has to know, loudly; empty if nothing is missing."""
        if not self.missing:
            return ""
        lines = [f"WARNING: submissions run in the sandbox of kind {self.kind!r}, which is not complete:",
                 *(f"  - {each}" for each in self.missing)]
        return "\n".join([*lines, "  try: a Docker engine on this machine (`ftlab doctor` says what it lacks)"])


def own_user() -> int:
    """As whom a sandbox runs: a user that nobody else is, where we may make one up; one that is not root stays himself.

    The kernel counts processes, watches, timers, queues and keys by user: so no submission uses up those of another.
    """
    return os.getuid() or _FIRST_USER + secrets.randbelow(_USERS)


def choose(kind: str = "auto", limits: Limits | None = None) -> Sandbox:
    """The sandbox of this kind, or the strongest there is; raises ClusterError when it cannot be had here."""
    from ftlab.cluster import confined, jail

    if kind not in ("auto", *KINDS):
        raise ConfigError(f"there is no sandbox of kind {kind!r}", hint=f"one of auto, {', '.join(KINDS)}")
    allowed = limits or Limits()
    if kind == "container" or (kind == "auto" and not confined.why_not()):
        return confined.sandbox(allowed)
    if kind == "namespaces" or (kind == "auto" and not jail.why_not()):
        return jail.namespaces(allowed, confined.why_not() if kind == "auto" else "")
    return jail.limits_only(allowed, jail.why_not() if kind == "auto" else "")


def readable() -> list[str]:
    """What a sandbox sees of the host, read-only: the runtime, the Python environment, and ftlab itself.

    Not all of `sys.path`: an entry may be the course's own folder, with solutions and the gradebook in it.
    """
    here = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))]
    return outermost([*RUNTIME, *here, str(Path(__file__).parents[1]), *_package_folders()])


def replaced(work: Path) -> dict[str, str]:
    """What a sandbox sees in another's place, read-only: path there → folder here."""
    folder = work / PACKAGE
    return {str(Path(__file__).parents[1]): str(folder)} if folder.is_dir() else {}


def environment(name: str, folder: Path) -> dict[str, str]:
    """The environment of the server: nothing of the grader's own."""
    path = [str(Path(__file__).parents[2]), *_package_folders()]
    return {**quiet_environment(name, folder), "PYTHONPATH": os.pathsep.join(path), "HOME": "/tmp", "USER": "ftlab",
            "PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "Agg",
            "IPYTHONDIR": "/tmp/.ipython", "FTLAB_RUNS": "/tmp/runs"}


def _package_folders() -> list[str]:
    return [each for each in sys.path if os.path.basename(each.rstrip("/")) in ("site-packages", "dist-packages")]


class DiskWatch(threading.Thread):
    """Ends a server whose room grows beyond its limit; ends with the server."""

    def __init__(self, room: Path, limit_mb: int, end: Callable[[str], None]) -> None:
        super().__init__(name="ftlab-disk-watch", daemon=True)
        self._room, self._limit, self._end = room, limit_mb << 20, end
        self.over = threading.Event()  # set it when the server has ended

    def run(self) -> None:
        """Look five times a second; in between it can grow by what can be written in that time, as whoever would have
        the room without writing is kept from it (`syscall_filter.py`)."""
        while not self.over.wait(0.2):
            size, files = usage(self._room, _MAX_FILES)
            if size > self._limit or files > _MAX_FILES:
                self._end(f"its room held {size >> 20} MB in {files} files: more than it may")
                return


def usage(folder: Path, enough: int) -> tuple[int, int]:
    """(bytes on disk, number of files) below a folder; counting stops when there are more than enough."""
    size, files, todo = 0, 0, [str(folder)]
    while todo and files <= enough:
        with contextlib.suppress(OSError), os.scandir(todo.pop()) as entries:
            for each in entries:
                files += 1
                with contextlib.suppress(OSError):
                    size += each.stat(follow_symlinks=False).st_blocks * 512
                    if each.is_dir(follow_symlinks=False):
                        todo.append(each.path)
    return size, files
