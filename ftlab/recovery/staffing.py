"""Which workers the nodes are told to run.

Each start has a name of its own, the run: what is said under another name is about a worker that was already replaced.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable

from ftlab import messages
from ftlab.config import ClusterConfig
from ftlab.errors import WaitTimeout
from ftlab.events import EventLog
from ftlab.recovery.job import Job
from ftlab.recovery.roster import Roster
from ftlab.recovery.views import NodeView, WorkerView


class Staffing:
    """Gives nodes their workers."""

    def __init__(self, config: ClusterConfig, log: EventLog, roster: Roster) -> None:
        self._procs, self._log, self._roster = config.procs_per_node, log, roster

    def assign(self, node: NodeView, job: Job) -> None:
        """Have a node run all its workers anew, for this job."""
        run = secrets.token_hex(4)
        node.job, node.workers = job.id, {local: WorkerView(run) for local in range(self._procs)}
        node.send(messages.RunJob(job=job.id, run=run, spec=job.spec()))

    def restart(self, job: Job, workers: Iterable[tuple[str, int]]) -> None:
        """Have single workers (node, local rank) replaced where they are; their nodes' other workers go on."""
        for name, local_rank in workers:
            node = self._roster.get(name)
            if node is None or not node.alive:
                continue
            run = secrets.token_hex(4)
            node.workers[local_rank] = WorkerView(run)
            self._log.record("worker.restarted", source=name, local_rank=local_rank)
            node.send(messages.RunJob(job=job.id, run=run, spec=job.spec(), local_ranks=[local_rank]))

    def missing(self, node: NodeView) -> list[int]:
        """The local ranks for which a node has no worker."""
        return [local for local in range(self._procs) if local not in node.workers]

    def late(self, job: Job, ready: Collection[str]) -> WaitTimeout:
        """A job could not start in time: who is missing."""
        there = len(self._roster.alive())
        if len(ready) == there < job.wanted:  # whoever is there is ready
            fewer = f"submit(..., min_nodes={there}) is content with them; or " if there else ""
            return WaitTimeout(
                f"job {job.name} did not start within {job.config.start_timeout_s:g} s: only {there} of the "
                f"{job.wanted} nodes that it wants are there",
                hint=f"{fewer}make a new cluster, with spares or with replace=True")
        waiting = [f"{node.name} is {'running the set-up' if node.alive else 'dead'}"
                   for node in self._roster.nodes.values() if node.name not in ready]
        return WaitTimeout(
            f"{len(ready)}/{job.wanted} nodes reached their first step after {job.config.start_timeout_s:g} s",
            seen="; ".join(waiting), hint="is the set-up before ctx.steps slow, or blocked?")
