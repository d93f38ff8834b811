"""The watch on progress: who holds the others up, who did not stop when told to, is the group itself broken?

It looks only at what nodes said lately: the last word of a silent node proves nothing about its workers, nor does one
that was said before the controller itself was stopped for a while.
"""

from __future__ import annotations

from collections.abc import Iterator

from ftlab.config import ClusterConfig
from ftlab.health.pressure import Pressure
from ftlab.health.progress import STARVED_FACTOR, Limits, Sighting, StepClock, all_waiting, find_stalled, holders
from ftlab.membership import Verdict
from ftlab.messages import Place
from ftlab.policy import Failure
from ftlab.recovery.job import RECOVERING, RESTORING, RUNNING, Job
from ftlab.recovery.roster import Roster
from ftlab.recovery.views import NodeView

TICK_S = 0.05  # between two looks at a cluster that starts, recovers or is suspicious
_CALM_S = 0.2  # and at one that trains: a look costs more than there is to see
_MUTE_S = 5.0  # for a worker that says nothing to leave a group that was cut, or to take its new seat
_LAST_HOLDER_S = 20.0  # for the only one that holds the state: ending it would lose what it is waited for
_SETTLE_S = 0.25  # a broken group without a known cause is rebuilt after this and the dead-node limit

Finding = tuple[Failure, float]  # what is wrong, and since when


class ProgressWatch:
    """Watches one job at a time."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self._broken_since: float | None = None
        self._listening_since = 0.0
        self._pressure = Pressure()
        self.clock = self._new_clock()

    def new_job(self) -> None:
        """Forget the step times of the last job."""
        self.clock, self._broken_since = self._new_clock(), None

    def recovery_begins(self) -> None:
        """The time up to the next step is no step time."""
        self.clock.pause()
        self._broken_since = None

    def group_broke(self, now: float) -> None:
        """A worker lost its peers; who died is usually known within milliseconds."""
        self._broken_since = self._broken_since or now

    def missed(self, late: float, now: float) -> None:
        """The controller itself was stopped, or got no CPU, for so long: what nodes said meanwhile is still read, and
        is old. What counts is said from now on."""
        if late > self.config.heartbeat_s:
            self._listening_since = now + self.config.heartbeat_s

    def calm_for(self, job: Job | None, roster: Roster, now: float) -> float:
        """The seconds in which nothing can be due that nobody would tell."""
        if job is not None and not job.over and job.status != RUNNING:
            return TICK_S
        return min(_CALM_S, max(TICK_S, roster.next_verdict() - now))

    def look(self, job: Job, roster: Roster, now: float) -> Iterator[Finding]:
        """What is wrong with a job's progress."""
        if job.status not in (RUNNING, RESTORING, RECOVERING):
            return
        limit = self.clock.limit()
        fresh = [node for node in roster.seated(job.plan)
                 if node.verdict == Verdict.ALIVE and node.spoke > max(now - limit / 2, self._listening_since)]
        seen = [sighting for node in fresh for sighting in node.sightings()]
        stalled = [(Failure(cause="stall", node=each.who[0], local_rank=each.who[1],
                            detail=each.blame(now, limit, self.config.outside_limit_s)), each.since)
                   for each in find_stalled(seen, now, limit, self.config.outside_limit_s)]
        yield from self._unless_last(job, roster, [*stalled, *self._stuck(job, fresh, now)], now)
        if not job.training:
            return
        since, seated = self._broken_since, job.recovery.seated if job.recovery else 0.0
        if since is not None and now - since > self.config.dead_s + _SETTLE_S:
            yield Failure(cause="link", detail="ranks lost each other and no node died"), since
        elif seated and now - seated > self.config.restore_limit_s:
            yield Failure(cause="link", detail=f"no first step within {self.config.restore_limit_s:g} s"), seated
        elif len(fresh) == len(job.plan) and (waited := self._all_wait(seen, job.generation, now, limit)):
            yield Failure(cause="link", detail=f"all ranks wait for one another for over {waited:.1f} s"), now - waited

    def _all_wait(self, seen: list[Sighting], generation: int, now: float, limit: float) -> float:
        """For how long the ranks have waited for one another, if that is too long; 0 if not."""
        if not all_waiting(seen, generation, now, 0.0):
            self._pressure.end()
            return 0.0
        self._pressure.begin(now)
        allowed = STARVED_FACTOR * limit if self._pressure.is_busy(now) else limit
        return allowed if all_waiting(seen, generation, now, allowed) else 0.0

    def _stuck(self, job: Job, fresh: list[NodeView], now: float) -> Iterator[Finding]:
        """Workers that were told to stop, had their group cut, and are still in it."""
        record = job.recovery
        if record is None or not job.table:
            return
        over, patience = job.generation + 1, max(_MUTE_S, 2 * self.clock.typical())
        places: set[Place] = {Place.COMMUNICATING} if now - record.began > patience else set()
        if job.status == RESTORING:
            over = record.generation
            if now - record.seated > patience:  # it was given a new seat and does not take it
                places |= {Place.RECOVERING}
        for node in fresh:
            for local_rank, worker in node.workers.items():
                mute = node.spoke > record.began + patience / 2 and worker.is_stuck_before(over, places)
                told = worker.says_it_is_stuck(over)
                if mute or told:
                    detail = f"did not stop within {now - record.began:.1f} s after its group was cut"
                    failure = Failure(cause="stall", node=node.name, local_rank=local_rank, detail=detail)
                    yield failure, record.began

    def _unless_last(self, job: Job, roster: Roster, found: list[Finding], now: float) -> list[Finding]:
        """Those that may be accused now: somebody must keep the state, and on a busy machine even a healthy worker may
        take long."""
        accused = {(failure.node, failure.local_rank) for failure, _ in found}
        seen = (sighting for node in roster.seated(job.plan) for sighting in node.sightings())
        kept = holders(seen, job.ledger.step)
        if not kept or not kept <= accused:
            return found
        return [(failure, since) for failure, since in found if now - since > _LAST_HOLDER_S]

    def _new_clock(self) -> StepClock:
        config = self.config
        return StepClock(Limits(floor_s=config.stall_floor_s, factor=config.stall_factor,
                                first_step_s=config.first_step_limit_s))
