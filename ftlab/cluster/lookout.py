"""A node's lookout: once a second it looks at the node's workers from outside. What slows one down, does its memory run
out, and did the kernel kill one for it?

It reads what the kernel counts and never touches the workers, so it costs them nothing. Whether a worker is stopped now
and then the kernel does not count: one that holds the others up is examined, with many glances for a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ftlab.cluster.forks import describe_exit
from ftlab.health.memory import End, MemoryWatch, OomCount, Toll, explain_end, find_limits
from ftlab.health.straggler import Turn, Usage, is_stopped, name_cause
from ftlab.messages import Place
from ftlab.train.status import Progress

LOOK_S = 1.0
GLANCE_S = 0.04  # between two glances at a worker that is examined
_LONG_S = 0.3  # a worker that computes for so long at one place is looked at with each heartbeat
_ENOUGH = 8  # glances before one that is stopped now and then is called so
_OFTEN = 0.3  # a worker that is found stopped more often than this is slowed down by it


@dataclass
class _Seen:
    pid: int
    watch: MemoryWatch
    usage: Usage
    at: float
    looks: int = 0  # since then, one with each heartbeat
    outside: int = 0  # those that found it between two steps
    glances: int = 0  # since then
    stopped: int = 0  # those that found it stopped
    slow: str = ""  # what slows it down

    @property
    def often_stopped(self) -> bool:
        return self.glances >= _ENOUGH and self.stopped / self.glances > _OFTEN


@dataclass
class _Long:
    """A worker that has not moved for long: how it was when that was first seen."""

    since: float  # when it came to its place
    at: float
    turn: Turn
    starved: bool = False


@dataclass
class Lookout:
    """Looks at the workers of one node; `warn` is the share of a memory limit that is worth a warning."""

    warn: float = 0.9
    _seen: dict[int, _Seen] = field(default_factory=dict)  # by local rank
    _long: dict[int, _Long] = field(default_factory=dict)  # the same
    _tolls: dict[Path, Toll] = field(default_factory=dict)  # cgroup → its kills for memory
    _next: float = 0.0

    def __post_init__(self) -> None:
        self._count_kills()  # before there are workers: what is counted by now was not one of ours

    def look(self, now: float, workers: dict[int, tuple[int, Progress]]) -> Iterator[tuple[int, str]]:
        """Look if it is time to: (local rank, warning) for each worker whose memory runs out."""
        for local_rank, (pid, progress) in workers.items():
            self._time(local_rank, pid, progress, now)
            seen = self._seen.get(local_rank)
            if seen is not None and seen.pid == pid:
                seen.looks += 1
                seen.outside += progress.place == Place.OUTSIDE
        if now < self._next:
            return
        self._next = now + LOOK_S
        self._count_kills()
        for local_rank, (pid, _) in workers.items():
            warning = self._look_at(local_rank, pid, now)
            if warning:
                yield local_rank, warning

    def glance(self, local_rank: int, pid: int) -> None:
        """One of many glances at a worker that is examined: is it stopped just now?"""
        seen = self._seen.get(local_rank)
        if seen is not None and seen.pid == pid:
            seen.glances += 1
            seen.stopped += is_stopped(pid)

    def slow(self, local_rank: int) -> str:
        """What slows a worker down; empty if nothing shows."""
        seen = self._seen.get(local_rank)
        if seen is None:
            return ""
        return "stopped" if seen.often_stopped else seen.slow

    def starved(self, local_rank: int) -> bool:
        """Whether a worker that has computed for long is ready to run and gets no CPU: the machine is busy."""
        long = self._long.get(local_rank)
        return long is not None and long.starved

    def explain(self, status: int) -> End:
        """Why a worker ended: killed by the kernel for memory, killed by somebody, or by itself."""
        toll, kills = self._read_toll()
        end = explain_end(status, toll.settled if toll else None, kills)
        if toll and end.for_memory:
            toll.claim()
        return End(for_memory=end.for_memory, text=end.text if end.for_memory else describe_exit(status))

    def _time(self, local_rank: int, pid: int, progress: Progress, now: float) -> None:
        if progress.place != Place.COMPUTING or now - progress.since < _LONG_S:
            self._long.pop(local_rank, None)
            return
        turn, long = Turn.read(pid), self._long.get(local_rank)
        if long is None or long.since != progress.since:
            self._long[local_rank] = _Long(progress.since, now, turn, starved=turn.ready)
        else:
            long.starved = turn.starves(long.turn, now - long.at)

    def _count_kills(self) -> None:
        toll, kills = self._read_toll()
        if toll is not None and kills is not None:
            toll.look(kills)

    def _read_toll(self) -> tuple[Toll | None, int | None]:
        """The toll of this agent's cgroup, which its workers share, and what the kernel counts there now."""
        count = OomCount.of()
        kills = count.read()
        if count.group is None or kills is None:
            return None, None
        had = 0 if self._tolls else kills  # one that we were moved into is new: all its kills are our workers
        return self._tolls.setdefault(count.group.path, Toll(settled=had, seen=had)), kills

    def _look_at(self, local_rank: int, pid: int, now: float) -> str:
        seen = self._seen.get(local_rank)
        if seen is None or seen.pid != pid:
            watch = MemoryWatch(self.warn, read=lambda: find_limits(pid))
            self._seen[local_rank] = _Seen(pid, watch, Usage.read(pid), now)
            return ""
        usage, looks = Usage.read(pid), max(1, seen.looks)
        outside = (now - seen.at) * seen.outside / looks
        seen.slow = name_cause(seen.usage, replace(usage, stopped=seen.often_stopped), outside, now - seen.at)
        seen.usage, seen.at, seen.looks, seen.outside, seen.glances, seen.stopped = usage, now, 0, 0, 0, 0
        warning = seen.watch.look(now)
        return warning.text if warning else ""

