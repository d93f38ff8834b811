"""The rank that holds the others up, told once its node was asked to look closely and has had time to see why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ftlab import messages
from ftlab.events import EventLog
from ftlab.health.straggler import Straggler
from ftlab.policy import Failure
from ftlab.recovery.job import RUNNING, Job
from ftlab.recovery.roster import Roster

_LOOK_S = 0.25
_CAUSE_S = 1.5  # a node looks at its workers once a second: after this it has seen why the one it examines is slow


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A straggler with its place and what slows it down, as far as its node can tell."""

    found: Straggler
    node: str
    cause: str  # empty if nothing shows

    @property
    def detail(self) -> str:
        """How slow, in words."""
        return (f"rank {self.found.rank} takes {self.found.busy_s * 1e3:.0f} ms for a step, "
                f"the others {self.found.others_s * 1e3:.0f} ms")

    def facts(self) -> dict[str, Any]:
        """For the event."""
        return {"ratio": round(self.found.ratio, 2), "busy_s": round(self.found.busy_s, 5),
                "others_s": round(self.found.others_s, 5), "cause": self.cause, "detail": self.detail}

    def failure(self) -> Failure:
        """For the policy."""
        return Failure(cause="straggler", node=self.node,
                       detail=f"{self.detail}: {self.cause}" if self.cause else self.detail)


class StragglerWatch:
    """Looks now and then, and records what it finds: comparing the step times of all ranks is more than a glance."""

    def __init__(self, log: EventLog) -> None:
        self._log, self._next = log, 0.0

    def look(self, job: Job, roster: Roster, now: float) -> SlowRank | None:
        """The rank that holds the others up, if it is time to look and there is one."""
        if now < self._next:
            return None
        self._next = now + _LOOK_S
        slow = find_slow_rank(job, roster, now)
        if slow is not None:
            self._log.record("straggler.found", source=slow.node, rank=slow.found.rank, generation=job.generation,
                             at=now, **slow.facts())
        return slow


def find_slow_rank(job: Job, roster: Roster, now: float) -> SlowRank | None:
    """The rank that has held the others up for so long that its node knows why; told again only after as many steps."""
    found = job.times.find() if job.status == RUNNING else None
    if found is None or job.table is None:
        job.slow_since = None
        return None
    seat = job.table.seats[found.rank]
    node = roster.get(seat.node)
    if job.slow_since is None:
        job.slow_since = now
        if node is not None:
            node.send(messages.Examine(local_rank=seat.local_rank, seconds=_CAUSE_S))
    if now - job.slow_since < _CAUSE_S:
        return None
    job.times.clear()
    job.slow_since = None
    worker = node.workers.get(seat.local_rank) if node else None
    return SlowRank(found=found, node=seat.node, cause=worker.slow if worker else "")
