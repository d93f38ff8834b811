"""Where the state comes from when nobody lives who holds it: a node's memory, then storage, then the beginning.

The rungs above (live replicas) are the session's. Every rung is verified by its digest before it is used; a damaged
checkpoint is set aside and the next older one is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ftlab.checkpoint.arena import Slot
from ftlab.checkpoint.fence import take_over
from ftlab.checkpoint.manifest import Shard
from ftlab.checkpoint.newest import Damage, load_first, sift
from ftlab.checkpoint.reading import ShardReader, read_memory
from ftlab.checkpoint.restoring import put, read
from ftlab.checkpoint.state import TrainingState
from ftlab.checkpoint.storage import open_storage
from ftlab.checkpoint.tree import Packed
from ftlab.checkpoint.vault import Entry, Vault
from ftlab.config import CheckpointConfig
from ftlab.errors import CheckpointDamaged, NoCheckpoint, StateLost, StorageError

log = logging.getLogger(__name__)
Note = tuple[str, int, dict[str, Any]]  # event, step, facts
Card = dict[str, Any]


class Ladder:
    """The rungs below the live replicas, for one worker. `files` are this worker's two slots and two with replicas."""

    def __init__(self, config: CheckpointConfig | None, job: str, files: Sequence[int], busy: Sequence[int]) -> None:
        self.config, self.job, self.busy = config, job, list(busy)
        self.generation = 0  # in which this worker has its seat
        self.slots = [Slot(fd) for fd in files]

    def cards(self) -> list[Card]:
        """What lies in this node's memory for this worker: its own earlier snapshots, and another rank's."""
        found = [(index, slot.card()) for index, slot in enumerate(self.slots)]
        return [{**card, "slot": index} for index, card in found if card is not None and card["job"] == self.job]

    @property
    def memory_step(self) -> int:
        """The step of the newest whole snapshot in this node's memory; -1 if there is none."""
        return max((int(card["step"]) for card in self.cards() if card["world"] == 1), default=-1)

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

    def load(self, rung: str, state: TrainingState, trained: bool, at_most: int | None = None) -> list[Note]:
        """Load from a rung; what is to be noted. A job that has `trained` must not begin anew unsaid. With `at_most`,
        the newest checkpoint up to that step, or else the oldest there is."""
        notes: list[Note] = []
        if rung == "memory":
            card = max((card for card in self.cards() if card["world"] == 1), key=lambda card: int(card["step"]))
            try:
                put([read_card(card, self.slots[card["slot"]].view(card["bytes"]))], state, "the snapshot in memory",
                    refreeze=True)
                return [("checkpoint.recalled", card["step"], {"bytes": card["bytes"]})]
            except CheckpointDamaged as error:
                notes.append(("checkpoint.damaged", card["step"], {"name": "memory", "reason": error.message}))
        return [*notes, *self._load_storage(state, trained, at_most)]

    def _load_storage(self, state: TrainingState, trained: bool, at_most: int | None) -> list[Note]:
        notes: list[Note] = []
        good = self.good(notes)
        if at_most is not None:
            good = [entry for entry in good if entry.step <= at_most] or good[::-1]
        found = load_first(good, lambda entry: self.read(entry, state),
                           lambda entry, reason: notes.append(self.set_aside(entry, reason)))
        if found is None:
            self.require_fresh(trained, notes)
            return notes
        return [*notes, ("checkpoint.loaded", found.step, {"name": found.name})]

    def good(self, notes: list[Note]) -> list[Entry]:
        """The checkpoints that can be loaded, the newest first; what is damaged is set aside and goes to `notes`. What
        earlier generations have not committed by now, they never will: nothing newer can appear behind our back."""
        if self.generation:
            try:
                take_over(self.vault.storage, self.job, self.generation)
            except StorageError as error:  # a full disk: it can be read; no save is committed before this was done
                log.warning("earlier generations are not fenced in storage yet: %s", error)
        return sift(self.vault, self.candidates(), lambda damage: notes.append(_note(damage)))

    def read(self, entry: Entry, state: TrainingState, refreeze: bool = True) -> Callable[[], None]:
        """Read a checkpoint from storage; what loads it."""
        reading = read(self.vault, entry.name, state, refreeze=refreeze)
        return lambda: state.restore(reading.captured)

    def require_fresh(self, trained: bool, notes: Sequence[Note]) -> None:
        """Raise if the job cannot begin anew: StateLost, or CheckpointDamaged if it was to begin from a chosen one."""
        if trained:
            raise StateLost("no rank holds a committed step any more, and there is no good checkpoint",
                            seen="; ".join(str(facts["reason"]) for _, _, facts in notes) or self.vault.storage.url)
        assert self.config is not None
        if not isinstance(self.config.resume, bool):
            chosen = self.vault.find(self.config.resume)
            raise CheckpointDamaged(f"checkpoint {self.config.resume} cannot be used: it is {chosen.status}",
                                    seen=chosen.reason, hint="choose another, or resume=True for the newest good one")

    @property
    def vault(self) -> Vault:
        """The job's checkpoints in storage."""
        assert self.config is not None
        return Vault(open_storage(self.config.url()))

    def candidates(self) -> list[Entry]:
        """What may be loaded, the newest first: a job that was not to resume has only its own checkpoints."""
        assert self.config is not None
        vault = self.vault
        entries = [entry for entry in vault.entries() if entry.status in ("good", "damaged", "too new")]
        own = [entry for entry in entries if f"-{self.job}" in entry.name]
        if self.config.resume is True:
            return entries
        if self.config.resume is False:
            return own
        try:
            return [*own, vault.find(self.config.resume)]
        except NoCheckpoint:
            if not own:
                raise
            return own  # what it began from is retired by now

    def condemn(self, name: str, reason: str) -> list[Note]:
        """Set aside a checkpoint whose numbers turned bad; what is to be noted."""
        return [self.set_aside(entry, reason) for entry in self.candidates() if entry.name == name]

    def set_aside(self, entry: Entry, reason: str) -> Note:
        """Mark a checkpoint that cannot be used; what is to be noted."""
        return _note(Damage.mark(self.vault, entry, reason))


def _note(damage: Damage) -> Note:
    facts = asdict(damage)
    return "checkpoint.damaged", facts.pop("step"), facts


def read_card(card: Card, data: memoryview) -> Packed:
    """A snapshot in memory, verified; raises CheckpointDamaged."""
    shard = Shard(file="memory", rank=card["rank"], bytes=card["bytes"], header_bytes=card["header_bytes"],
                  digest=card["digest"])
    return ShardReader(read_memory(data), shard, "the snapshot in memory").read()
