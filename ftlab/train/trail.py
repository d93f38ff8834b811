"""The trail of checkpoints that a training leaves behind, and can go back along.

In a group all ranks call the same methods: rank 0 chooses a checkpoint, and all load that one. A checkpoint that is
found damaged, that training failed right after, or that training has turned away from is set aside, never deleted.
"""

from __future__ import annotations

import logging

from ftlab.checkpoint.manager import CheckpointManager
from ftlab.checkpoint.state import TrainingState
from ftlab.checkpoint.vault import Entry
from ftlab.errors import FtlabError, StateLost
from ftlab.train.guard import Book
from ftlab.train.host import Host

log = logging.getLogger(__name__)


class Trail:
    """Saves one run's state, and loads it again."""

    def __init__(self, manager: CheckpointManager, host: Host, state: TrainingState, book: Book,
                 every: int | None) -> None:
        self._manager, self._host, self._state, self._book, self._every = manager, host, state, book, every
        self.loaded: Entry | None = None  # the checkpoint the state came from
        self._saved_step = -1

    def resume(self) -> None:
        """Take up an earlier run, or save the beginning, so that there is always something to go back to."""
        found = self._manager.load_latest(self._state)
        if found is not None:
            self._saved_step = found.step
            self.loaded = next((entry for entry in self.good() if entry.step == found.step), None)
            return
        name = self.save(wait=True)
        if self._host.world > 1:  # ranks that built different weights begin with rank 0's, as DDP does it
            self._manager.load(self._state, name)

    def save_if_due(self, epoch_end: int) -> None:
        """Between two batches; the end of an epoch is saved when train_epoch has returned."""
        step = self._state.step
        if self._every and step % self._every == 0 and step not in (self._saved_step, epoch_end):
            self.save()

    def save(self, wait: bool = False) -> str:
        """Take a snapshot now; the checkpoint's name."""
        step = self._saved_step = self._state.step
        latest = self._book.metrics[-1] if self._book.metrics else {}
        numbers = {name: value for name, value in latest.items() if isinstance(value, float)}
        return self._manager.save(self._state, step, epoch=len(self._book.metrics), metrics=numbers, wait=wait)

    def settle(self) -> None:
        """Have the snapshots that were taken become checkpoints; a save that failed is only told."""
        try:
            self._manager.wait(self._manager.config.timeout_s)
        except FtlabError as error:
            log.warning("[rank=%d step=%d] a checkpoint is missing: %s", self._host.rank, self._state.step, error)

    def good(self) -> list[Entry]:
        """The checkpoints that can be used, the newest first."""
        self.settle()
        return [entry for entry in self._manager.entries() if entry.good]

    def condemn(self, reason: str) -> None:
        """The checkpoint that was loaded last is not to be used again."""
        self.settle()
        if self._host.rank == 0 and self.loaded is not None:
            self._manager.vault.set_aside(self.loaded.name, reason)

    def go_back(self, limit: int) -> None:
        """Load the newest good checkpoint up to a step, or the oldest there is; the same one on all ranks."""
        choice: list[Entry] = []
        error: FtlabError | None = None
        if self._host.rank == 0:
            try:
                choice = self._choose(limit)
            except FtlabError as raised:
                error = raised
        choice, error = self._host.agree((choice, error))
        if error is not None:
            raise error
        chosen = self._manager.load_first(self._state, choice)
        if chosen is None:
            raise StateLost("no good checkpoint is left to go back to", hint="train from scratch in a new folder")
        if self._host.rank == 0:
            self._turn_away(choice[choice.index(chosen):], chosen.step)
        self.loaded, self._saved_step = chosen, chosen.step

    def _choose(self, limit: int) -> list[Entry]:
        """The newest up to a step first, then those beyond it, the oldest first."""
        self.settle()
        good = self._manager.find_good()
        return [*(entry for entry in good if entry.step <= limit),
                *sorted((entry for entry in good if entry.step > limit), key=lambda each: each.step)]

    def _turn_away(self, others: list[Entry], step: int) -> None:
        """Nobody shall resume from what training has turned away from."""
        for other in others:
            if other.step > step:
                self._manager.vault.set_aside(other.name, f"training went back to step {step}")
