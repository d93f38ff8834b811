"""Links that are made anew: whose silence is waited out, what was lost meanwhile, and what a node did not hear.

A controller that comes back knows its nodes only from its journal until they have found it; a node whose link broke may
have missed an order. Neither is a reason to give up anybody who lives and holds the state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from ftlab import messages
from ftlab.health.progress import holders
from ftlab.membership import Verdict
from ftlab.policy import Failure
from ftlab.recovery.job import RECOVERING, RESTORING, Job
from ftlab.recovery.roster import Roster
from ftlab.recovery.staffing import Staffing
from ftlab.recovery.views import NodeView

_GONE = "it was gone when the controller came back"  # an end that only the dead controller had heard of
_NOT_TRAINING = "the controller came back while its workers were not training"


def find_awaited(job: Job | None, roster: Roster) -> Collection[str]:
    """The members that are given up only when their lease has run out: nobody that is heard holds the state.

    Where a checkpoint could bring it back only a controller that has just come back waits so long: it does not know yet
    who lives.
    """
    if job is None or job.over or not job.ledger.step:
        return ()
    if not job.reattaching and job.newest_saved([node.name for node in roster.alive()]) is not None:
        return ()
    members = roster.seated(job.plan)
    heard = (node for node in members if node.link is not None and node.verdict == Verdict.ALIVE)
    kept = holders((sighting for node in heard for sighting in node.sightings()), job.ledger.step)
    return () if kept else {node.name for node in members}


def find_losses(job: Job, roster: Roster, staffing: Staffing) -> list[Failure]:
    """What happened while the controller was away, now that all members that live are linked again."""
    members, known = roster.seated(job.plan), {failure.node for failure in job.failures}
    gone = [name for name in job.plan if name not in {*known, *(node.name for node in members)}]
    losses = [Failure(cause="node", node=name, detail=_GONE) for name in gone]
    losses += [Failure(cause="crash", node=node.name, local_rank=local, detail=_GONE)
               for node in members for local in staffing.missing(node)]
    workers = [worker for node in members for worker in node.workers.values()]
    if job.training and not losses and not all(worker.trains_in(job.generation) for worker in workers):
        losses.append(Failure(cause="link", detail=_NOT_TRAINING))
    return losses


def link_again(job: Job, node: NodeView, runs: Collection[str], staffing: Staffing) -> list[Failure]:
    """A member's link was made anew, and these are the workers it has: tell it what it missed; who is gone."""
    gone = []
    for local_rank, worker in sorted(node.workers.items()):
        if worker.run in runs or worker.failed:
            continue
        if worker.seen > 0:
            gone.append(Failure(cause="crash", node=node.name, local_rank=local_rank,
                                detail="it was gone when its node came back"))
        else:  # the order to start it was lost
            staffing.restart(job, ((node.name, local_rank),))
    for body in _missed_orders(job, node):
        node.send(messages.ToWorkers(job=job.id, body=body))
    return gone


def _missed_orders(job: Job, node: NodeView) -> Iterable[dict[str, Any]]:
    """What a member has to be told again, because it may not have heard it; hearing it twice does no harm."""
    if job.status == RECOVERING:
        yield messages.encode(messages.Terminate(generation=job.generation))
    elif job.status == RESTORING and job.invitation and any(worker.generation < job.generation
                                                            for worker in node.workers.values()):
        yield messages.encode(messages.Terminate(generation=job.generation - 1))
        yield job.invitation
