"""A node's memory checkpoints: the snapshots of its workers, held by the agent and written to storage one by one.

The agent maps the same memory as the worker, so a snapshot outlives the worker that took it: it is still written, and
a worker that is started again on this node can have it back.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from ftlab import messages
from ftlab.checkpoint.arena import Slot
from ftlab.checkpoint.saving import SaveOrder
from ftlab.checkpoint.storage import open_storage
from ftlab.checkpoint.vault import Vault
from ftlab.checkpoint.writer import write_and_report
from ftlab.config import CheckpointConfig

Tell = Callable[[messages.Message], None]


@dataclass(frozen=True)
class Kept:
    """A snapshot in memory whose digest is known."""

    slot: Slot
    order: SaveOrder
    digest: str

    def facts(self) -> dict[str, Any]:
        """For the worker that gets it back."""
        return {**self.order.to_dict(), "digest": self.digest}


class Keeper:
    """Holds and writes the snapshots of one node's workers; `tell` hears of each from the keeper's own thread."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Kept] = {}  # the newest of each worker
        self._configs: dict[str, CheckpointConfig] = {}
        self._vaults: dict[str, Vault] = {}
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._life = 0  # of this node: what an earlier one ordered is not written any more

    def open(self, job: str, settings: Mapping[str, Any]) -> tuple[Slot, Slot]:
        """Memory for a worker's snapshots."""
        self._configs[job] = CheckpointConfig(**settings)
        return Slot(), Slot()

    def recall(self, job: str, local_rank: int) -> Kept | None:
        """The newest snapshot that a worker of this job left here."""
        return self._kept.get((job, local_rank))

    def keep(self, job: str, local_rank: int, slot: Slot, number: int, order: SaveOrder, tell: Tell) -> None:
        """Hold a snapshot and have it written."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ftlab-keeper", daemon=True)
            self._thread.start()
        life = self._life
        self._orders.put(lambda: self._write(job, local_rank, slot, number, order, tell, life))

    def drop(self) -> None:
        """Forget everything: this node starts over as a new one."""
        self._life += 1
        self._kept.clear()

    def _run(self) -> None:
        while True:
            self._orders.get()()

    def _write(self, job: str, local_rank: int, slot: Slot, number: int, order: SaveOrder, tell: Tell,
               life: int) -> None:
        data = slot.view(order.bytes)
        if life == self._life:
            self._kept[job, local_rank] = Kept(slot, order, xxhash.xxh3_128(data).hexdigest())
        config = self._configs[job]

        def report(event: str, *, step: int, **facts: Any) -> None:
            tell(messages.Noted(job=job, event=event, step=step, data=facts))

        problem = None
        if life == self._life:
            problem = write_and_report(self._vault(config), order, data, keep=config.keep_last_n,
                                       timeout_s=config.timeout_s, report=report)
        tell(messages.Saved(slot=number, seconds=round(time.monotonic() - order.taken, 4), ok=problem is None))

    def _vault(self, config: CheckpointConfig) -> Vault:
        url = config.url()
        if url not in self._vaults:
            self._vaults[url] = Vault(open_storage(url))
        return self._vaults[url]
