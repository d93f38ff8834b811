"""The controller: observes nodes and workers, asks the policy, acts, and records everything as events.

It never trains and holds no training state. All its inputs are plain calls (a node said something, a node is gone, time
has passed), each of which ends in `_reconcile`, which looks at the whole situation and does the next thing that is
due. There is no long-lived procedure that could be half way through when the next failure arrives: a failure during
recovery is just another input, and leads to the next generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from ftlab import messages
from ftlab.config import ClusterConfig
from ftlab.errors import BadPolicy, FtlabError, JobCancelled, JobError, WaitTimeout, from_dict
from ftlab.events import EventLog
from ftlab.health.heartbeat import FixedTimeout, Watch
from ftlab.health.progress import Limits, StepClock, all_waiting, find_stalled
from ftlab.membership import RankTable, Verdict, seat_nodes
from ftlab.recovery import policy as acts
from ftlab.recovery.job import FAILED, FINISHED, RECOVERING, RESTORING, RUNNING, STARTING, Job
from ftlab.recovery.policy import Failure, Snapshot
from ftlab.recovery.record import RecoveryRecord
from ftlab.recovery.views import NodeView, WorkerView

TICK_S = 0.02
GATHER_S = 0.004  # failures that arrive together are decided on together
_STOP_S = 0.4  # for a worker to notice that its group was cut
_SETTLE_S = 0.25  # a broken group without a known cause is rebuilt after this and the dead-node limit


class Provider(Protocol):
    """Where nodes come from."""

    def start_node(self, name: str) -> None:
        """Ask for a new node; it will say hello."""

    def remove_node(self, name: str) -> None:
        """Get rid of a node for good."""


class Controller:
    """Decides for one cluster; single-threaded, driven by its server's event loop."""

    def __init__(self, config: ClusterConfig, log: EventLog, provider: Provider,
                 store: Callable[[], tuple[str, int]], later: Callable[[float, Callable[[], None]], Any]) -> None:
        self.config, self.log, self.provider, self.store, self.later = config, log, provider, store, later
        self.nodes: dict[str, NodeView] = {}
        self.job: Job | None = None
        self.jobs: dict[str, Job] = {}
        self.generation = 0
        self.detector = FixedTimeout(suspect_s=config.suspect_s, dead_s=config.dead_s)
        self.clock = self._new_clock()
        self._watch = Watch(every_s=TICK_S, looked=time.monotonic())
        self._deciding = False
        self._broken_since: float | None = None
        self._next_number = 0
        self._offered: tuple[str, ...] = ()  # the free nodes the policy was last asked about
        self.on_output: Callable[[str, list[list[Any]]], None] = lambda node, lines: None

    # ---- nodes: what they say ------------------------------------------------------------------------------

    def expect_node(self, name: str) -> NodeView:
        """A node that was asked for and has not said hello yet."""
        now = time.monotonic()
        node = self.nodes[name] = NodeView(name, started=now, heard=now)
        self._next_number = max(self._next_number, node.number + 1 if node.number < 1 << 30 else 0)
        return node

    def node_hello(self, hello: messages.Hello, link: Callable[[messages.Message], None],
                   drop_link: Callable[[str], None]) -> str:
        """A node asks to be let in; empty if it is, else why not."""
        node = self.nodes.get(hello.node) or self.expect_node(hello.node)
        if node.alive and node.instance != hello.instance and node.link is not None:
            self.log.record("message.refused", node=hello.node, reason="another process holds this node's name")
            return f"{hello.node} is already linked by another process"
        returning = node.instance == hello.instance
        fresh = not (returning and node.verdict != Verdict.DEAD)
        if returning and fresh:
            self.log.record("node.fenced", source=node.name, generation=self.generation,
                            reason="it was declared dead: it starts over as a new node",
                            refused=[worker for worker in hello.workers if worker.get("generation")])
        node.address, node.pid, node.instance = hello.address, hello.pid, hello.instance
        node.link, node.drop_link, node.heard, node.verdict = link, drop_link, time.monotonic(), Verdict.ALIVE
        if fresh:
            node.workers, node.job = {}, ""
        else:
            node.job = hello.job
            self._take_progress(node, hello.workers)
        node.send(messages.Welcome(fresh=fresh, heartbeat_s=self.config.heartbeat_s, lease_s=self.config.lease_s))
        self._note_join(node, fresh)
        self._reconcile()
        return ""

    def _note_join(self, node: NodeView, fresh: bool) -> None:
        seated = bool(self.job and node.name in self.job.plan)
        self.log.record("node.joined", source=node.name, address=node.address, pid=node.pid, fresh=fresh,
                        instance=node.instance, role="member" if seated else "spare",
                        waited=round(time.monotonic() - node.started, 4) if fresh else None)
        if self.job and not self.job.over and node.job != self.job.id:
            self._assign(node, self.job)

    def node_said(self, name: str, message: messages.Message) -> None:
        """A message on a node's link."""
        node = self.nodes[name]
        node.heard = time.monotonic()
        if node.verdict == Verdict.SUSPECT:
            node.verdict = Verdict.ALIVE
        if isinstance(message, messages.Heartbeat):
            self._take_progress(node, message.workers)
            self._take_steps(node, message.steps)
            if message.output:
                self.on_output(name, message.output)
            node.send(messages.Ack(number=message.number))
        elif isinstance(message, messages.FromWorker):
            self._worker_said(node, message)
        else:
            self.log.record("message.refused", node=name, reason=f"a node does not send {type(message).__name__}")
        self._reconcile()

    def node_unlinked(self, name: str, link: object) -> None:
        """A node's link closed: it may be gone, or only the link; silence will tell."""
        node = self.nodes.get(name)
        if node is not None and node.link == link:
            node.link = node.drop_link = None

    def node_exited(self, name: str, how: str) -> None:
        """Whoever started the node saw it end."""
        node = self.nodes.get(name)
        if node is None:
            return
        if node.verdict != Verdict.DEAD:
            self._bury(node, how, evidence=time.monotonic())
        self.nodes.pop(name)
        self._reconcile()

    def tick(self) -> None:
        """Time has passed: look at silence and at progress."""
        now = time.monotonic()
        late = self._watch.look(now)
        for node in list(self.nodes.values()):
            node.heard += late
            node.started += late
            self._judge(node, now)
        self._watch_progress(now)
        self._reconcile()

    def _judge(self, node: NodeView, now: float) -> None:
        if node.verdict == Verdict.DEAD:
            return
        if not node.joined:
            if now - node.started > self.config.start_timeout_s:
                self._bury(node, f"did not come up in {self.config.start_timeout_s:g} s", evidence=node.started)
            return
        silence = now - node.heard
        verdict = self.detector.judge(silence)
        if verdict == Verdict.DEAD:
            self._bury(node, f"no heartbeat for {silence:.2f} s", evidence=node.heard)
        elif verdict == Verdict.SUSPECT and node.verdict == Verdict.ALIVE:
            node.verdict = verdict
            self.log.record("node.suspected", source=node.name, reason=f"no heartbeat for {silence:.2f} s")

    def _bury(self, node: NodeView, reason: str, evidence: float) -> None:
        """The verdict DEAD: close the link, fence the node, and recover if it had a seat."""
        node.verdict = Verdict.DEAD
        if node.drop_link:
            node.drop_link(f"declared dead: {reason}")
        node.link = node.drop_link = None
        node.workers, node.job = {}, ""
        event = self.log.record("node.died", source=node.name, generation=self.generation, verdict=str(Verdict.DEAD),
                                reason=reason, cause="node", evidence=evidence, address=node.address)
        self.later(self.config.reclaim_s, lambda: self._reclaim(node))
        if self.job and not self.job.over and node.name in self.job.plan:
            self._fail(Failure(cause="node", node=node.name, detail=reason), evidence, event.at)

    def _reclaim(self, node: NodeView) -> None:
        if self.nodes.get(node.name) is node and node.verdict == Verdict.DEAD:
            self.nodes.pop(node.name)
            self.log.record("node.reclaimed", source=node.name)
            self.provider.remove_node(node.name)

    # ---- workers: what they say ----------------------------------------------------------------------------

    def _take_progress(self, node: NodeView, reports: list[dict[str, Any]]) -> None:
        for report in reports:
            if report.get("job") != node.job:
                continue
            view = node.workers.setdefault(int(report["local_rank"]), WorkerView())
            if view.is_about(int(report["pid"])):
                view.update(report)

    def _take_steps(self, node: NodeView, records: list[dict[str, Any]]) -> None:
        job = self.job
        if job is None or job.over:
            return
        for record in records:
            table = job.tables.get(int(record["generation"]))
            rank = table.rank_of(node.name, int(record["local_rank"])) if table else None
            if table is None or rank is None:
                self.log.record("message.refused", node=node.name, generation=record["generation"],
                                step=record["step"], reason="a step from a generation this node has no seat in")
                continue
            if record["generation"] == job.generation:
                job.moved.add(rank)
            for entry in job.ledger.add(rank, table.world, record):
                self.log.record("step.committed", at=entry.at, generation=entry.generation, step=entry.step,
                                **entry.facts())
                if len(entry.digests) > 1:
                    self.log.record("samples.disagreed", generation=entry.generation, step=entry.step)
                self.clock.tick(entry.at)

    def _worker_said(self, node: NodeView, wrapper: messages.FromWorker) -> None:
        job = self.job
        if job is None or wrapper.job != job.id or node.job != job.id or job.over:
            return
        view = node.workers.setdefault(wrapper.local_rank, WorkerView())
        if not view.is_about(wrapper.pid):
            return  # a worker that was already replaced
        view.pid = wrapper.pid
        message = messages.decode(wrapper.body)
        who = f"{node.name} rank={view.rank}" if view.rank >= 0 else node.name
        match message:
            case messages.Parked():
                view.parked = True
                self.log.record("worker.parked", source=node.name, seconds=round(message.seconds, 4), pid=view.pid)
            case messages.Stopped():
                self._worker_stopped(job, node, message)
            case messages.Spans():
                if job.recovery and message.generation == job.recovery.generation:
                    for name, begin, end in message.spans:
                        job.recovery.span(name, begin, end, who)
                    job.recovery.source = message.source or job.recovery.source
            case messages.Finished():
                self._worker_finished(job, node, wrapper.local_rank, message)
            case messages.Failed():
                self._worker_failed(job, node, wrapper.local_rank, view, message)

    def _worker_stopped(self, job: Job, node: NodeView, message: messages.Stopped) -> None:
        self.log.record("worker.stopped", source=node.name, generation=message.generation, step=message.step,
                        at=message.at, reason=message.reason)
        record = job.recovery
        if record and node.name in record.awaiting_stop:
            record.awaiting_stop.discard(node.name)
            if not record.awaiting_stop:
                record.span("terminate", record.began, max(message.at, record.began))
        if message.generation == job.generation and job.status in (RUNNING, RESTORING) and self._broken_since is None:
            self._broken_since = time.monotonic()  # its peers are gone; who died is usually known within milliseconds

    def _worker_finished(self, job: Job, node: NodeView, local_rank: int, message: messages.Finished) -> None:
        rank = job.table.rank_of(node.name, local_rank) if job.table else None
        if rank is None or message.generation != job.generation:
            return
        job.moved.add(rank)
        job.finished[rank] = {"node": node.name, "digest": message.digest, "result": message.result,
                              "error": message.error, "step": message.step}
        self.log.record("worker.finished", source=node.name, rank=rank, generation=message.generation,
                        step=message.step, digest=message.digest)

    def _worker_failed(self, job: Job, node: NodeView, local_rank: int, view: WorkerView,
                       message: messages.Failed) -> None:
        view.failed = True
        now = time.monotonic()
        self.log.record("worker.failed", source=node.name, rank=view.rank if view.rank >= 0 else None,
                        generation=message.generation, step=message.step, cause=message.cause,
                        detail=message.detail, pid=view.pid)
        if message.traceback:
            job.tracebacks.append(message.traceback)
        if message.fatal and job.fatal is None:
            job.fatal = from_dict(message.fatal)
        if node.name in job.plan or job.status == STARTING:
            self._fail(Failure(cause=message.cause, node=node.name, local_rank=local_rank, detail=message.detail,
                               fatal=message.fatal is not None), now, now)
        else:
            self._restart_workers(job, ((node.name, local_rank),))  # a spare's worker

    # ---- jobs ----------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Start a job on all nodes; raises JobError while another one runs."""
        if self.job is not None and not self.job.over:
            raise JobError(f"job {self.job.id} is still {self.job.status}",
                           hint="wait for it with job.result(), or job.cancel() it")
        job.submitted = time.monotonic()
        self.job = self.jobs[job.id] = job
        self.clock = self._new_clock()
        self.log.record("job.submitted", job=job.id, name=job.name, config=job.config.to_dict(), wanted=job.wanted,
                        path=job.path)
        for node in self._alive():
            self._assign(node, job)
        self._reconcile()

    def cancel(self, job: Job) -> None:
        """End a job now."""
        if not job.over:
            self._end(job, FAILED, JobCancelled(f"job {job.id} was cancelled at step {job.ledger.step}"))

    def watch_step(self, step: int) -> None:
        """Have this step reported at once."""
        for node in self._alive():
            node.send(messages.Watch(step=step))

    def _assign(self, node: NodeView, job: Job) -> None:
        node.job, node.workers = job.id, {}
        node.send(messages.RunJob(job=job.id, spec=job.spec()))

    def _restart_workers(self, job: Job, workers: tuple[tuple[str, int], ...]) -> None:
        for name, local_rank in workers:
            node = self.nodes[name]
            node.workers[local_rank] = WorkerView(replaces=node.workers[local_rank].pid)
            self.log.record("worker.restarted", source=name, local_rank=local_rank)
            node.send(messages.RunJob(job=job.id, spec=job.spec(), local_ranks=[local_rank]))

    def _end(self, job: Job, status: str, error: FtlabError | None = None) -> None:
        job.status, job.error = status, error
        digests = {row["digest"] for row in job.finished.values()}
        self.log.record("job.finished", job=job.id, status=status, step=job.ledger.step, generation=job.generation,
                        digest=min(digests) if len(digests) == 1 else None, agree=len(digests) <= 1,
                        error=error.to_dict() if error else None)
        for node in self._alive():
            node.send(messages.ToWorkers(job=job.id, body=messages.encode(messages.Release())))
            node.send(messages.EndJob(job=job.id))
            node.job, node.workers = "", {}

    # ---- failures ------------------------------------------------------------------------------------------

    def _fail(self, failure: Failure, evidence: float, verdict: float) -> None:
        """Something with a seat broke: stop the others at once, and decide in a moment."""
        job = self.job
        assert job is not None
        job.failures.append(failure)
        job.history.append({"cause": failure.cause, "node": failure.node, "detail": failure.detail,
                            "step": job.ledger.step, "generation": job.generation})
        if failure.local_rank is not None:
            job.repeats[failure.node] = job.repeats.get(failure.node, 0) + 1
        if job.status == STARTING and job.table is None:
            self._decide_soon()
            return
        if job.status != RECOVERING:
            self._begin_recovery(job, failure, evidence, verdict)
        elif job.recovery and failure.node not in job.recovery.nodes:
            job.recovery.nodes.append(failure.node)
        self._decide_soon()

    def _begin_recovery(self, job: Job, failure: Failure, evidence: float, verdict: float) -> None:
        abandoned = job.recovery if job.status == RESTORING else None
        job.status, self._broken_since = RECOVERING, None
        self.clock.pause()
        nodes = [failure.node] if failure.node else []
        if abandoned:
            self.log.record("recovery.abandoned", generation=job.generation, reason=failure.detail)
        record = RecoveryRecord(cause=failure.cause, nodes=nodes, began=verdict,
                                attempts=abandoned.attempts + 1 if abandoned else 1)
        record.span("detect", min(evidence, verdict), verdict)
        job.recovery = record
        self.log.record("recovery.started", generation=job.generation + 1, cause=failure.cause, nodes=nodes,
                        detail=failure.detail, at=verdict)
        body = messages.encode(messages.Terminate(generation=job.generation))
        for name in job.plan:
            node = self.nodes.get(name)
            if node is not None and node.alive and name != failure.node:
                record.awaiting_stop.add(name)
            if node is not None and node.alive:
                node.send(messages.ToWorkers(job=job.id, body=body))

    def _decide_soon(self) -> None:
        if not self._deciding:
            self._deciding = True
            self.later(GATHER_S, self._decide)

    def _decide(self) -> None:
        self._deciding = False
        job = self.job
        if job is None or job.over or not job.failures:
            return
        failures, job.failures = tuple(dict.fromkeys(job.failures)), []
        action = self._ask_policy(job, self._snapshot(job, failures))
        if action is None:
            return
        for cause in sorted({failure.cause for failure in failures}):
            job.spend(cause)
        self._act(job, action)
        if job.recovery:
            job.recovery.decided = time.monotonic()
        self._reconcile()

    def _snapshot(self, job: Job, failures: tuple[Failure, ...]) -> Snapshot:
        spares = sorted((node for node in self._alive() if node.name not in job.plan),
                        key=lambda node: (not node.ready(job.id, self.config.procs_per_node), node.number))
        lost = {failure.node for failure in failures if failure.cause == "node"}
        holders = sum(worker.holds_state for name in job.plan if name in self.nodes and name not in lost
                      for worker in self.nodes[name].workers.values())
        return Snapshot(failures=failures, members=tuple(job.plan), spares=tuple(node.name for node in spares),
                        wanted=job.wanted, minimum=job.minimum, can_start=self.config.replace, step=job.ledger.step,
                        holders=holders, repeats={node: count - 1 for node, count in job.repeats.items()})

    def _ask_policy(self, job: Job, snapshot: Snapshot) -> acts.Action | None:
        try:
            action = job.policy(snapshot, job.budgets())
        except Exception as error:
            self._end(job, FAILED, BadPolicy(f"the policy raised {type(error).__name__}: {error}"))
            return None
        if not isinstance(action, acts.Action):
            self._end(job, FAILED, BadPolicy(f"the policy returned {action!r}, which is no Action",
                                             hint="return one of ftlab.recovery.policy's actions, e.g. Continue()"))
            return None
        self.log.record("action.decided", generation=job.generation, action=type(action).__name__,
                        detail={key: str(value) for key, value in vars(action).items() if value})
        return action

    def _act(self, job: Job, action: acts.Action) -> None:
        if isinstance(action, acts.Abort):
            self._end(job, FAILED, self._error(job, action))
            return
        self._restart_workers(job, action.restart)
        if isinstance(action, acts.Replace):
            seats = {node: spare or self._start_node() for node, spare in action.seats.items()}
            job.plan = [seats.get(name, name) for name in job.plan]
        elif isinstance(action, acts.Shrink):
            job.plan = [name for name in job.plan if name not in action.lost]
        elif isinstance(action, acts.Grow):
            job.plan = [*job.plan, *action.added]

    def _error(self, job: Job, action: acts.Abort) -> FtlabError:
        if job.fatal is not None:
            return job.fatal
        trace = job.tracebacks[-1] if job.tracebacks and action.cause == "crash" else ""
        kind = {"error": action.error, "message": action.reason + (f"\n\n{trace}" if trace else ""), "hint": "",
                "seen": f"{len(job.history)} failures, {job.ledger.step} steps committed",
                "facts": {"cause": action.cause, "history": job.history, "traceback": trace}}
        return from_dict(kind)

    def _start_node(self) -> str:
        name = f"node-{self._next_number}"
        self.expect_node(name)
        self.log.record("node.requested", source=name)
        self.provider.start_node(name)
        return name

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
        if job.status in (RUNNING, RESTORING) and job.table and len(job.finished) == job.table.world:
            self._end(job, FINISHED)

    def _reattached(self, job: Job) -> bool:
        """After a restart of the controller: whether all members are back, and a recovery if it cut one short."""
        if not job.reattaching:
            return True
        members = [self.nodes[name] for name in job.plan if name in self.nodes]
        if any(node.alive and node.link is None for node in members):
            return False
        job.reattaching = False
        workers = [worker for node in members for worker in node.workers.values()]
        whole = job.table and len(workers) == job.table.world
        if job.status == RUNNING and not (whole and all(worker.trains_in(job.generation) for worker in workers)):
            now = time.monotonic()
            self._fail(Failure(cause="link", detail="the controller came back while its workers were not training"),
                       now, now)
        return True

    def _plan_start(self, job: Job) -> None:
        now = time.monotonic()
        chosen = self._alive()[:job.wanted]
        ready = [node.name for node in chosen if node.ready(job.id, self.config.procs_per_node)]
        if len(ready) == job.wanted:
            job.plan = ready
            return
        coming = [node for node in self.nodes.values() if node.verdict != Verdict.DEAD]
        if len(coming) < job.wanted and self.config.replace:
            self._start_node()
        elif now - job.submitted > job.config.start_timeout_s:
            waiting = [f"{node.name}: {'running the set-up' if node.alive else 'dead'}" for node in self.nodes.values()
                       if node.name not in ready]
            self._end(job, FAILED, WaitTimeout(
                f"{len(ready)}/{job.wanted} nodes reached their first step after {job.config.start_timeout_s:g} s",
                seen="; ".join(waiting), hint="is the set-up before ctx.steps slow, or blocked?"))

    def _seat_if_ready(self, job: Job) -> None:
        nodes = [self.nodes.get(name) for name in job.plan]
        seated = [node for node in nodes if node and node.ready(job.id, self.config.procs_per_node)]
        if not job.plan or len(seated) < len(nodes):
            return
        begin = time.monotonic()
        self.generation += 1
        table = seat_nodes(self.generation, [(node.name, node.address) for node in seated], self.config.procs_per_node)
        job.table = job.tables[table.generation] = table
        job.moved, job.finished = set(), {}
        record = job.recovery = job.recovery or RecoveryRecord(cause="start", nodes=[], began=begin)
        record.generation = table.generation
        if record.decided:
            record.span("replace", record.decided, begin)
        self.log.record("membership.changed", generation=table.generation, table=table.to_dict(), world=table.world)
        record.span("ranktable", begin, time.monotonic())
        self._continue(job, seated, table)

    def _continue(self, job: Job, seated: list[NodeView], table: RankTable) -> None:
        begin = time.monotonic()
        body = messages.encode(messages.Join(table=table.to_dict(), store=list(self.store())))
        for node in seated:
            for worker in node.workers.values():
                worker.place, worker.since = messages.Place.RECOVERING, begin  # the old place is the old world's
            node.send(messages.ToWorkers(job=job.id, body=body))
        job.status = RESTORING
        assert job.recovery is not None
        job.recovery.seated = time.monotonic()
        job.recovery.span("continue", begin, job.recovery.seated)

    def _restored(self, job: Job) -> None:
        record, job.recovery, job.status = job.recovery, None, RUNNING
        assert record is not None
        kind = "job.started" if record.cause == "start" else "recovery.finished"
        self.log.record(kind, generation=job.generation, step=job.ledger.step, **record.facts())
        missing = self.config.spares - sum(node.name not in job.plan and node.verdict != Verdict.DEAD
                                           for node in self.nodes.values())
        if self.config.replenish and self.config.replace:
            for _ in range(missing):
                self._start_node()

    def _grow_if_possible(self, job: Job) -> None:
        if len(job.plan) >= job.wanted or job.finished:
            return
        ready = tuple(node.name for node in self._alive()
                      if node.name not in job.plan and node.ready(job.id, self.config.procs_per_node))
        if not ready or ready == self._offered:
            return
        self._offered = ready
        snapshot = self._snapshot(job, ())
        action = self._ask_policy(job, Snapshot(**{**vars(snapshot), "spares": ready}))
        if isinstance(action, acts.Grow):
            now = time.monotonic()
            self._begin_recovery(job, Failure(cause="grow", detail=f"{', '.join(action.added)} joined"), now, now)
            self._act(job, action)
            self._reconcile()

    def _watch_progress(self, now: float) -> None:
        job = self.job
        if job is None or job.status not in (RUNNING, RESTORING, RECOVERING):
            return
        fresh = [node for name in job.plan if (node := self.nodes.get(name)) and node.joined
                 and node.verdict == Verdict.ALIVE]  # what a silent node said last proves nothing
        seen = [sighting for node in fresh for sighting in node.sightings()]
        limit = self.clock.limit()
        for stalled in find_stalled(seen, now, limit, self.config.outside_limit_s):
            name, local_rank = stalled.who
            self.nodes[name].workers[local_rank].failed = True
            detail = f"{stalled.standing} for {now - stalled.since:.1f} s, a step may take {limit:.1f} s"
            self.log.record("worker.failed", source=name, cause="stall", detail=detail, generation=job.generation)
            self._fail(Failure(cause="stall", node=name, local_rank=local_rank, detail=detail), stalled.since, now)
        self._watch_stopping(job, now)
        if job.status not in (RUNNING, RESTORING):
            return
        if self._broken_since is not None and now - self._broken_since > self.config.dead_s + _SETTLE_S:
            self._fail(Failure(cause="link", detail="ranks lost each other and no node died"), self._broken_since, now)
        elif job.recovery and job.recovery.seated and now - job.recovery.seated > self.config.restore_limit_s:
            self._fail(Failure(cause="link", detail=f"no first step within {self.config.restore_limit_s:g} s"),
                       job.recovery.seated, now)
        elif len(fresh) == len(job.plan) and all_waiting(seen, job.generation, now, limit):
            self._fail(Failure(cause="link", detail=f"all ranks wait for one another for over {limit:.1f} s"),
                       now - limit, now)

    def _watch_stopping(self, job: Job, now: float) -> None:
        """Accuse workers that were told to stop, had their group cut, and still have not moved."""
        record = job.recovery
        patience = max(_STOP_S, 2 * self.clock.typical())
        if record is None or not job.table or now - record.began < patience:
            return
        over = record.generation if job.status == RESTORING else job.generation + 1
        stuck = [(node, local_rank, worker) for name in job.plan if (node := self.nodes.get(name)) and node.joined
                 and node.verdict == Verdict.ALIVE and node.heard > record.began + patience / 2
                 for local_rank, worker in node.workers.items() if worker.is_stuck_before(over)]
        if len(stuck) >= sum(node.alive for name in job.plan if (node := self.nodes.get(name))):
            return  # all of them: more likely the machine is busy, and somebody must keep the state
        for node, local_rank, worker in stuck:
            worker.failed = True
            detail = f"did not stop within {now - record.began:.1f} s after its group was cut"
            self.log.record("worker.failed", source=node.name, cause="stall", detail=detail, generation=job.generation)
            self._fail(Failure(cause="stall", node=node.name, local_rank=local_rank, detail=detail), record.began, now)

    def _alive(self) -> list[NodeView]:
        return sorted((node for node in self.nodes.values() if node.alive), key=lambda node: node.number)

    def _new_clock(self) -> StepClock:
        config = self.config
        return StepClock(Limits(floor_s=config.stall_floor_s, factor=config.stall_factor,
                                outside_s=config.outside_limit_s, first_step_s=config.first_step_limit_s))

    def status(self) -> dict[str, Any]:
        """For clients."""
        table = self.job.table if self.job and not self.job.over else None
        nodes = [node.to_dict(table.ranks_of(node.name) if table else ())
                 for node in sorted(self.nodes.values(), key=lambda each: each.number)]
        return {"generation": self.generation, "nodes": nodes, "job": self.job.to_dict() if self.job else None,
                "at": time.monotonic()}
