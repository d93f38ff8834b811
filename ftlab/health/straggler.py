"""Which rank holds the others up although it gets on, and why? Found by comparing ranks, pure: times are passed in.

In a group every step takes as long as its slowest rank. What tells that rank from the others is the time it works
itself, without its waits for others: theirs is short and their waits are long. One slow step is noise (a page of disk,
another process), so medians over many steps are compared, and a difference counts only if it is large as a ratio,
large against the others' own spread, and large enough to be felt.

`name_cause` reads what Linux counts about a process. It names a cause only where the counters show one: slow code, a
slow GPU and a sleep leave no trace there and give "". Where there is no /proc (macOS) every count is None, and only
slow data can be told.
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from ftlab.config import HealthConfig
from ftlab.health.kernel import CGROUPS, PROC, Cgroup, entries, find_cgroup, folder, read

_SPREADS = 3.0  # a straggler is so many median deviations slower than the others usually are
_LEAST_S = 0.002  # and by so much: the ratio of two tiny times says nothing
_SHARE = 0.2  # of the time: what takes more of it than this is a cause
_BUSY = 0.7  # of the time on a CPU: who computes so much does not wait for a network
_FAULTS_PER_S = 30.0  # pages read from disk; at some ms each they are felt
_RESENT_PER_S = 2.0  # TCP segments sent again; a healthy network loses next to none


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank that holds the others up, and how much."""

    rank: int
    ratio: float  # its busy time over the others'
    busy_s: float  # per step, the median
    others_s: float  # the same of all other ranks


class StepTimes:
    """The last busy times of every rank of one generation; make a new one, or `clear` it, for the next."""

    def __init__(self, config: HealthConfig) -> None:
        self._factor, self._steps = config.straggler_factor, config.straggler_steps
        self._times: dict[int, deque[float]] = {}
        self._newest: dict[int, int] = {}

    def add(self, rank: int, step: int, busy_s: float) -> None:
        """A rank worked so long in a step, its waits for others not counted; a step that is told again is ignored."""
        if step <= self._newest.get(rank, -1):
            return
        self._newest[rank] = step
        self._times.setdefault(rank, deque(maxlen=self._steps)).append(busy_s)

    def clear(self) -> None:
        """Forget all: ranks are given anew, or steps are run again."""
        self._times.clear()
        self._newest.clear()

    def find(self) -> Straggler | None:
        """The slowest rank, if it holds the others up; None until it and another one have enough steps behind them."""
        known = {rank: times for rank, times in self._times.items() if len(times) == self._steps}
        if len(known) < 2:
            return None
        medians = {rank: statistics.median(times) for rank, times in known.items()}
        slowest = max(medians, key=lambda rank: medians[rank])
        others = [each for rank, times in known.items() if rank != slowest for each in times]
        busy_s = medians[slowest]
        others_s = statistics.median(others)
        spread = statistics.median(abs(each - others_s) for each in others)
        if busy_s <= self._factor * others_s or busy_s - others_s <= max(_SPREADS * spread, _LEAST_S):
            return None
        return Straggler(rank=slowest, ratio=busy_s / max(others_s, 1e-6), busy_s=busy_s, others_s=others_s)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What Linux has counted about a process up to now; None where it does not tell."""

    cpu_s: float | None = None  # computing, all threads
    delay_s: float | None = None  # its main thread was ready to run, and no CPU was free
    major_faults: int | None = None  # pages that had to be read from disk or swap
    throttled: int | None = None  # periods in which its cgroup, or one around it, had used up its CPU quota
    throttled_s: float | None = None  # the time it had to stand still for that
    resent: int | None = None  # TCP segments sent again, by all processes in its network namespace
    stopped: bool = False  # by SIGSTOP or a debugger, just now

    @classmethod
    def read(cls, pid: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> Usage:
        """The counts of a process; all None if it is gone or this system has no /proc."""
        place = folder(pid, proc)
        stat = read(f"{place}/stat").rpartition(")")[2].split()  # the name before ")" may hold anything
        if len(stat) < 13:
            return cls()
        throttled, throttled_s = _throttling(find_cgroup("cpu", pid, proc, cgroups))
        return cls(cpu_s=(int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"),
                   delay_s=_delay(read(f"{place}/schedstat")), major_faults=int(stat[9]), throttled=throttled,
                   throttled_s=throttled_s, resent=_resent(read(f"{place}/net/snmp")), stopped=stat[0] in "Tt")


def is_stopped(pid: int, proc: Path = PROC) -> bool:
    """Whether a process is stopped just now; one cheap look."""
    return read(f"{folder(pid, proc)}/stat").rpartition(")")[2][1:2] in ("T", "t")


@dataclass(frozen=True)
class Turn:
    """Whether a process's main thread is ready to run just now, and how long it has computed up to now."""

    ready: bool
    cpu_s: float

    @classmethod
    def read(cls, pid: int, proc: Path = PROC) -> Turn:
        """One cheap look; never ready where the system does not tell."""
        stat = read(f"{folder(pid, proc)}/stat").rpartition(")")[2].split()
        if len(stat) < 13:
            return cls(False, 0.0)
        return cls(stat[0] == "R", (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"))

    def starves(self, before: Turn, wall_s: float) -> bool:
        """Whether a process that was `before` like that is ready to run, and had a CPU for less than half of the
        time."""
        return self.ready and self.cpu_s - before.cpu_s < wall_s / 2


def name_cause(before: Usage, after: Usage, outside_s: float, wall_s: float) -> str:
    """Why a rank was slow in the `wall_s` between two readings, `outside_s` of it between steps; "" if nothing shows.

    The order matters: a cgroup without quota left also makes its threads queue for a CPU, and any of these makes
    loading data slow as well.
    """
    if after.stopped:
        return "stopped"
    if wall_s <= 0:
        return ""
    if _rise(before.throttled, after.throttled) > 0 and _rise(before.throttled_s, after.throttled_s) > _SHARE * wall_s:
        return "CPU throttled by its cgroup"
    if _rise(before.delay_s, after.delay_s) > _SHARE * wall_s:
        return "waits for a CPU"
    if _rise(before.major_faults, after.major_faults) > _FAULTS_PER_S * wall_s:
        return "paging"
    if outside_s > _SHARE * wall_s:
        return "data (time between steps)"
    idle = after.cpu_s is not None and _rise(before.cpu_s, after.cpu_s) < _BUSY * wall_s
    if idle and _rise(before.resent, after.resent) > _RESENT_PER_S * wall_s:
        return "network"
    return ""


def _rise(before: float | None, after: float | None) -> float:
    """How much a count has grown; 0 where it is not known."""
    return after - before if before is not None and after is not None else 0.0


def _delay(schedstat: str) -> float | None:
    """The second of three numbers: nanoseconds in a run queue."""
    words = schedstat.split()
    return int(words[1]) / 1e9 if len(words) == 3 else None


def _resent(snmp: str) -> int | None:
    """RetransSegs of the two lines `Tcp:`, one with the names and one with the numbers."""
    lines = [line.split() for line in snmp.splitlines() if line.startswith("Tcp:")]
    counts = dict(zip(*lines, strict=False)) if len(lines) == 2 else {}
    return int(counts["RetransSegs"]) if "RetransSegs" in counts else None


def _throttling(group: Cgroup | None) -> tuple[int | None, float | None]:
    """How often and how long a cgroup was throttled, and those around it: each may have a quota of its own."""
    found = [entries(f"{level}/cpu.stat") for level in group.levels()] if group else []
    limited = [stat for stat in found if "nr_throttled" in stat]
    if not limited:
        return None, None
    nanoseconds = sum(stat.get("throttled_time", 0) + 1000 * stat.get("throttled_usec", 0) for stat in limited)
    return sum(stat["nr_throttled"] for stat in limited), nanoseconds / 1e9  # v1 tells ns, v2 µs
