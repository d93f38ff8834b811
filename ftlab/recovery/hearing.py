"""What workers say, written into the job: their steps, their recoveries, their ends.

Everything is checked against the rank tables: a step from a generation in which the sender has no seat is refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from ftlab import messages
from ftlab.errors import BadMessage, from_dict
from ftlab.events import EventLog
from ftlab.messages import RESERVED_VALUES
from ftlab.policy import Failure
from ftlab.recovery.holds import Holds
from ftlab.recovery.job import Job
from ftlab.recovery.ledger import Entry
from ftlab.recovery.views import NodeView, WorkerView
from ftlab.recovery.watch import ProgressWatch


class Hearing:
    """Takes in workers' messages; `on_failure` is told of workers that are gone."""

    def __init__(self, log: EventLog, watch: ProgressWatch, holds: Holds,
                 on_failure: Callable[[Failure, float, float], None], on_rewind: Callable[[Job, str], None]) -> None:
        self.log, self.watch, self.holds = log, watch, holds
        self.on_failure, self.on_rewind = on_failure, on_rewind

    def steps(self, job: Job, node: NodeView, rows: list[list[Any]]) -> None:
        """The steps of one node; those it completes are written down together, before the node may forget them."""
        with self.log.together():
            for local_rank, *row in rows:
                self._step(job, node, int(local_rank), messages.StepDone.of(row))

    def _step(self, job: Job, node: NodeView, local_rank: int, done: messages.StepDone) -> None:
        table = job.tables.get(done.generation)
        rank = _rank_of(job, node, local_rank, done.generation)
        if table is None or rank is None:
            self.log.record("message.refused", node=node.name, generation=done.generation,
                            step=done.step, reason="a step from a generation this node has no seat in")
            return
        if done.generation == job.generation:
            job.moved.add(rank)
            job.times.add(rank, done.step, done.busy)
        for entry in job.ledger.add(rank, table.world, done):
            self._enter(entry)

    def close(self, job: Job) -> None:
        """The job is over: enter the steps that only some ranks lived to report."""
        finished = max((row["step"] for row in job.finished.values()), default=0)
        for entry in job.ledger.flush(finished):
            self._enter(entry)

    def _enter(self, entry: Entry) -> None:
        self.log.record("step.committed", at=entry.at, generation=entry.generation, step=entry.step, **entry.facts())
        if len(entry.digests) > 1:
            self.log.record("samples.disagreed", generation=entry.generation, step=entry.step)
        self.watch.clock.tick(entry.at)

    def noted(self, job: Job, node: NodeView, message: messages.Noted) -> None:
        """From a node's agent. A save is the word of its generation: one that was fenced has none."""
        about_save = message.event.startswith("checkpoint.")
        if about_save and _rank_of(job, node, 0, message.generation) is None:
            self.log.record("message.refused", node=node.name, generation=message.generation, step=message.step,
                            reason=f"{message.event} from a generation this node has no seat in")
            return
        self._record(job, node, message)

    def _record(self, job: Job, node: NodeView, message: messages.Noted) -> None:
        """Something about a checkpoint, or one of the few other things a node may record."""
        if not re.fullmatch(r"checkpoint\.[a-z]+", message.event) and message.event not in messages.NOTABLE:
            raise BadMessage(f"a node may record checkpoint.* events and {', '.join(messages.NOTABLE)}, not "
                             f"{message.event!r}")
        facts = {name: value for name, value in message.data.items() if name not in RESERVED_VALUES or name == "world"}
        self.log.record(message.event, source=node.name, step=message.step,
                        generation=message.generation or job.generation, **facts)
        if message.event in ("checkpoint.committed", "checkpoint.loaded"):
            job.saved = message.step
        elif message.event == "checkpoint.snapshot":
            job.kept[node.name] = message.step

    def worker(self, job: Job, node: NodeView, wrapper: messages.FromWorker) -> None:
        """One worker's message."""
        view = node.workers.get(wrapper.local_rank)
        if view is None or not view.is_about(wrapper.run):
            return  # a worker that was already replaced
        view.pid = wrapper.pid
        message = messages.decode(wrapper.body)
        match message:
            case messages.Parked():
                view.parked = True
                self.log.record("worker.parked", source=node.name, seconds=round(message.seconds, 4), pid=view.pid)
            case messages.Stopped():
                self._stopped(job, node, wrapper.local_rank, message)
            case messages.Stuck():
                view.stuck_in = message.generation
            case messages.Held():
                self.holds.heard(job, job.table.rank_of(node.name, wrapper.local_rank) if job.table else None, message)
            case messages.Noted():
                self._record(job, node, message)
            case messages.Spans():
                self._spans(job, node.name, wrapper.local_rank, message)
            case messages.Finished():
                self._finished(job, node, wrapper.local_rank, message)
            case messages.Failed():
                self._failed(job, node, wrapper.local_rank, view, message)

    def _stopped(self, job: Job, node: NodeView, local_rank: int, message: messages.Stopped) -> None:
        self.log.record("worker.stopped", source=node.name, generation=message.generation, step=message.step,
                        at=message.at, reason=message.reason)
        if message.generation == job.generation:
            job.stopped.add(node.name)
        record = job.recovery
        if record and node.name in record.awaiting_stop:
            record.awaiting_stop.discard(node.name)
            if not record.awaiting_stop:
                record.span("terminate", record.began, max(message.at, record.began))
        if message.generation == job.generation and job.training:
            self._halted(job, node.name, local_rank, message)

    def _halted(self, job: Job, node: str, local_rank: int, message: messages.Stopped) -> None:
        """A rank stopped while nobody told it to. Those that go back keep their group until all have said so: gloo
        forgets what it still has to send when a peer leaves, and whoever waits for that waits for ever."""
        assert job.table is not None
        rank = job.table.rank_of(node, local_rank)
        if rank is not None:
            job.halted.add(rank)
        if message.rewind:
            job.goes_back = message.reason
        else:
            self.watch.group_broke(time.monotonic())
        if job.goes_back and len(job.halted) == job.table.world:
            self.on_rewind(job, job.goes_back)

    def _spans(self, job: Job, node: str, local_rank: int, message: messages.Spans) -> None:
        record, table = job.recovery, job.tables.get(message.generation)
        if record and table and message.generation == record.generation:
            who = f"{node} rank={table.rank_of(node, local_rank)}"
            for name, begin, end in message.spans:
                record.span(name, begin, end, who)
            record.source = message.source or record.source

    def _finished(self, job: Job, node: NodeView, local_rank: int, message: messages.Finished) -> None:
        rank = job.table.rank_of(node.name, local_rank) if job.table else None
        if rank is None or message.generation != job.generation:
            return
        job.moved.add(rank)
        job.finished[rank] = {"node": node.name, "digest": message.digest, "result": message.result,
                              "error": message.error, "step": message.step}
        self.log.record("worker.finished", source=node.name, rank=rank, generation=message.generation,
                        step=message.step, digest=message.digest)

    def _failed(self, job: Job, node: NodeView, local_rank: int, view: WorkerView, message: messages.Failed) -> None:
        view.failed = True
        now = time.monotonic()
        self.log.record("worker.failed", source=node.name, rank=view.rank if view.rank >= 0 else None,
                        generation=message.generation, step=message.step, cause=message.cause,
                        detail=message.detail, pid=view.pid, at=now)
        if message.traceback and not message.fatal:  # of the train function's own
            job.tracebacks = [message.traceback]  # the newest is told
        if message.fatal and job.fatal is None and (node.name in job.plan or not job.plan):
            job.fatal = from_dict(message.fatal)
        self.on_failure(Failure(cause=message.cause, node=node.name, local_rank=local_rank, detail=message.detail,
                                fatal=message.fatal is not None), view.seen or now, now)


def _rank_of(job: Job, node: NodeView, local_rank: int, generation: int) -> int | None:
    """The rank of a node's worker in a generation; None if it has no seat there, or had one and was given up since."""
    table = job.tables.get(generation)
    return table.rank_of(node.name, local_rank) if table and generation > node.born else None
