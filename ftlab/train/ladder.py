"""Where the state comes from when nobody lives who holds it: a node's memory, then storage, then the beginning.

The rungs above (live replicas) are the session's. Every rung is verified by its digest before it is used; a damaged
checkpoint is set aside and the next older one is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftlab.checkpoint.arena import Slot
from ftlab.checkpoint.manifest import Shard
from ftlab.checkpoint.reading import MemoryReader, ShardReader
from ftlab.checkpoint.restoring import put, restore
from ftlab.checkpoint.state import TrainingState
from ftlab.checkpoint.storage import open_storage
from ftlab.checkpoint.vault import Entry, Vault
from ftlab.config import CheckpointConfig
from ftlab.errors import CheckpointDamaged, StateLost

Note = tuple[str, int, dict[str, Any]]  # event, step, facts


class Ladder:
    """The rungs below the live replicas, for one worker."""

    def __init__(self, config: CheckpointConfig | None, job: str, memory: dict[str, Any] | None,
                 files: Sequence[int]) -> None:
        self.config, self.job = config, job
        self.files = list(files[:2])  # for this worker's own snapshots
        self._memory, self._kept = memory, files[2] if memory and len(files) > 2 else None

    @property
    def memory_step(self) -> int:
        """The step of the snapshot that an earlier worker left in this node's memory; -1 if there is none."""
        return int(self._memory["step"]) if self._memory and self._kept is not None else -1

    def choose(self, kept: Sequence[int], trained: bool) -> tuple[list[int], str]:
        """The ranks that load and the rung they load from; the same answer on every rank."""
        if max(kept) >= 0:
            return [rank for rank, step in enumerate(kept) if step == max(kept)][:1], "memory"
        if self.config is not None:
            return [0], "storage"
        if trained:
            raise StateLost("no rank holds a committed step any more",
                            hint="inside a step, change parameters only after its last collective: a step that failed "
                                 "in between cannot be undone")
        return [0], "initial"

    def load(self, rung: str, state: TrainingState, trained: bool) -> list[Note]:
        """Load from a rung; what is to be noted. A job that has `trained` must not begin anew unsaid."""
        notes: list[Note] = []
        if rung == "memory":
            try:
                return [self._load_memory(state)]
            except CheckpointDamaged as error:  # it was being filled when its worker died
                notes.append(("checkpoint.damaged", self.memory_step, {"name": "memory", "reason": error.message}))
        return [*notes, *self._load_storage(state, trained)]

    def _load_memory(self, state: TrainingState) -> Note:
        assert self._memory is not None and self._kept is not None
        order, where = self._memory, "the snapshot in memory"
        shard = Shard(file="memory", rank=order["rank"], bytes=order["bytes"], header_bytes=order["header_bytes"],
                      digest=order["digest"])
        reader = MemoryReader(Slot(self._kept).view(shard.bytes))
        put([ShardReader(reader, shard, where).read()], state, where)
        return "checkpoint.recalled", order["step"], {"bytes": shard.bytes}

    def _load_storage(self, state: TrainingState, trained: bool) -> list[Note]:
        assert self.config is not None
        vault = Vault(open_storage(self.config.url()))
        notes: list[Note] = []
        for entry in self._candidates(vault):
            try:
                manifest = restore(vault, entry.name, state)
                return [*notes, ("checkpoint.loaded", manifest.step, {"name": entry.name})]
            except CheckpointDamaged as error:
                notes.append(_set_aside(vault, entry, error.message))
        if trained:
            raise StateLost("no rank holds a committed step any more, and there is no good checkpoint",
                            seen="; ".join(str(facts["reason"]) for _, _, facts in notes) or vault.storage.url)
        return notes

    def _candidates(self, vault: Vault) -> list[Entry]:
        """What may be loaded, the newest first: a job that was not to resume has only its own checkpoints."""
        assert self.config is not None
        entries = [entry for entry in vault.entries() if entry.status in ("good", "damaged")]
        own = [entry for entry in entries if f"-{self.job}" in entry.name]
        if self.config.resume is True:
            return entries
        return own if self.config.resume is False else [*own, vault.find(self.config.resume)]


def _set_aside(vault: Vault, entry: Entry, reason: str) -> Note:
    marked = vault.set_aside(entry.name, reason)
    return "checkpoint.damaged", entry.step, {"name": entry.name, "reason": reason, "marked": marked}
