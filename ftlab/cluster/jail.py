"""A sandbox without an engine: namespaces of Linux where the kernel lets us make them, else rlimits alone.

`jailed.py` is what it starts. The server is the first process of its namespace: signals from inside do not reach it,
and when it ends, the kernel ends all others. As root each jail has a user of its own, whom nobody else is: the kernel
counts processes by user, so a fork bomb in one jail takes nothing from the others. Else it is the user himself in a
user namespace. Not covered: a filter of system calls, as an engine puts around its containers.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from ftlab.cluster import cgroups, jailed
from ftlab.cluster.cgroups import MemoryCage
from ftlab.cluster.recipe import NOBODY
from ftlab.cluster.sandbox import (
    DESK,
    ROOM,
    DiskWatch,
    Limits,
    Local,
    Sandbox,
    environment,
    own_user,
    readable,
    replaced,
)
from ftlab.cluster.temporary import TemporaryFolder
from ftlab.config import runs_dir
from ftlab.errors import ClusterError, FtlabError

_TRY_S = 20.0
_ROOT = "root"  # in the work folder: where the new root is mounted, inside only
_SYSTEM = ("/sys/devices/system/cpu",)  # torch asks how many cores there are


@cache
def why_not() -> str:
    """Empty if a jail of namespaces can be made here, else the reason; makes one and runs `true` in it."""
    if sys.platform != "linux" or platform.machine() not in jailed._PIVOT_ROOT:
        return f"namespaces need Linux on x86_64 or aarch64, this is {platform.system()} on {platform.machine()}"
    with TemporaryFolder("try") as folder, tempfile.TemporaryFile() as log:
        for name in (DESK, ROOM):
            (folder / name).mkdir()
        try:
            tried = Jailed([sys.executable, "-c", "pass"], folder, log, Limits(), namespaces=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                if tried.wait(_TRY_S) == 0:
                    return ""
            tried.kill()
        except OSError as error:
            return str(error)
        log.seek(0)
        last = log.read().decode(errors="replace").strip().splitlines()[-1:] or ["it did not start"]
        return f"the kernel does not let us make namespaces: {last[0]}"


def namespaces(limits: Limits, no_container: str = "") -> Sandbox:
    """The sandbox of namespaces; raises ClusterError where it cannot be had."""
    reason = why_not()
    if reason:
        raise ClusterError(f"no namespaces for untrusted code: {reason}", hint="--sandbox auto takes what there is")
    missing = [f"no container: {no_container}"] if no_container else []
    missing += ["system calls are filtered less than an engine does: most of the kernel can be called"]
    if cgroups.available(MemoryCage):
        missing += ["memory is limited per process, not for all of them together; cores are not limited"]
    else:
        missing += ["cores are not limited"]
    if os.getuid():
        missing += ["before Linux 5.14 the limit on processes counts those of all submissions that run at once"]
    return Sandbox("namespaces", lambda argv, work, log: Jailed(argv, work, log, limits, namespaces=True),
                   tuple(missing))


def limits_only(limits: Limits, no_namespaces: str = "") -> Sandbox:
    """The weakest sandbox: rlimits. As root only if the Python environment can be used by nobody."""
    if os.getuid() == 0 and not _usable_by_others(os.path.realpath(sys.executable)):
        raise ClusterError("student's code would have to run as root, without any sandbox", seen=no_namespaces,
                           hint="start a Docker engine, or grade as another user than root")
    missing = [*([no_namespaces] if no_namespaces else []),
               "student's code can read every file that this user can read, hidden tests and the gradebook included",
               "it can use the network, and write files of this user" if os.getuid() else "it can use the network",
               "it can signal processes of the same user, the grader's own included",
               "memory is limited per process, not for all of them together; cores are not limited"]
    return Sandbox("limits", lambda argv, work, log: Jailed(argv, work, log, limits, namespaces=False),
                   tuple(missing))


class Jailed(Local):
    """The server in its jail, as a child of this process."""

    def __init__(self, argv: list[str], work: Path, log: Any, limits: Limits, *, namespaces: bool) -> None:
        name, user = f"ftlab-sandbox-{secrets.token_hex(4)}", own_user()
        self.user = user
        self.wiped = ("/tmp", "/dev/shm") if namespaces else (str(work / ROOM / "tmp"),)
        temporary = work / ROOM / "tmp"
        if not namespaces:
            temporary.mkdir()
        if user != os.getuid():
            for folder in [work / ROOM, *([] if namespaces else [temporary])]:
                os.chown(folder, user, -1)
            os.chmod(work, 0o711)
            if not namespaces and runs_dir() in work.parents:
                os.chmod(runs_dir(), 0o711)  # its own folders stay private; without namespaces he has to pass through
        os.chmod(work / DESK, 0o755)
        (work / _ROOT).mkdir(exist_ok=True)
        labelled = environment(name, work)
        if not namespaces:  # the machine's own /tmp is seen by all, and stays as it is
            labelled |= {"TMPDIR": str(temporary), "FTLAB_RUNS": str(temporary / "runs")}
        settings = {"namespaces": namespaces, "root": str(work / _ROOT), "room": str(work / ROOM),
                    "seen": [*readable(), *(each for each in _SYSTEM if os.path.exists(each)), str(work / DESK)],
                    "replaced": replaced(work),
                    "user": user, "group": os.getgid() or NOBODY, "tmp_mb": limits.tmp_mb,
                    "shm_mb": limits.memory_mb // 2, "environment": labelled, "rlimits": _rlimits(limits)}
        python = os.path.realpath(sys.executable)
        super().__init__([python, "-I", str(Path(jailed.__file__)), json.dumps(settings), *argv], stderr=log,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=labelled)
        self._cage = _cage(self.pid, limits)
        self._log = os.dup(log.fileno())
        self._watch = DiskWatch(work / ROOM, limits.disk_mb, self._stop)
        self._watch.start()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises subprocess.TimeoutExpired."""
        status = super().wait(timeout)
        self._watch.over.set()
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
        cage, self._cage = self._cage, None
        if cage is not None:
            cage.remove()
        return status


    def _stop(self, reason: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._log, f"{reason}\n".encode())
        self.kill()


def _rlimits(limits: Limits) -> dict[str, int]:
    return {"RLIMIT_CORE": 0, "RLIMIT_DATA": limits.memory_mb << 20, "RLIMIT_NOFILE": 4096,
            "RLIMIT_NPROC": limits.pids * max(1, os.cpu_count() or 1), "RLIMIT_FSIZE": limits.disk_mb << 20}


def _cage(pid: int, limits: Limits) -> MemoryCage | None:
    """A cgroup for all of them together, where we may make one."""
    try:
        cage = MemoryCage("sandbox")
    except FtlabError:
        return None
    try:
        cage.limit(limits.memory_mb << 20)
        cage.hold([pid])
    except FtlabError:
        cage.remove()
        return None
    return cage


def _usable_by_others(path: str) -> bool:
    folders = [path, *map(str, Path(path).parents)]
    return all(os.stat(each).st_mode & 0o001 for each in folders)
