"""The watch on progress: who holds the others up, who did not stop when told to, is the group itself broken?

It looks only at what nodes said lately: the last word of a silent node proves nothing about its workers.
"""

from __future__ import annotations

from collections.abc import Iterator

from ftlab.config import ClusterConfig
from ftlab.health.progress import Limits, StepClock, all_waiting, find_stalled
from ftlab.membership import Verdict
from ftlab.messages import Place
from ftlab.policy import Failure
from ftlab.recovery.job import RECOVERING, RESTORING, RUNNING, Job
from ftlab.recovery.roster import Roster
from ftlab.recovery.views import NodeView

TICK_S = 0.05  # between two looks at a cluster that starts, recovers or is suspicious
_CALM_S = 0.2  # and at one that trains: a look costs more than there is to see
_STOP_S = 0.4  # for a worker to notice that its group was cut
_JOIN_S = 1.0  # for a worker to take its new seat
_SETTLE_S = 0.25  # a broken group without a known cause is rebuilt after this and the dead-node limit

Finding = tuple[Failure, float]  # what is wrong, and since when


class ProgressWatch:
    """Watches one job at a time."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self._broken_since: float | None = None
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
                 if node.verdict == Verdict.ALIVE and now - node.heard < limit / 2]
        seen = [sighting for node in fresh for sighting in node.sightings()]
        for stalled in find_stalled(seen, now, limit, self.config.outside_limit_s):
            detail = f"{stalled.standing} for {now - stalled.since:.1f} s, a step may take {limit:.1f} s"
            yield Failure(cause="stall", node=stalled.who[0], local_rank=stalled.who[1], detail=detail), stalled.since
        yield from self._stuck(job, fresh, len(roster.seated(job.plan)), now)
        if not job.training:
            return
        since, seated = self._broken_since, job.recovery.seated if job.recovery else 0.0
        if since is not None and now - since > self.config.dead_s + _SETTLE_S:
            yield Failure(cause="link", detail="ranks lost each other and no node died"), since
        elif seated and now - seated > self.config.restore_limit_s:
            yield Failure(cause="link", detail=f"no first step within {self.config.restore_limit_s:g} s"), seated
        elif len(fresh) == len(job.plan) and all_waiting(seen, job.generation, now, limit):
            yield Failure(cause="link", detail=f"all ranks wait for one another for over {limit:.1f} s"), now - limit

    def _stuck(self, job: Job, fresh: list[NodeView], seated: int, now: float) -> Iterator[Finding]:
        """Workers that were told to stop, had their group cut, and still have not moved."""
        record = job.recovery
        patience = max(_STOP_S, 2 * self.clock.typical())
        if record is None or not job.table or now - record.began < patience:
            return
        over, places = job.generation + 1, {Place.COMMUNICATING}
        if job.status == RESTORING:
            over = record.generation
            if now - record.seated > max(_JOIN_S, patience):  # it was given a new seat and does not take it
                places = {Place.COMMUNICATING, Place.RECOVERING}
        stuck = [(node, local_rank) for node in fresh if node.heard > record.began + patience / 2
                 for local_rank, worker in node.workers.items() if worker.is_stuck_before(over, places)]
        if len({node.name for node, _ in stuck}) >= seated:
            return  # all of them: more likely the machine is busy, and somebody must keep the state
        for node, local_rank in stuck:
            detail = f"did not stop within {now - record.began:.1f} s after its group was cut"
            yield Failure(cause="stall", node=node.name, local_rank=local_rank, detail=detail), record.began

    def _new_clock(self) -> StepClock:
        config = self.config
        return StepClock(Limits(floor_s=config.stall_floor_s, factor=config.stall_factor,
                                first_step_s=config.first_step_limit_s))
