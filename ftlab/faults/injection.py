"""Carrying out a fault, and the receipt: what was done to which processes, when, and what the kernel said after it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ftlab.errors import FaultError, FtlabError, StepPassed, UnknownNode, WaitInterrupted, WaitTimeout
from ftlab.events import Event, events_after
from ftlab.faults.corruption import damage_newest
from ftlab.validation import check_seconds

if TYPE_CHECKING:
    from ftlab.faults.catalogue import Fault

_FIND_WORKER_S = 5.0
_FIND_SEAT_S = 30.0  # a job that was just submitted: on a busy machine its ranks take a while to be given out
_STEP_OR_JOB = ("step.committed", "job.submitted")  # steps of an earlier job do not count
TO_A_WORKER: dict[str, dict[str, str]] = {  # faults of one worker, and what the ways of each are called
    "crash": {}, "stall": {}, "nan": {"again": "poison"}, "oom": {"allocation": "squeeze", "kernel": "cage"},
    "straggler": {}}


class Hands(Protocol):
    """What a cluster lets a fault do."""

    def order(self, **request: Any) -> dict[str, Any]:
        """Do something to processes; what was read back."""

    def status(self) -> dict[str, Any]:
        """The controller's view of its nodes."""

    def missing(self, needs: Collection[str]) -> str:
        """Why a fault with these needs cannot be done to it; empty if it can."""

    def record(self, kind: str, **fields: Any) -> None:
        """Put something into the event log."""

    @property
    def events(self) -> list[Event]:
        """The event log."""

    @property
    def running(self) -> bool:
        """Whether the cluster is up."""

    def hold(self, step: int) -> str:
        """Have training pause when so many steps are committed; a name for `release`."""

    def release(self, hold: str) -> None:
        """Let training go on."""


@dataclass(frozen=True, kw_only=True)
class Injection:
    """The receipt: the fault really happened."""

    fault: str
    target: str
    at: float
    receipt: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)


class Pending:
    """A fault that waits for its moment."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._future: Future[Injection] = Future()

    @property
    def fired(self) -> bool:
        """Whether it has happened."""
        return self._future.done() and self._future.exception() is None

    def wait(self, timeout: float | None = 60.0) -> Injection:
        """The receipt, once it has happened; raises what kept it from happening, or WaitTimeout."""
        if timeout is not None:
            check_seconds("timeout", timeout)
        try:
            return self._future.result(timeout)
        except KeyboardInterrupt:
            raise WaitInterrupted(f"{self.fault.describe()} still waits for its moment",
                                  hint="wait() again; what ends it is the end of the cluster") from None
        except TimeoutError as error:
            if self._future.done():  # what kept it from happening was a time limit itself
                raise
            raise WaitTimeout(f"{self.fault.describe()} has not happened within {timeout:g} s") from error


def carry_out(fault: Fault, hands: Hands, hold: str = "") -> Injection:
    """Do a fault now, record it, and have it healed later if its plan says so; training that is held goes on then."""
    by_rank, deadline = "rank-" in fault.target, time.monotonic() + _FIND_SEAT_S
    if by_rank:
        _check_names(fault, hands)
    while True:
        try:
            aimed = _resolve(fault, hands)
            receipt = _strike(aimed, hands)
            break
        except UnknownNode:  # whoever sat there died just now, or nobody sits there yet: aim again
            if not by_rank or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    if hold:
        hands.release(hold)
    fault = aimed
    if fault.at_step is not None:
        receipt = {**receipt, "step": fault.at_step if hold else _last_step(hands)}
    injection = Injection(fault=fault.kind, target=fault.target, at=receipt["at"], receipt=receipt)
    _record("fault.injected", injection, hands)
    if fault.heal_after is not None:
        _in_background(lambda: _heal_later(fault, hands), f"heal-{fault.target}")
    return injection


def _strike(fault: Fault, hands: Hands) -> dict[str, Any]:
    if fault.kind == "controller":
        return hands.order(do="kill_controller")
    if fault.kind == "blackout":
        return hands.order(do="kill_all")
    if fault.kind == "corrupt":
        return _corrupt(fault, hands)
    if fault.kind in TO_A_WORKER:
        order = TO_A_WORKER[fault.kind].get(fault.way, fault.kind)
        how: dict[str, dict[str, Any]] = {"oom": {"room_mb": fault.room_mb}, "straggler": {"share": fault.share}}
        return hands.order(do=order, node=fault.target, pid=_worker_pid(fault, hands), **how.get(fault.kind, {}))
    if fault.kind == "partition":
        return hands.order(do="cut", node=fault.target, **({"way": fault.way} if fault.way else {}))
    if fault.kind == "link":
        return hands.order(do="link", node=fault.target, loss=fault.loss, delay_ms=fault.delay_ms,
                           rate_mbit=fault.rate_mbit)
    return hands.order(do=fault.kind, node=fault.target)


def _corrupt(fault: Fault, hands: Hands) -> dict[str, Any]:
    """Nobody may save or load in between: all nodes are stopped while the newest checkpoint is damaged."""
    folder = ((hands.status()["job"] or {}).get("checkpoints")) or ""
    if not folder:
        raise FaultError("the job saves no checkpoints", hint="cluster.submit(train, checkpoint=CheckpointConfig(...))")
    hands.order(do="hang_all")
    try:
        done = damage_newest(folder, fault.way)
    finally:
        killed = hands.order(do="kill_all")
    return {**killed, **done, "at": killed["at"], "status": f"{done['status']}; {killed['status']}"}


def heal(fault: Fault, hands: Hands) -> Injection:
    """End a fault that can be healed now; the receipt."""
    order = {"hang": "resume", "partition": "heal", "straggler": "speed_up", "oom": "make_room", "link": "mend",
             "disk": "empty"}[fault.kind]
    receipt = hands.order(do=order, node=fault.target)
    healed = Injection(fault=fault.kind, target=fault.target, at=receipt["at"], receipt=receipt)
    _record("fault.healed", healed, hands)
    return healed


def schedule(fault: Fault, hands: Hands) -> Pending:
    """Have a fault done when its step or its time has come; raises StepPassed at once if the step is over, UnknownNode
    if there is no such target."""
    _check_names(fault, hands)
    pending = Pending(fault)
    hold = hands.hold(fault.at_step) if fault.at_step is not None else ""

    def run() -> None:
        try:
            pending._future.set_result(_at_step(fault, hands, hold) if hold else _after(fault, hands))
        except BaseException as error:
            pending._future.set_exception(error)

    _in_background(run, f"fault-{fault.kind}")
    return pending


def _heal_later(fault: Fault, hands: Hands) -> None:
    time.sleep(fault.heal_after or 0.0)  # from when it was done: filling a disk takes a while itself
    try:
        heal(fault, hands)
    except FtlabError:
        return  # the node or the cluster is gone: nothing is left to heal


def _check_names(fault: Fault, hands: Hands) -> None:
    """A name that means nothing on this cluster is told when the fault is planned, not when its time has come."""
    names = [each for each in fault.target.split(",") if each.startswith(("node-", "rank-"))]
    status = hands.status() if names else {}
    for name in names:
        if name.startswith("rank-"):
            _check_rank(_rank_of(name), status)
        else:
            _check_node(name, status)


def _check_node(name: str, status: dict[str, Any]) -> None:
    living = [node["name"] for node in status["nodes"] if node["verdict"] != "DEAD"]
    if name not in living:
        raise UnknownNode(f"no node is called {name!r}", seen=f"nodes are {', '.join(living) or 'none'}",
                          hint="\"rank-1\" is the node that has rank 1 at that moment")


def _check_rank(rank: int, status: dict[str, Any]) -> None:
    world = status["config"]["nodes"] * status["config"]["procs_per_node"]
    if rank >= world:
        raise UnknownNode(f"there is no rank {rank} on this cluster", seen=f"ranks are 0 to {world - 1}")


def _rank_of(target: str) -> int:
    return int(target.removeprefix("rank-"))


def _resolve(fault: Fault, hands: Hands) -> Fault:
    """The same fault with nodes' names instead of ranks: who sits there now, or the next one if that one just died."""
    if "rank-" not in fault.target:
        return fault
    status = hands.status()
    found = [_who(_rank_of(each), status) if each.startswith("rank-") else each for each in fault.target.split(",")]
    return replace(fault, target=",".join(dict.fromkeys(found)))


def _who(rank: int, status: dict[str, Any]) -> str:
    """The node with this rank; raises UnknownNode if there is none now, FaultError if there is no job at all."""
    world = _running_job(status, f"so no node has rank {rank}")["world"]
    if rank >= world:
        raise UnknownNode(f"no node has rank {rank} at the moment", seen=f"the job runs with {world} ranks")
    living = [node for node in status["nodes"] if node["verdict"] != "DEAD" and node["joined"] and node["ranks"]]
    exact = [node["name"] for node in living if rank in node["ranks"]]
    seated = sorted((min(node["ranks"]), node["name"]) for node in living)
    following = [name for first, name in seated if first >= rank] or [name for _, name in seated]
    if not following:
        raise UnknownNode(f"no node lives that could have rank {rank}")
    return str((exact or following)[0])


def _running_job(status: dict[str, Any], so: str) -> dict[str, Any]:
    job: dict[str, Any] | None = status["job"]
    if job is None or job["status"] in ("finished", "failed"):
        raise FaultError(f"no job is running, {so}", hint="cluster.submit(train) first, or name a node: \"node-1\"")
    return job


def _worker_pid(fault: Fault, hands: Hands) -> int:
    """The worker to hit; a worker that is just being started is waited for."""
    deadline = time.monotonic() + _FIND_WORKER_S
    while True:
        status = hands.status()
        nodes = {node["name"]: node for node in status["nodes"]}
        _check_node(fault.target, status)
        workers = status["config"]["procs_per_node"]
        if fault.local_rank >= workers:
            raise FaultError(f"{fault.target} has no worker {fault.local_rank}: local_rank goes from 0 to "
                             f"{workers - 1}")
        worker = nodes[fault.target]["workers"].get(str(fault.local_rank))
        if worker and worker["pid"]:
            return int(worker["pid"])
        _running_job(status, f"so {fault.target} has no worker to {fault.kind}")
        if time.monotonic() > deadline:
            raise FaultError(f"{fault.target} has no worker {fault.local_rank} yet", hint="wait for the job's first "
                                                                                          "step")
        time.sleep(0.02)


def _after(fault: Fault, hands: Hands) -> Injection:
    time.sleep(fault.after or 0.0)
    return carry_out(fault, hands)


def _at_step(fault: Fault, hands: Hands, hold: str) -> Injection:
    """While all ranks pause between that step and the next, so that it is this step however short steps are; a time
    after the step runs from the moment at which they go on."""
    try:
        _wait_for_hold(hold, hands)
        if not fault.after:
            return carry_out(fault, hands, hold)
        hands.release(hold)
        return _after(fault, hands)
    except BaseException:
        with contextlib.suppress(FtlabError):
            hands.release(hold)
        raise


def _wait_for_hold(hold: str, hands: Hands) -> None:
    seen = 0
    while True:
        for event in events_after(hands.events, seen):
            seen = event.seq
            if event.data.get("hold") == hold and event.kind == "hold.reached":
                return
            if event.data.get("hold") == hold and event.kind == "hold.missed":
                raise StepPassed(event.data["reason"], step=event.step)
        if not hands.running:
            raise FaultError("the cluster ended before the step was reached")
        time.sleep(0.002)


def _last_step(hands: Hands) -> int:
    """How many steps were committed, as far as the log tells."""
    return next((event.step or 0 for event in reversed(hands.events) if event.kind in _STEP_OR_JOB), 0)


def _record(kind: str, injection: Injection, hands: Hands) -> None:
    hands.record(kind, source="faults", at=injection.at,
                 data={"fault": injection.fault, "target": injection.target, "receipt": injection.receipt})


def _in_background(work: Callable[[], None], name: str) -> None:
    threading.Thread(target=work, name=f"ftlab-{name}", daemon=True).start()
