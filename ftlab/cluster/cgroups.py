"""Cages: cgroups of our own in which a few processes get less memory or less CPU than the machine has.

In a MemoryCage the kernel kills whoever takes too much, with SIGKILL and a count, as on a full machine; in a CpuCage a
process runs for a part of each period and then stands still, as on an overbooked one. The processes cannot tell the
difference. v1 and v2 of cgroups both work; a cage lies below the cgroup of the process that made it, so whatever bounds
that one still holds. (v2 has no controllers below a cgroup with processes: there the cage lies beside it instead,
below the nearest cgroup that hands the controller on.)

Where it stops: memory stays charged to the cgroup in which it was taken. A process that is moved into a cage leaves
what it holds behind, and the limit counts only what it takes from then on. Cages need Linux and the right to make
cgroups: root, or one that was delegated (`delegation.py`); `available` tries it. A cage is named `ftlab-...`; when
its maker is killed it stays behind, empty.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Self

from ftlab.errors import ConfigError, FaultUnavailable, WaitTimeout
from ftlab.health.kernel import CGROUPS, PROC, Cgroup, find_cgroup
from ftlab.health.memory import OomCount

LABEL = "ftlab-"
_REMOVE_S = 5.0  # for killed processes to leave the cage; large ones take a while to die
_POLL_S = 0.005
_PERIOD_US = 20_000  # about a short step, so that a caged worker is slow rather than jerky
_LEAST_QUOTA_US, _LONGEST_PERIOD_US = 1_000, 1_000_000  # what the kernel accepts
_numbers = itertools.count(1)


class Cage:
    """A cgroup of our own for one controller: made at once, removed by `remove` or at the end of a `with`."""

    controller: ClassVar[str]

    def __init__(self, name: str = "", *, proc: Path = PROC, cgroup_root: Path = CGROUPS) -> None:
        home = find_cgroup(self.controller, proc=proc, cgroup_root=cgroup_root)
        if home is None:
            raise FaultUnavailable(f"cannot make a cage: {_reason_for_none(self.controller)}")
        self.home = home  # where the processes go when the cage is removed
        parent = _parent_of_cages(home, self.controller)
        path = parent / f"{LABEL}{(name or 'cage').removeprefix(LABEL)}-{os.getpid()}-{next(_numbers)}"
        try:
            path.mkdir()
        except OSError as error:
            raise FaultUnavailable(f"cannot make a cage: {_reason_for(error, parent)}") from error
        self.group = Cgroup(version=home.version, path=path, top=home.top)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def hold(self, pids: Iterable[int]) -> int:
        """Move processes into the cage, with all their threads; how many were still there. Their children follow."""
        return sum(self._take(pid) for pid in pids)

    def pids(self) -> list[int]:
        """The processes in the cage."""
        try:
            return [int(line) for line in (self.group.path / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def remove(self) -> None:
        """Move what is left to its maker's own cgroup and remove the cage; may be called twice."""
        deadline = time.monotonic() + _REMOVE_S
        while not self._try_to_remove():
            if time.monotonic() > deadline:
                raise WaitTimeout(f"the cage {self.group.path} could not be removed within {_REMOVE_S:g} s",
                                  seen=f"processes in it: {self.pids() or 'none'}",
                                  hint="end them, then remove the folder with rmdir")
            time.sleep(_POLL_S)

    def _take(self, pid: int) -> bool:
        try:
            return _move(pid, self.group.path)
        except OSError as error:
            raise FaultUnavailable(f"cannot move process {pid} into a cage: {error.strerror}") from error

    def _try_to_remove(self) -> bool:
        for pid in self.pids():
            with contextlib.suppress(PermissionError):
                _move(pid, self.home.path)
        try:
            self.group.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno == errno.EBUSY:  # somebody in it is just dying
                return False
            raise
        return True

    def _write(self, name: str, value: object) -> None:
        file = self.group.path / name
        try:
            file.write_text(str(value))
        except OSError as error:
            raise FaultUnavailable(f"cannot write {value} to {file}: {error.strerror}",
                                   hint=_hint(error, name)) from error

    def _has(self, name: str) -> bool:
        return (self.group.path / name).exists()


class MemoryCage(Cage):
    """Processes that may take so much memory from now on, swap included; then the kernel kills one of them."""

    controller = "memory"

    def limit(self, size: int | None) -> None:
        """Set the limit in bytes; None lifts it. v1 refuses one that is smaller than what is used, v2 kills for it."""
        if size is not None and size <= 0:
            raise ConfigError(f"a cage of {size} bytes would kill at once: the limit must be positive")
        if self.group.version == 2:
            self._write("memory.max", "max" if size is None else size)
            if self._has("memory.swap.max"):
                self._write("memory.swap.max", "max" if size is None else 0)
            return
        value, swap = -1 if size is None else size, self._has("memory.memsw.limit_in_bytes")
        if swap:
            self._write("memory.memsw.limit_in_bytes", -1)  # it must never be the smaller of the two
        self._write("memory.limit_in_bytes", value)
        if swap:
            self._write("memory.memsw.limit_in_bytes", value)

    def kills(self) -> int:
        """How many processes in the cage the kernel has killed for memory."""
        return OomCount(group=self.group).read() or 0


class CpuCage(Cage):
    """Processes that together get so much of the CPU and no more."""

    controller = "cpu"

    def limit(self, share: float | None) -> None:
        """Set how many cores they may use together: 0.5 is half of one; None lifts the limit."""
        if share is not None and share * _LONGEST_PERIOD_US < _LEAST_QUOTA_US:
            raise ConfigError(f"a share of {share} is less than the kernel can give: at least "
                              f"{_LEAST_QUOTA_US / _LONGEST_PERIOD_US}")
        period = _PERIOD_US if share is None else max(_PERIOD_US, round(_LEAST_QUOTA_US / share))
        if self.group.version == 2:
            self._write("cpu.max", f"{'max' if share is None else round(share * period)} {period}")
            return
        self._write("cpu.cfs_quota_us", -1)  # so that no period in between is too short for the old quota
        self._write("cpu.cfs_period_us", period)
        if share is not None:
            self._write("cpu.cfs_quota_us", round(share * period))

    def throttled(self) -> tuple[int, float]:
        """In how many periods the kernel made them stand still, and for how many seconds in all."""
        stat = dict(line.split() for line in (self.group.path / "cpu.stat").read_text().splitlines())
        seconds = int(stat["throttled_time"]) / 1e9 if self.group.version == 1 else int(stat["throttled_usec"]) / 1e6
        return int(stat["nr_throttled"]), seconds


def available(cage: type[MemoryCage | CpuCage] = MemoryCage, *, proc: Path = PROC, cgroup_root: Path = CGROUPS) -> str:
    """Empty if cages can be made here, else why not; makes one and removes it."""
    try:
        with cage("try", proc=proc, cgroup_root=cgroup_root) as tried:
            tried.limit(None)
            gate = tried.group.path.parent / "cgroup.procs"  # v2 asks the cgroup above both for leave to move
            if tried.group.version == 2 and not os.access(gate, os.W_OK):
                return f"no permission to move processes into a cage ({gate} is not ours); run as root"
    except FaultUnavailable as error:
        return str(error.message).removeprefix("cannot make a cage: ")
    return ""


def sweep(*, proc: Path = PROC, cgroup_root: Path = CGROUPS) -> list[str]:
    """Remove empty cages whose makers are gone, such as a launcher that was killed; their names."""
    removed = []
    for controller in (MemoryCage.controller, CpuCage.controller):
        home = find_cgroup(controller, proc=proc, cgroup_root=cgroup_root)
        for path in sorted(_parent_of_cages(home, controller).glob(f"{LABEL}*-*-*")) if home else ():
            maker = path.name.split("-")[-2]
            if maker.isdigit() and not (proc / maker).exists():
                with contextlib.suppress(OSError):  # somebody is in it, or it is not ours to remove
                    path.rmdir()
                    removed.append(path.name)
    return removed


def _parent_of_cages(home: Cgroup, controller: str) -> Path:
    if home.version == 1:
        return home.path
    for level in home.levels():
        with contextlib.suppress(OSError):
            if controller in (level / "cgroup.subtree_control").read_text().split():
                return level
    raise FaultUnavailable(f"cannot make a cage: no cgroup above this process hands the {controller} controller on; "
                           "in a container, start it with its own cgroups (docker run --privileged --cgroupns=host)")


def _move(pid: int, group: Path) -> bool:
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except ProcessLookupError:
        return False
    return True


def _reason_for_none(controller: str) -> str:
    if sys.platform != "linux":
        return "needs Linux: other systems have no cgroups"
    return f"this machine has no cgroups with a {controller} controller"


def _reason_for(error: OSError, parent: Path) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"no permission to make a cgroup in {parent}, which is not this user's"
    if error.errno == errno.EROFS:
        return f"{parent} is mounted read-only, as in most containers; start the container with --privileged"
    return f"the kernel refuses a cgroup in {parent}: {error.strerror}"


def _hint(error: OSError, name: str) -> str:
    if error.errno == errno.EBUSY:
        return "the processes in the cage already use more than that: limit it before they grow, or give them more"
    if error.errno == errno.EINVAL and name.startswith("cpu"):
        return "a cgroup above may allow less than that"
    return ""
