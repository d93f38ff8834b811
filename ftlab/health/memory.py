"""How much memory may a process still take, and was it memory that ended it?

Several limits hold at once: those of the cgroups (its own and all above it), of the process (address space, data), of
the machine and of the GPU. The one with the least free bytes is hit first, and they end a process in different ways: a
limit of the process makes an allocation fail, which Python can catch (`is_out_of_memory`); a cgroup or the machine
makes the kernel kill without a word (`explain_end`), so `MemoryWatch` warns before.

Where it stops: between two looks a process can take any amount, so a quick allocation is killed unwarned. The kernel
counts its kills by cgroup, not by process: two processes of one cgroup that die together look alike. Swap is not
counted, as training that swaps does not get on. Without /proc (macOS) only the address space and the machine are known.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import signal
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import psutil

from ftlab.errors import HealthError
from ftlab.health.kernel import CGROUPS, PROC, Cgroup, entries, find_cgroup, folder, read, word_after

_HUGE = 1 << 60  # v1 has no word for "no limit" and shows the largest number of pages instead
_ENOUGH = 6  # samples before a trend is believed
_HALF = 0.5  # below this share a limit is not worth a warning, however fast it fills
_CALM = 0.05  # by how much of the limit the use must fall before the same warning may come again
_TEXTS = (  # what allocators say in a RuntimeError, which is all that torch raises on the CPU
    "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "std::bad_alloc",
    "bad allocation", "Cannot allocate memory", "CUDA out of memory", "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED", "MPS backend out of memory")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One limit and how much of it is used."""

    kind: Literal["cgroup", "address space", "data", "machine", "cuda"]
    limit_bytes: int
    used_bytes: int  # without page cache that the kernel would give back
    where: str  # in words or as a path; tells limits of one kind apart

    @property
    def free_bytes(self) -> int:
        """What can still be taken."""
        return self.limit_bytes - self.used_bytes

    @property
    def share(self) -> float:
        """How full it is; 1.0 is full."""
        return self.used_bytes / self.limit_bytes if self.limit_bytes > 0 else 1.0


def find_limits(pid: int | None = None, proc: Path = PROC, cgroup_root: Path = CGROUPS) -> list[Limit]:
    """All memory limits of a process (of this one without `pid`); the machine's is always among them."""
    group = find_cgroup("memory", pid, proc, cgroup_root)
    found = [*(_cgroup_limits(group) if group else ()), *_process_limits(pid, proc)]
    if pid in (None, os.getpid()):
        found += _cuda_limits()
    total, available = _machine_memory(proc)
    return [*found, Limit(kind="machine", limit_bytes=total, used_bytes=total - available,
                          where="the machine's memory")]


def tightest(limits: Iterable[Limit]) -> Limit:
    """The limit that will be hit first: the one with the least bytes free."""
    known = list(limits)
    if not known:
        raise HealthError("no memory limit is known, so none is the tightest")
    return min(known, key=lambda limit: limit.free_bytes)


@dataclass(frozen=True, kw_only=True)
class MemoryWarning:
    """A limit that is about to be hit."""

    limit: Limit
    rate: float  # bytes per second; 0 where the use does not clearly grow
    hit_in_s: float  # when it will be hit at this rate; infinite where it does not grow
    text: str


class MemoryWatch:
    """Warns before a limit is hit, once per episode: when it is nearly full, or fills so fast that it soon will be."""

    def __init__(self, warn: float = 0.9, *, horizon_s: float = 10.0, samples: int = 30,
                 read: Callable[[], list[Limit]] = find_limits) -> None:
        if not _HALF < warn < 1.0:
            raise HealthError(f"warn must lie between 0.5 and 1: below, a healthy run is warned all the time ({warn})")
        self.warn, self.horizon_s = warn, horizon_s
        self._read, self._samples = read, samples
        self._seen: dict[str, deque[tuple[float, int]]] = {}
        self._told: set[str] = set()  # limits whose episode is not over

    def look(self, now: float) -> MemoryWarning | None:
        """Take a sample; the warning if there is a new one. The most urgent comes first, others at the next look."""
        fresh: list[MemoryWarning] = []
        for limit in self._read():
            history = self._seen.setdefault(limit.where, deque(maxlen=self._samples))
            history.append((now, limit.used_bytes))
            rate = trend(history) if limit.share > _HALF else 0.0
            if judge(limit, rate, self.warn - _CALM, 2 * self.horizon_s) is None:
                self._told.discard(limit.where)
            warning = judge(limit, rate, self.warn, self.horizon_s)
            if warning and limit.where not in self._told:
                fresh.append(warning)
        if not fresh:
            return None
        first = min(fresh, key=lambda warning: (warning.hit_in_s, warning.limit.free_bytes))
        self._told.add(first.limit.where)
        return first


def trend(samples: Sequence[tuple[float, int]]) -> float:
    """Bytes per second: the median slope between any two samples (Theil-Sen), which a few odd samples cannot move.

    0 unless three quarters of the slopes agree on the direction: memory that is taken and given back in each step, or
    that jumps once, is no trend.
    """
    slopes = sorted((use - before) / (at - then) for (then, before), (at, use) in combinations(samples, 2) if at > then)
    if len(samples) < _ENOUGH or not slopes:
        return 0.0
    low, high = slopes[len(slopes) // 4], slopes[-1 - len(slopes) // 4]
    return statistics.median(slopes) if low > 0 or high < 0 else 0.0


def judge(limit: Limit, rate: float, warn: float, horizon_s: float) -> MemoryWarning | None:
    """A warning if the limit is fuller than `warn`, or more than half full and full within `horizon_s`; pure."""
    hit_in_s = max(0.0, limit.free_bytes / rate) if rate > 0 else math.inf
    if limit.share <= warn and not (limit.share > _HALF and hit_in_s <= horizon_s):
        return None
    text = (f"memory: {limit.where} is {limit.share:.0%} full ({_size(limit.used_bytes)} of "
            f"{_size(limit.limit_bytes)})")
    if rate > 0:
        text += f" and grows by {_size(rate)}/s: full in about {hit_in_s:.1f} s"
    return MemoryWarning(limit=limit, rate=rate, hit_in_s=hit_in_s, text=text)


@dataclass(frozen=True, kw_only=True)
class OomCount:
    """The kills for memory that the kernel counted in one cgroup.

    Made while the process lives, since a dead one no longer tells its cgroup; and after it was moved, if it is moved.
    """

    group: Cgroup | None

    @classmethod
    def of(cls, pid: int | None = None, proc: Path = PROC, cgroup_root: Path = CGROUPS) -> OomCount:
        """The counter of a process's cgroup."""
        return cls(group=find_cgroup("memory", pid, proc, cgroup_root))

    def read(self) -> int | None:
        """The number of kills so far; None where it cannot be known."""
        if self.group is None:
            return None
        name = "memory.oom_control" if self.group.version == 1 else "memory.events"
        return entries(self.group.path / name).get("oom_kill")


@dataclass(kw_only=True)
class Toll:
    """A cgroup's kills for memory, and how many of them are settled: their victims were found dead, or were not ours.

    The kernel counts when it chooses a victim, and a large one takes its time to die: what is counted at one look may
    be claimed until the look after the next.
    """

    settled: int
    seen: int

    def look(self, kills: int) -> None:
        """Take note of the count, once in a while; what was counted at the last look and not claimed is not ours."""
        self.settled, self.seen = self.seen, kills

    def claim(self) -> None:
        """One of ours was found dead of a kill that is not settled."""
        self.settled += 1
        self.seen = max(self.seen, self.settled)


@dataclass(frozen=True, kw_only=True)
class End:
    """Why a process ended, as far as memory goes."""

    for_memory: bool | None  # None: cannot be known here
    text: str


def explain_end(status: int, before: int | None, after: int | None) -> End:
    """What a wait status and the kernel's count of kills (`OomCount`) before and after it say about memory."""
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        return End(for_memory=False, text=f"killed by signal {os.WTERMSIG(status)}, which is not for memory")
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + signal.SIGKILL
    if code != 128 + signal.SIGKILL:  # 137 is how a shell reports that its child was killed
        return End(for_memory=False, text=f"exited with code {code}, which the kernel had no part in")
    if before is None or after is None:
        return End(for_memory=None, text="killed; whether for memory cannot be known here")
    if after > before:
        return End(for_memory=True, text="killed by the kernel for memory")
    return End(for_memory=False, text="killed by somebody, not by the kernel for memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation, or was raised because of one."""
    return any(_is_allocation_error(each) for each in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _is_allocation_error(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    torch_error: Any = getattr(sys.modules.get("torch"), "OutOfMemoryError", ())  # without torch nobody raised it
    if isinstance(error, torch_error):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def _cgroup_limits(group: Cgroup) -> Iterator[Limit]:
    limit_file, used_file, cache = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file") \
        if group.version == 1 else ("memory.max", "memory.current", "inactive_file")
    for level in group.levels():
        limit, used = read(f"{level}/{limit_file}"), read(f"{level}/{used_file}")
        if limit.isdigit() and used.isdigit() and int(limit) < _HUGE:  # v2 says "max" for none
            free_again = entries(f"{level}/memory.stat").get(cache, 0)
            yield Limit(kind="cgroup", limit_bytes=int(limit), used_bytes=max(0, int(used) - free_again),
                        where=f"cgroup {level}")


def _process_limits(pid: int | None, proc: Path) -> Iterator[Limit]:
    limits, status = read(f"{folder(pid, proc)}/limits"), read(f"{folder(pid, proc)}/status")
    if not limits and pid in (None, os.getpid()) and sys.platform != "linux":
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            yield Limit(kind="address space", limit_bytes=soft, used_bytes=psutil.Process().memory_info().vms,
                        where=_of_process("address space", pid))
    kinds: tuple[tuple[Literal["address space", "data"], str, str], ...] = (
        ("address space", "Max address space", "VmSize:"), ("data", "Max data size", "VmData:"))
    for kind, title, field in kinds:
        soft_text, used = word_after(limits, title), word_after(status, field)
        if soft_text.isdigit() and used.isdigit():  # "unlimited" for none
            yield Limit(kind=kind, limit_bytes=int(soft_text), used_bytes=int(used) * 1024,
                        where=_of_process(kind, pid))


def _machine_memory(proc: Path) -> tuple[int, int]:
    """What the machine has and what of it is free; two lines of a file where psutil would read all of them."""
    lines = read(f"{proc}/meminfo")
    total, available = word_after(lines, "MemTotal:"), word_after(lines, "MemAvailable:")
    if total and available:
        return int(total) * 1024, int(available) * 1024
    machine = psutil.virtual_memory()
    return machine.total, machine.available


def _cuda_limits() -> list[Limit]:
    """The GPU this process uses, if it already uses one: merely asking would take some hundred megabytes of it."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return []
    free, total = cuda.mem_get_info()
    kept = cuda.memory_reserved() - cuda.memory_allocated()  # torch's own cache: it will be used first
    return [Limit(kind="cuda", limit_bytes=total, used_bytes=total - free - kept, where=f"GPU {cuda.current_device()}")]


def _of_process(kind: str, pid: int | None) -> str:
    return f"the {kind} of process {pid or os.getpid()} (ulimit)"


def _size(count: float) -> str:
    mega = count / (1 << 20)
    return f"{mega / 1024:.1f} GB" if mega >= 10240 else f"{mega:.0f} MB" if mega >= 10 else f"{mega:.1f} MB"
