"""Carrying out a fault, and the receipt: what was done to which processes, when, and what the kernel said after it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ftlab.errors import FaultError, FtlabError, UnknownNode
from ftlab.faults.corruption import damage_newest

if TYPE_CHECKING:
    from ftlab.events import Event
    from ftlab.faults.catalogue import Fault

_FIND_WORKER_S = 5.0
_TO_A_WORKER: dict[str, dict[str, str]] = {  # faults of one worker, and what the ways of each are called
    "crash": {}, "stall": {}, "nan": {"again": "poison"}, "oom": {"allocation": "squeeze", "kernel": "cage"},
    "straggler": {}}
_STEP_OR_JOB = ("step.committed", "job.submitted", "job.finished")  # steps of an earlier job do not count


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

    def expect_step(self, step: int) -> None:
        """Have this step reported at once."""


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
        """The receipt, once it has happened; raises what kept it from happening."""
        return self._future.result(timeout)


def carry_out(fault: Fault, hands: Hands) -> Injection:
    """Do a fault now, record it, and have it healed later if its plan says so."""
    by_rank, deadline = "rank-" in fault.target, time.monotonic() + _FIND_WORKER_S
    while True:
        aimed = _resolve(fault, hands)
        try:
            receipt = _strike(aimed, hands)
            break
        except UnknownNode:  # whoever sat there died just now: aim again
            if not by_rank or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    fault = aimed
    injection = Injection(fault=fault.kind, target=fault.target, at=receipt["at"], receipt=receipt)
    _record("fault.injected", injection, hands)
    if fault.heal_after is not None:
        _in_background(lambda: _heal_later(fault, injection, hands), f"heal-{fault.target}")
    return injection


def _strike(fault: Fault, hands: Hands) -> dict[str, Any]:
    if fault.kind == "controller":
        return hands.order(do="kill_controller")
    if fault.kind == "blackout":
        return hands.order(do="kill_all")
    if fault.kind == "corrupt":
        return _corrupt(fault, hands)
    if fault.kind in _TO_A_WORKER:
        order = _TO_A_WORKER[fault.kind].get(fault.way, fault.kind)
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
    """Have a fault done when its step or its time has come."""
    pending = Pending(fault)

    def run() -> None:
        try:
            if fault.at_step is not None:
                _wait_for_step(fault.at_step, hands)
            time.sleep(fault.after or 0.0)
            pending._future.set_result(carry_out(fault, hands))
        except BaseException as error:
            pending._future.set_exception(error)

    _in_background(run, f"fault-{fault.kind}")
    return pending


def _heal_later(fault: Fault, injection: Injection, hands: Hands) -> None:
    time.sleep(max(0.0, injection.at + (fault.heal_after or 0.0) - time.monotonic()))
    try:
        heal(fault, hands)
    except FtlabError:
        return  # the node or the cluster is gone: nothing is left to heal


def _resolve(fault: Fault, hands: Hands) -> Fault:
    """The same fault with nodes' names instead of ranks: who sits there now, or the next one that lives."""
    if "rank-" not in fault.target:
        return fault
    nodes = [node for node in hands.status()["nodes"] if node["verdict"] != "DEAD" and node["joined"]]
    found = [_who(each, nodes) if each.startswith("rank-") else each for each in fault.target.split(",")]
    return replace(fault, target=",".join(dict.fromkeys(found)))


def _who(target: str, nodes: list[dict[str, Any]]) -> str:
    rank = int(target.removeprefix("rank-"))
    seated = sorted((min(node["ranks"]), node["name"]) for node in nodes if node["ranks"])
    if not nodes:
        raise UnknownNode(f"nobody lives who could sit on rank {rank}")
    after = [name for first, name in seated if first >= rank] or [name for _, name in seated] or [nodes[0]["name"]]
    exact = [node["name"] for node in nodes if rank in node["ranks"]]
    return str((exact or after)[0])


def _worker_pid(fault: Fault, hands: Hands) -> int:
    """The worker to hit; a worker that is just being started is waited for."""
    deadline = time.monotonic() + _FIND_WORKER_S
    while True:
        nodes = {node["name"]: node for node in hands.status()["nodes"]}
        if fault.target not in nodes:
            raise UnknownNode(f"no node is called {fault.target!r}", seen=f"nodes are {', '.join(nodes)}")
        worker = nodes[fault.target]["workers"].get(str(fault.local_rank))
        if worker and worker["pid"]:
            return int(worker["pid"])
        if time.monotonic() > deadline:
            raise FaultError(f"{fault.target} has no worker {fault.local_rank}", hint="is a job running?")
        time.sleep(0.02)


def _wait_for_step(step: int, hands: Hands) -> None:
    hands.expect_step(step)
    while True:
        last = next((event for event in reversed(hands.events) if event.kind in _STEP_OR_JOB), None)
        if last is not None and last.kind == "step.committed" and (last.step or 0) >= step:
            return
        if not hands.running:
            raise FaultError(f"the cluster ended before step {step}")
        time.sleep(0.002)


def _record(kind: str, injection: Injection, hands: Hands) -> None:
    hands.record(kind, source="faults", at=injection.at,
                 data={"fault": injection.fault, "target": injection.target, "receipt": injection.receipt})


def _in_background(work: Callable[[], None], name: str) -> None:
    threading.Thread(target=work, name=f"ftlab-{name}", daemon=True).start()
