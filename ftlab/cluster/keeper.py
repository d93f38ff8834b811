"""A node's memory checkpoints: its workers' snapshots and replicas of another node's, held by the agent.

The agent maps the same memory as the worker, so a snapshot outlives the worker that took it: it is still written to
storage, and a worker that is started again on this node finds it. A snapshot is labelled with its digest, then sent to
the node's buddy, then written, one at a time, by the keeper's own thread. On the node of rank 0, which commits, the
same thread fences the earlier generations in storage before it writes for a new one, and after what it still has to
write for the old one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ftlab import messages
from ftlab.checkpoint.arena import Slot
from ftlab.checkpoint.digest import digest
from ftlab.checkpoint.fence import take_over
from ftlab.checkpoint.pace import moderate, step_back
from ftlab.checkpoint.saving import SaveOrder
from ftlab.checkpoint.storage import open_storage
from ftlab.checkpoint.vault import Vault
from ftlab.checkpoint.writer import write_and_report
from ftlab.cluster.replicas import ReplicaServer, send_replica
from ftlab.config import CheckpointConfig
from ftlab.errors import StorageError

log = logging.getLogger(__name__)
OWN = 2  # slots of a worker's own snapshots; as many hold replicas
Tell = Callable[[messages.Message], None]


@dataclass(frozen=True)
class _Order:
    """A snapshot to be labelled, sent and written."""

    job: str
    local_rank: int
    slot: int
    save: SaveOrder
    tell: Tell
    life: int

    def note(self, event: str, step: int, facts: dict[str, Any]) -> None:
        """Have something recorded, as the word of the generation that saves."""
        self.tell(messages.Noted(job=self.job, event=event, step=step, generation=self.save.generation, data=facts))


@dataclass(frozen=True)
class _TakeOver:
    """A generation begins whose rank 0 is on this node."""

    job: str
    generation: int


class Keeper:
    """Holds, replicates and writes the snapshots of one node's workers; `tell` is called from the keeper's thread."""

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self._slots: dict[tuple[str, int], list[Slot]] = {}
        self._configs: dict[str, CheckpointConfig] = {}
        self._vaults: dict[str, Vault] = {}
        self._orders: queue.SimpleQueue[_Order | _TakeOver | str] = queue.SimpleQueue()  # or a job that is over
        self._unfenced: dict[str, int] = {}  # job → generation that has yet to fence the earlier ones
        self._busy: set[tuple[str, int, int]] = set()
        self._over = 0  # the newest generation that has ended
        self._life = 0  # of this node: what an earlier one ordered is not written any more
        self._server: ReplicaServer | None = None
        self.buddy = messages.Buddy()

    @property
    def port(self) -> int:
        """Where this node takes replicas."""
        if self._server is None:
            self._server = ReplicaServer(self._address, self._token, self._slot_for)
            threading.Thread(target=self._run, name="ftlab-keeper", daemon=True).start()
        return self._server.port

    def open(self, job: str, local_rank: int, settings: Mapping[str, Any]) -> list[Slot]:
        """The memory of a worker: what an earlier one left is still there."""
        self._configs[job] = CheckpointConfig(**settings)
        return self._slots.setdefault((job, local_rank), [Slot() for _ in range(2 * OWN)])

    def busy(self, job: str, local_rank: int) -> list[int]:
        """A worker's slots that are still being written."""
        return [slot for slot in range(OWN) if (job, local_rank, slot) in self._busy]

    def keep(self, job: str, local_rank: int, slot: int, save: SaveOrder, tell: Tell) -> None:
        """Have a snapshot labelled, replicated and written."""
        self._busy.add((job, local_rank, slot))
        self._orders.put(_Order(job, local_rank, slot, save, tell, self._life))

    def take_over(self, job: str, generation: int) -> None:
        """A generation begins, and this node commits for it: earlier ones are not to commit any more."""
        self._orders.put(_TakeOver(job, generation))

    def release(self, job: str) -> None:
        """A job is over: let go of its memory, after what is still to be written."""
        self._orders.put(job)

    def ended(self, generation: int) -> None:
        """Ranks of this generation do not save together any more."""
        self._over = max(self._over, generation)

    def drop(self) -> None:
        """Forget everything: this node starts over as a new one."""
        self._life += 1
        self.buddy = messages.Buddy()
        for slots in self._slots.values():
            for slot in slots:
                slot.wipe()

    def _run(self) -> None:
        step_back()
        while True:
            order = self._orders.get()
            if isinstance(order, str):
                self._let_go(order)
                continue
            if isinstance(order, _TakeOver):
                self._begin(order)
                continue
            try:
                ok = order.life == self._life and self._keep(order)
            except Exception:  # the outer edge of a thread: the next snapshot may be luckier
                log.exception("[step=%d] the snapshot was not kept", order.save.step)
                ok = False
            self._busy.discard((order.job, order.local_rank, order.slot))
            order.tell(messages.Saved(slot=order.slot, seconds=round(time.monotonic() - order.save.taken, 4), ok=ok))

    def _let_go(self, job: str) -> None:
        for key in [key for key in self._slots if key[0] == job]:
            for slot in self._slots.pop(key):
                slot.close()
        self._configs.pop(job, None)
        self._unfenced.pop(job, None)

    def _begin(self, new: _TakeOver) -> None:
        self._unfenced[new.job] = new.generation
        try:
            self._fence(new.job)
        except Exception as error:  # the outer edge of a thread; the next save tries again, and tells of it
            log.warning("[gen=%d] earlier generations are not fenced in storage yet: %s", new.generation, error)

    def _fence(self, job: str) -> None:
        config = self._configs.get(job)
        if job in self._unfenced and config is not None:
            take_over(self._vault(config).storage, job, self._unfenced[job])
            del self._unfenced[job]

    def _keep(self, order: _Order) -> bool:
        slots, save = self._slots.get((order.job, order.local_rank)), order.save
        if slots is None:
            return False  # of a job that is over
        slot = slots[order.slot]
        data = slot.view(save.bytes)
        card = {**save.to_dict(), "job": order.job, "local_rank": order.local_rank,
                "digest": digest(data)}
        slot.label(card)
        self._replicate(order, card, data)
        return self._write(order, data)

    def _write(self, order: _Order, data: memoryview) -> bool:
        config, save = self._configs[order.job], order.save

        def given_up() -> bool:
            return order.life != self._life

        def report(event: str, *, step: int, **facts: Any) -> None:
            if not given_up():  # nothing of a node's past may reach the present world
                order.note(event, step, facts)

        try:
            self._fence(order.job)
        except StorageError as error:
            report("checkpoint.failed", step=save.step, name=save.name, reason=error.message, seen=error.seen)
            return False
        return write_and_report(self._vault(config), save, data, keep=config.keep_last_n, timeout_s=config.timeout_s,
                                report=report, over=lambda: save.generation <= self._over, given_up=given_up,
                                pace=moderate(lambda: not self._orders.empty())) is None

    def _replicate(self, order: _Order, card: dict[str, Any], data: memoryview) -> None:
        buddy = self.buddy
        if not buddy.address or order.save.world == 1:
            return  # every other rank is a live replica
        begin = time.monotonic()
        sent = send_replica(buddy.address, buddy.port, self._address, self._token, card, data)
        order.note("checkpoint.replicated", order.save.step, {"ok": sent, "to": buddy.address,
                                                              "bytes": order.save.bytes,
                                                              "seconds": round(time.monotonic() - begin, 4)})

    def _slot_for(self, card: dict[str, Any]) -> Slot | None:
        """Where another node's snapshot goes: over the older of the two that are here."""
        guests = self._slots.get((str(card["job"]), int(card["local_rank"])), [])[OWN:]
        return min(guests, key=lambda slot: (slot.card() or {"taken": -1.0})["taken"]) if guests else None

    def _vault(self, config: CheckpointConfig) -> Vault:
        url = config.url()
        if url not in self._vaults:
            self._vaults[url] = Vault(open_storage(url))
        return self._vaults[url]
