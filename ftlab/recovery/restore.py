"""A controller that was killed comes back: its state is what its journal says, and its nodes tell the rest."""

from __future__ import annotations

import time
from collections.abc import Callable

from ftlab.config import JobConfig
from ftlab.errors import from_dict
from ftlab.events import Event
from ftlab.membership import RankTable, Verdict
from ftlab.policy import Policy
from ftlab.recovery.controller import Controller
from ftlab.recovery.job import RECOVERING, RESTORING, RUNNING, STARTING, Job
from ftlab.recovery.record import RecoveryRecord

GRACE_S = 1.0  # for nodes to find the new controller before their silence counts


def restore(controller: Controller, load_policy: Callable[[str], Policy]) -> bool:
    """Bring a controller to where its journal ends; whether there was anything in it."""
    events = list(controller.log.events)
    for event in events:
        _replay(controller, event, load_policy)
    now = time.monotonic()
    for node in controller.roster.nodes.values():
        node.heard = node.started = now + GRACE_S
        if node.verdict == Verdict.DEAD:
            controller.roster.reclaim_later(node)
    job = controller.job
    if job is not None and not job.over:
        job.reattaching, job.status = True, _status(job)
        if job.recovery is not None and job.status == RESTORING:
            job.recovery.seated = now
    return bool(events)


def _status(job: Job) -> str:
    """Where the journal left a job; a recovery that it did not see the end of goes on."""
    if job.table is None:
        return STARTING
    if job.recovery is None:
        return RUNNING
    return RESTORING if job.recovery.generation == job.generation else RECOVERING


def _replay(controller: Controller, event: Event, load_policy: Callable[[str], Policy]) -> None:
    data, job = event.data, controller.job
    match event.kind:
        case "node.requested":
            controller.roster.expect(event.source)
        case "node.joined":
            node = controller.roster.get(event.source) or controller.roster.expect(event.source)
            node.instance, node.address, node.pid = data["instance"], data["address"], data["pid"]
            node.verdict = Verdict.ALIVE
            node.born = controller.generation if data["fresh"] else node.born
        case "node.died":
            dead = controller.roster.get(event.source)
            if dead is not None:
                dead.verdict = Verdict.DEAD
            if job:
                job.kept.pop(event.source, None)
        case "node.reclaimed":
            controller.roster.nodes.pop(event.source, None)
        case "job.submitted":
            controller.job = controller.jobs[data["job"]] = Job(
                id=data["job"], name=data["name"], config=JobConfig.from_dict(data["config"]), wanted=data["wanted"],
                path=data["path"], policy=load_policy(data["job"]), submitted=event.at)
        case "membership.changed" if job:
            job.table = RankTable.from_dict(data["table"])
            job.tables[job.table.generation] = job.table
            job.plan, controller.generation = list(job.table.nodes), job.table.generation
            job.recovery = job.recovery or RecoveryRecord(cause="start", nodes=[], began=event.at)
            job.recovery.generation = job.table.generation
        case "step.committed" if job and event.step is not None:
            job.ledger.step, job.ledger.generation = event.step, event.generation or 0
            controller.watch.clock.tick(event.at)
        case "recovery.started" if job:
            controller.watch.clock.pause()
            job.recovery = RecoveryRecord(cause=data["cause"], nodes=list(data["nodes"]), began=event.at)
            job.recovery.span("detect", data.get("evidence", event.at), event.at)
            if data["cause"] != "grow":
                job.spend(data["cause"])
        case "worker.failed" if job and data.get("cause") == "oom":
            job.split = True  # the workers are yet to hear of it
        case "recovery.finished" | "job.started" if job:
            job.split, job.recovery = False, None
        case "checkpoint.snapshot" if job and event.step is not None:
            job.kept[event.source] = event.step
        case "checkpoint.committed" | "checkpoint.loaded" if job:
            job.saved = event.step
        case "hold.placed" | "hold.reached" | "hold.missed" | "hold.released":
            controller.holds.replay(event)
        case "job.finished" if job:
            job.status = data["status"]
            job.error = from_dict(data["error"]) if data.get("error") else None
