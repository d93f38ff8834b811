"""The controller: observes nodes and workers, asks the policy, acts, and records everything as events.

It never trains and holds no training state. All its inputs are plain calls (a node said something, a node is gone, time
has passed), each of which ends in `_reconcile`, which looks at the whole situation and does the next thing that is
due. There is no long-lived procedure that could be half way through when the next failure arrives: a failure during
recovery is just another input, and leads to the next generation.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ftlab import messages
from ftlab import policy as acts
from ftlab.config import ClusterConfig
from ftlab.errors import BadMessage, BadPolicy, FtlabError, JobCancelled, JobRunning
from ftlab.events import EventLog
from ftlab.health.heartbeat import Watch
from ftlab.health.own import MakeOwn
from ftlab.membership import RankTable, Verdict, seat_nodes
from ftlab.policy import Failure, Snapshot
from ftlab.recovery.counsel import Counsel
from ftlab.recovery.hearing import Hearing
from ftlab.recovery.holds import Holds
from ftlab.recovery.job import FAILED, FINISHED, RECOVERING, RESTORING, RUNNING, STARTING, Job
from ftlab.recovery.reattachment import find_awaited, find_losses, link_again
from ftlab.recovery.record import RecoveryRecord
from ftlab.recovery.roster import Provider, Roster
from ftlab.recovery.staffing import Staffing
from ftlab.recovery.start_plan import choose_seats
from ftlab.recovery.stragglers import SlowRank, StragglerWatch
from ftlab.recovery.views import NodeView
from ftlab.recovery.watch import TICK_S, ProgressWatch

GATHER_S = 0.004  # failures that arrive together are decided on together
_ASK_AGAIN_S = 0.25  # a policy that said Wait
_SPARE_RETRIES = 3  # of a worker that fails on a node without a seat


class Controller:
    """Decides for one cluster; single-threaded, driven by its server's event loop."""

    def __init__(self, config: ClusterConfig, log: EventLog, provider: Provider,
                 store: Callable[[], tuple[str, int]], later: Callable[[float, Callable[[], None]], Any],
                 own_detector: MakeOwn | None = None) -> None:
        self.config, self.log, self.store, self.later = config, log, store, later
        self.roster = Roster(config, log, provider, later, self._node_died, own_detector)
        self.counsel, self.staffing = Counsel(config, log, self.roster), Staffing(config, log, self.roster)
        self.watch, self.stragglers = ProgressWatch(config), StragglerWatch(log)
        self.holds = Holds(log, self.roster)
        self.hearing = Hearing(log, self.watch, self.holds, self._worker_failed, self._rewind)
        self.job: Job | None = None
        self.jobs: dict[str, Job] = {}
        self.generation = 0
        self.on_output: Callable[[str, list[list[Any]]], None] = lambda node, lines: None
        self._punctuality = Watch(every_s=TICK_S, looked=time.monotonic(), slack_s=TICK_S)
        self._deciding = False
        self._offered: tuple[str, ...] = ()  # the free nodes the policy was last asked about

    # ---- inputs --------------------------------------------------------------------------------------------

    def node_hello(self, hello: messages.Hello, link: Callable[[messages.Message], None],
                   drop_link: Callable[[str], None]) -> None:
        """A node asks to be let in; raises BadMessage if it is not."""
        answer = self.roster.hello(hello, link, drop_link, self.generation)
        if isinstance(answer, str):
            raise BadMessage(answer)
        node, fresh = answer
        job = self.job if self.job and not self.job.over else None
        self.log.record("node.joined", source=node.name, address=node.address, pid=node.pid, fresh=fresh,
                        instance=node.instance, role="member" if job and node.name in job.plan else "spare",
                        waited=round(time.monotonic() - node.started, 4) if fresh else None)
        if job and node.job != job.id:
            self.staffing.assign(node, job)
        elif job and node.name not in job.plan:
            self.staffing.restart(job, tuple((node.name, local) for local in self.staffing.missing(node)))
        elif job:
            for failure in link_again(job, node, [str(worker["run"]) for worker in hello.workers], self.staffing):
                self._accuse(job, failure, node.heard, node.heard)
            self.holds.welcome(job, node.name)
        elif hello.workers and not fresh:
            node.send(messages.EndJob(job=hello.job))  # it ended while the node had no link
        self._reconcile()

    def node_said(self, name: str, message: messages.Message) -> None:
        """A message on a node's link."""
        node, job = self.roster.heard(name), self.job
        if node is None:
            raise BadMessage(f"{name} was declared dead: it must say hello again")
        current = job if job and not job.over else None
        if isinstance(message, messages.Heartbeat):
            node.take_progress(message.workers)
            if current:
                self.hearing.steps(current, node, message.steps)
            if message.output:
                self.on_output(name, message.output)
            self.roster.beat(node, *((job.ledger.generation, job.ledger.step) if job else (0, 0)))
        elif isinstance(message, messages.Noted):
            if current and message.job == current.id:
                self.hearing.noted(current, node, message)
        elif not isinstance(message, messages.FromWorker):
            raise BadMessage(f"a node does not send {type(message).__name__}")
        elif current and message.job == current.id == node.job:
            self.hearing.worker(current, node, message)
        self._reconcile()

    def node_unlinked(self, name: str, link: object) -> None:
        """A node's link closed."""
        self.roster.unlinked(name, link)

    def node_exited(self, name: str, how: str) -> None:
        """Whoever started the node saw it end."""
        self.roster.exited(name, how)
        self._reconcile()

    def tick(self) -> float:
        """Time has passed: look at silence and at progress; how many seconds the next look can wait."""
        now = time.monotonic()
        late = self._punctuality.look(now)
        self.roster.judge(now, late, find_awaited(self.job, self.roster))
        self.watch.missed(late, now)
        if self.job and not self.job.over and not self.job.reattaching:
            for failure, since in list(self.watch.look(self.job, self.roster, now)):
                self._accuse(self.job, failure, since, now)
            slow = self.stragglers.look(self.job, self.roster, now)
            if slow is not None and self.job.config.health.replace_stragglers:
                self._replace_straggler(self.job, slow, now)
        self._reconcile()
        self._punctuality.every_s = self.watch.calm_for(self.job, self.roster, now)
        return self._punctuality.every_s

    def submit(self, job: Job) -> None:
        """Start a job on all nodes; raises JobRunning while another one does."""
        if self.job is not None and not self.job.over:
            raise JobRunning(f"job {self.job.name} is still {self.job.status}, at step {self.job.ledger.step}",
                             hint="job.result() waits for it, job.cancel() ends it")
        job.submitted = time.monotonic()
        self.job = self.jobs[job.id] = job
        self.watch.new_job()
        self.log.record("job.submitted", job=job.id, name=job.name, config=job.config.to_dict(), wanted=job.wanted,
                        path=job.path)
        for node in self.roster.alive():
            self.staffing.assign(node, job)
        self._reconcile()

    def cancel(self, job: Job) -> None:
        """End a job now."""
        if not job.over:
            self._end(job, FAILED, JobCancelled(f"job {job.id} was cancelled at step {job.ledger.step}"))

    def watch_step(self, step: int) -> None:
        """Have this step reported at once."""
        for node in self.roster.alive():
            node.send(messages.Watch(step=step))

    def status(self) -> dict[str, Any]:
        """For clients."""
        job = self.job if self.job and not self.job.over else None
        chosen = job.plan if job and job.plan else self.roster.next_members(self.config.nodes)
        nodes = self.roster.status(job.table if job else None, chosen)
        return {"generation": self.generation, "nodes": nodes, "job": self.job.to_dict() if self.job else None,
                "at": time.monotonic(), "events": self.log.seq, "config": self.config.to_dict()}

    # ---- failures ------------------------------------------------------------------------------------------

    def _node_died(self, node: NodeView, reason: str, evidence: float, verdict: float) -> None:
        if self.job:
            self.job.kept.pop(node.name, None)  # also if it comes back: it starts over
        if self.job and not self.job.over and node.name in self.job.plan:
            self._fail(self.job, Failure(cause="node", node=node.name, detail=reason), evidence, verdict)

    def _worker_failed(self, failure: Failure, evidence: float, verdict: float) -> None:
        job = self.job
        assert job is not None and failure.local_rank is not None
        if failure.node in job.plan or job.status == STARTING:
            self._fail(job, failure, evidence, verdict)
        elif job.retries.get(failure.node, 0) < _SPARE_RETRIES:
            job.retries[failure.node] = job.retries.get(failure.node, 0) + 1
            self.staffing.restart(job, ((failure.node, failure.local_rank),))

    def _accuse(self, job: Job, failure: Failure, since: float, now: float) -> None:
        node = self.roster.get(failure.node)
        if node is not None and failure.local_rank is not None:
            node.workers[failure.local_rank].failed = True
            self.log.record("worker.failed", source=failure.node, cause=failure.cause, detail=failure.detail,
                            generation=job.generation, at=now)
        self._fail(job, failure, since, now)

    def _fail(self, job: Job, failure: Failure, evidence: float, verdict: float) -> None:
        """Something with a seat broke: stop the others at once, and decide in a moment."""
        job.note(failure)
        job.split = job.split or (failure.cause == "oom" and failure.local_rank is not None)
        if job.table is not None and job.status != RECOVERING:
            self._terminate(job, failure, evidence, verdict)
        elif job.recovery and failure.node and failure.node not in job.recovery.nodes:
            job.recovery.nodes.append(failure.node)
        if not self._deciding:
            self._deciding = True
            self.later(GATHER_S, self._decide)

    def _rewind(self, job: Job, reason: str) -> None:
        """All ranks have decided to go back to a checkpoint: they need a new generation for it, and nothing else."""
        now = time.monotonic()
        self._terminate(job, Failure(cause="numbers", detail=reason), now, now)
        self._act(job, acts.Continue())

    def _terminate(self, job: Job, failure: Failure, evidence: float, verdict: float) -> None:
        """The first step of a recovery: normal nodes stop at once."""
        abandoned = job.recovery if job.status == RESTORING else None
        if abandoned:
            self.log.record("recovery.abandoned", generation=job.generation, reason=failure.detail, at=verdict)
        job.status = RECOVERING
        self.watch.recovery_begins()
        nodes = [failure.node] if failure.node else []
        record = job.recovery = RecoveryRecord(cause=failure.cause, nodes=nodes, began=verdict,
                                               attempts=abandoned.attempts + 1 if abandoned else 1)
        record.span("detect", min(evidence, verdict), verdict)
        self.log.record("recovery.started", generation=job.generation + 1, cause=failure.cause, nodes=nodes,
                        detail=failure.detail, at=verdict, evidence=min(evidence, verdict))
        body = messages.encode(messages.Terminate(generation=job.generation))
        for node in self.roster.seated(job.plan):
            if node.name != failure.node and node.name not in job.stopped:
                record.awaiting_stop.add(node.name)
            node.send(messages.ToWorkers(job=job.id, body=body))
        if not record.awaiting_stop:  # they noticed before anybody told them
            record.span("terminate", verdict, verdict)

    def _decide(self) -> None:
        job = self.job
        if job is not None and not job.over and job.reattaching:  # who lives and holds the state is not known yet
            self.later(TICK_S, self._decide)
            return
        self._deciding = False
        if job is None or job.over or not job.failures:
            return
        failures, job.failures = tuple(dict.fromkeys(job.failures)), []
        if job.fatal is not None:  # no policy can mend it
            self._end(job, FAILED, job.fatal_error())
            return
        action = self._ask(job, self.counsel.snapshot(job, failures))
        if action is None:
            return
        if isinstance(action, acts.Wait):  # ask again: something may have changed by then
            job.failures, self._deciding = list(failures), True
            self.later(_ASK_AGAIN_S, self._decide)
            return
        for cause in sorted({failure.cause for failure in failures}):
            job.spend(cause)
        self._act(job, action)
        if job.recovery:
            job.recovery.decided = time.monotonic()
        self._reconcile()

    def _ask(self, job: Job, snapshot: Snapshot) -> acts.Action | None:
        """What the job's policy says; None if that was nonsense, which ends the job."""
        try:
            return self.counsel.ask(job, snapshot)
        except BadPolicy as error:
            self._end(job, FAILED, error)
            return None

    def _act(self, job: Job, action: acts.Action) -> None:
        if isinstance(action, acts.Abort):
            self._end(job, FAILED, job.error_of(action))
            return
        self.staffing.restart(job, action.restart)
        before = set(job.plan)
        if isinstance(action, acts.Replace):
            seats = {node: spare or self.roster.start() for node, spare in action.seats.items()}
            job.plan = [seats.get(name, name) for name in job.plan]
        elif isinstance(action, acts.Shrink):
            job.plan = [name for name in job.plan if name not in action.lost]
        elif isinstance(action, acts.Grow):
            job.plan = [*job.plan, *action.added]
        for node in self.roster.alive():  # given up for its workers, not dead: fresh ones make it a spare
            used = any(worker.failed or worker.generation for worker in node.workers.values())
            if used and node.name in before - set(job.plan):
                self.staffing.assign(node, job)

    # ---- the next thing that is due ------------------------------------------------------------------------

    def _reconcile(self) -> None:
        job = self.job
        if job is None or job.over or not self._reattached(job):
            return
        if job.status == STARTING:
            self._plan_start(job)
        if job.status in (STARTING, RECOVERING) and not job.failures:
            self._seat_if_ready(job)
        if job.status == RESTORING and job.table and len(job.moved) >= job.table.world:
            self._restored(job)
        if job.status == RUNNING:
            self._grow_if_possible(job)
        if job.training and job.table and len(job.finished) == job.table.world:
            diverged = job.diverged()
            self._end(job, FAILED if diverged else FINISHED, diverged)

    def _reattached(self, job: Job) -> bool:
        """After a restart of the controller: whether all members are back, and a recovery if it cut one short."""
        if not job.reattaching:
            return True
        if any(node.link is None for node in self.roster.seated(job.plan)):
            return False
        job.reattaching = False
        now, step = time.monotonic(), self.log.last("step.committed")
        for failure in find_losses(job, self.roster, self.staffing):
            self._fail(job, failure, step.at if step else now, now)  # in a step every rank takes part
        return True

    def _plan_start(self, job: Job) -> None:
        now = time.monotonic()
        chosen = self.roster.alive()[:job.wanted]
        ready = tuple(node.name for node in chosen if node.ready(job.id, self.config.procs_per_node))
        coming = [node for node in self.roster.nodes.values() if node.verdict != Verdict.DEAD]
        if len(coming) < job.wanted and self.config.replace:
            coming.append(self.roster.nodes[self.roster.start()])
        job.plan = list(choose_seats(job.muster(ready, len(coming) - len(ready), now)))
        if not job.plan and now - job.submitted > job.config.start_timeout_s:
            self._end(job, FAILED, self.staffing.late(job, ready))

    def _seat_if_ready(self, job: Job) -> None:
        nodes = [node for node in self.roster.seated(job.plan) if node.ready(job.id, self.config.procs_per_node)]
        if not job.plan or len(nodes) < len(job.plan):
            return
        begin = time.monotonic()
        self.generation += 1
        table = seat_nodes(self.generation, [(node.name, node.address) for node in nodes], self.config.procs_per_node)
        job.table = job.tables[table.generation] = table
        job.new_generation()
        self._offered = ()
        record = job.recovery = job.recovery or RecoveryRecord(cause="start", nodes=[], began=begin)
        record.generation = table.generation
        if record.decided:
            record.span("replace", record.decided, begin)
        self.log.record("membership.changed", generation=table.generation, table=table.to_dict(), world=table.world)
        record.span("ranktable", begin, time.monotonic())
        self._continue(job, nodes, table, record)

    def _continue(self, job: Job, nodes: list[NodeView], table: RankTable, record: RecoveryRecord) -> None:
        begin = time.monotonic()
        job.invitation = messages.encode(messages.Join(table=table.to_dict(), store=list(self.store()),
                                                      secret=secrets.token_hex(16), step=job.ledger.step,
                                                      split=job.split, holds=self.holds.waiting()))
        for node in nodes:
            for worker in node.workers.values():
                worker.place, worker.since = messages.Place.RECOVERING, begin  # the old place is the old world's
            node.send(messages.ToWorkers(job=job.id, body=job.invitation))
        if job.config.checkpoint is not None:
            self.roster.pair(nodes)
        job.status, record.seated = RESTORING, time.monotonic()
        record.span("continue", begin, record.seated)

    def _restored(self, job: Job) -> None:
        record, job.recovery, job.status, job.split = job.recovery, None, RUNNING, False
        assert record is not None
        kind = "job.started" if record.cause == "start" else "recovery.finished"
        self.log.record(kind, generation=job.generation, step=job.ledger.step, **record.facts())
        free = sum(node.name not in job.plan and node.verdict != Verdict.DEAD for node in self.roster.nodes.values())
        if self.config.replenish and self.config.replace:
            for _ in range(self.config.spares - free):
                self.roster.start()

    def _grow_if_possible(self, job: Job) -> None:
        if len(job.plan) >= job.wanted or job.finished:
            return
        ready = self.counsel.ready_spares(job)
        if not ready or ready == self._offered:
            return
        self._offered = ready
        action = self._ask(job, replace(self.counsel.snapshot(job, ()), spares=ready))
        if isinstance(action, acts.Grow):
            now = time.monotonic()
            self._terminate(job, Failure(cause="grow", detail=f"{', '.join(action.added)} joined"), now, now)
            self._act(job, action)
            self._reconcile()

    def _replace_straggler(self, job: Job, slow: SlowRank, now: float) -> None:
        failure = slow.failure()
        snapshot = replace(self.counsel.snapshot(job, (failure,)), spares=self.counsel.ready_spares(job))
        action = self._ask(job, snapshot)
        if isinstance(action, acts.Replace | acts.Shrink):
            job.spend("straggler")
            self._terminate(job, failure, now, now)
            self._act(job, action)

    # ---- the end -------------------------------------------------------------------------------------------

    def _end(self, job: Job, status: str, error: FtlabError | None = None) -> None:
        self.hearing.close(job)
        self.holds.job_ended(job)
        job.status, job.error = status, error
        digests = {row["digest"] for row in job.finished.values()}
        self.log.record("job.finished", job=job.id, status=status, step=job.ledger.step, generation=job.generation,
                        digest=min(digests) if len(digests) == 1 else None, agree=len(digests) <= 1,
                        error=error.to_dict() if error else None)
        for node in self.roster.alive():
            node.send(messages.ToWorkers(job=job.id, body=messages.encode(messages.Release())))
            node.send(messages.EndJob(job=job.id))
            node.job, node.workers = "", {}
