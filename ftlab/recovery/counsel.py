"""Asking the policy: what it gets to see of a job, and whether its answer can be followed.

A policy may be a student's: whatever it raises or returns ends in an action or in `BadPolicy`, never in a controller
that is half way through.
"""

from __future__ import annotations

from ftlab import policy as acts
from ftlab.config import ClusterConfig
from ftlab.errors import BadPolicy
from ftlab.events import EventLog
from ftlab.policy import Failure, Snapshot
from ftlab.recovery.job import Job
from ftlab.recovery.roster import Roster


class Counsel:
    """Takes the situation of a job to its policy, and the answer back."""

    def __init__(self, config: ClusterConfig, log: EventLog, roster: Roster) -> None:
        self._config, self._log, self._roster = config, log, roster

    def snapshot(self, job: Job, failures: tuple[Failure, ...]) -> Snapshot:
        """What a policy may look at."""
        procs = self._config.procs_per_node
        alive = self._roster.alive()
        spares = sorted((node for node in alive if node.name not in job.plan),
                        key=lambda node: (not node.ready(job.id, procs), node.number))
        holders = sum(worker.holds_state for node in self._roster.seated(job.plan) for worker in node.workers.values())
        return Snapshot(failures=failures, members=tuple(job.plan), spares=tuple(node.name for node in spares),
                        wanted=job.wanted, minimum=job.minimum, can_start=self._config.replace, step=job.ledger.step,
                        holders=holders, saved=job.newest_saved([node.name for node in alive]),
                        repeats=job.repeats(failures), procs_per_node=procs)

    def ready_spares(self, job: Job) -> tuple[str, ...]:
        """The nodes without a seat that could take one at once."""
        return tuple(node.name for node in self._roster.alive()
                     if node.name not in job.plan and node.ready(job.id, self._config.procs_per_node))

    def ask(self, job: Job, snapshot: Snapshot) -> acts.Action:
        """The policy's answer, recorded; raises BadPolicy if it is none."""
        try:
            action = job.policy(snapshot, job.budgets())
        except Exception as error:
            raise BadPolicy(f"the policy raised {type(error).__name__}: {error}") from error
        problem = acts.find_problem(action, snapshot)
        if problem:
            raise BadPolicy(f"the policy returned {action!r}: {problem}",
                            hint="return one of ftlab.policy's actions, e.g. Continue()")
        if action != job.last_action:
            self._log.record("action.decided", generation=job.generation, action=type(action).__name__,
                             detail={key: str(value) for key, value in vars(action).items() if value})
        job.last_action = action if isinstance(action, acts.Wait) else None
        return action
