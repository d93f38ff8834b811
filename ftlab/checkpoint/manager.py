"""The checkpoint manager: training state into memory (what the loop waits for) and from there to storage (behind it).

    manager = CheckpointManager("checkpoints", every=50)
    start = manager.load_latest(state)           # None: nothing to resume from
    for step in range(start.step if start else 0, steps):
        ...
        manager.step(state, step + 1)            # saves when it is time
    manager.close()

`state` names what must survive: `{"model": model, "optimizer": optimizer, "loader": loader, "progress": {...}}`, or a
TrainingState. Random generators and gradients that are still being accumulated are saved with it. Works alone and in a
process group; there, all ranks call the same methods. Loading executes nothing that is in the file.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ftlab.checkpoint import ranks
from ftlab.checkpoint.interval import AutoInterval
from ftlab.checkpoint.manifest import Manifest
from ftlab.checkpoint.newest import Damage, load_first, sift
from ftlab.checkpoint.restoring import read
from ftlab.checkpoint.rng import GENERATORS, Generators
from ftlab.checkpoint.saving import SaveOrder, await_commit
from ftlab.checkpoint.state import TrainingState
from ftlab.checkpoint.tree import Packed, pack
from ftlab.checkpoint.vault import Entry, Vault
from ftlab.checkpoint.writer import SLOW, BackgroundWriter
from ftlab.config import CheckpointConfig, every_seconds, every_steps
from ftlab.errors import CheckpointDamaged, CheckpointError, CheckpointTooNew, ConfigError, FtlabError

log = logging.getLogger(__name__)
State = TrainingState | Mapping[str, Any]


@dataclass(frozen=True)
class _Answer:
    """What rank 0 tells the others: which checkpoints look whole, or why it could not look."""

    good: list[Entry] = field(default_factory=list)
    error: FtlabError | None = None


class CheckpointManager:
    """Saves and loads one run's training state."""

    def __init__(self, directory: str = "", *, every: int | str = "auto", keep_last_n: int = 3, timeout_s: float = 60.0,
                 on_event: Callable[[str, dict[str, Any]], None] | None = None) -> None:
        self.config = CheckpointConfig(directory=str(directory), every=every, keep_last_n=keep_last_n,
                                       timeout_s=timeout_s)
        self._on_event = on_event
        self._rank, self._world = ranks.here()
        self.vault = Vault(ranks.open_shared(self.config.url()))
        self._tag, self._saves = ranks.agree(secrets.token_hex(4)), 0
        self._writer = BackgroundWriter(self.vault, keep=keep_last_n, timeout_s=timeout_s, report=self._report)
        self._auto = AutoInterval()
        self._last_step, self._last_time = 0, time.monotonic()
        self._told = False  # that a snapshot is overdue
        self._roomy = False  # memory for snapshots was asked for

    # ---- saving --------------------------------------------------------------------------------------------

    def step(self, state: State, step: int, **facts: Any) -> bool:
        """Save if it is time to, as `every` says; whether a snapshot was taken."""
        if not self._due(step) or self._put_off(step):
            if not self._roomy:
                self._writer.make_room(self._pack(as_state(state, step)))
                self._roomy = True
            return False
        self.save(state, step, **facts)
        return True

    def save(self, state: State, step: int, *, epoch: int | None = None,
             metrics: Mapping[str, float] | None = None, wait: bool = False) -> str:
        """Take a snapshot now and have it written; the checkpoint's name. Storage problems never raise here.

        With `wait` it returns when the checkpoint is durable, and raises if it could not be written. In a group all
        ranks save together: each its shard, or, of a state that all hold, rank 0 the state and the others only their
        random generators.
        """
        self._tell_earlier_failure(step)
        begin = time.monotonic()
        self._saves += 1
        order = SaveOrder(step=step, tag=f"{self._tag}{self._saves:x}", bytes=0, header_bytes=0, rank=self._rank,
                          world=self._world, epoch=epoch, metrics=_numbers(metrics), taken=begin)
        taken = self._snapshot(as_state(state, step), order, begin)
        self._last_step, self._last_time = step, time.monotonic()
        if wait:
            self._await(order, taken)
        return order.name

    def wait(self, timeout: float | None = None) -> None:
        """Block until all snapshots are written; raises the error of the last save if it failed."""
        self._writer.wait(timeout)
        if self._writer.error is not None:
            raise self._writer.error

    def close(self) -> None:
        """Write what is left and end the writer, within `timeout_s`; may be called twice."""
        self._writer.close(self.config.timeout_s)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- loading -------------------------------------------------------------------------------------------

    def load_latest(self, state: State) -> Manifest | None:
        """Load the newest good checkpoint, setting damaged ones aside; None if there is none."""
        found = self.load_first(state, self._agree_on_good())
        return found.manifest if found else None

    def find_good(self) -> list[Entry]:
        """The checkpoints that look whole, the newest first; damaged ones are set aside. For one rank alone."""
        return sift(self.vault, self.vault.entries(), self._tell_damage)

    def load_first(self, state: State, entries: Sequence[Entry]) -> Entry | None:
        """Load the first of these that is whole on all ranks, setting damaged ones aside; None if none of them is."""
        return load_first(entries, lambda entry: self._read(state, entry.name), self._condemn, ranks.gather)

    def load(self, state: State, which: int | str) -> Manifest:
        """Load one checkpoint, by its step or name; raises NoCheckpoint or CheckpointDamaged."""
        entry = self.vault.find(which)
        if entry.status == "too new":
            raise CheckpointTooNew(entry.reason)
        if not entry.good:
            raise CheckpointDamaged(f"checkpoint {which} cannot be used: it is {entry.status}", seen=entry.reason)
        return self._load(state, entry.name)

    def entries(self) -> list[Entry]:
        """All checkpoints, the newest first."""
        return self.vault.entries()

    def remove(self, which: int | str) -> None:
        """Delete one checkpoint by hand, by its step or name."""
        self.vault.remove(self.vault.find(which).name)

    # ---- inside --------------------------------------------------------------------------------------------

    def _snapshot(self, training: TrainingState, order: SaveOrder, begin: float) -> bool:
        packed = self._pack(training)
        slot = self._writer.borrow(order.step)
        if slot is None:
            return False
        try:
            filled = slot.fill(packed)
        except BaseException:
            self._writer.give_back(slot)
            raise
        blocking = time.monotonic() - begin
        self._auto.observe_snapshot(blocking)
        self._report("checkpoint.snapshot", step=order.step, blocking_s=round(blocking, 5), bytes=filled.bytes)
        self._writer.submit(slot, replace(order, bytes=filled.bytes, header_bytes=filled.header_bytes))
        return True

    def _pack(self, training: TrainingState) -> Packed:
        """What this rank saves of a state."""
        whole = self._rank == 0 or training.sharded
        return pack(training.capture() if whole else training.capture_only(GENERATORS))

    def _await(self, order: SaveOrder, taken: bool) -> None:
        """Until the checkpoint is durable: the writer by itself, the others by looking, with a deadline."""
        if not taken:
            raise CheckpointError(f"checkpoint {order.name} was not taken: storage does not answer")
        self.wait(self.config.timeout_s)
        if self._rank != 0:
            await_commit(self.vault, order.name, self.config.timeout_s)

    def _load(self, state: State, name: str) -> Manifest:
        return self._read(state, name)()

    def _read(self, state: State, name: str) -> Callable[[], Manifest]:
        """Read a checkpoint; what loads it."""
        training = as_state(state, 0)
        reading = read(self.vault, name, training, self._rank)

        def load() -> Manifest:
            training.restore(reading.captured)
            self._last_step, self._last_time = reading.manifest.step, time.monotonic()
            self._report("checkpoint.loaded", step=reading.manifest.step, name=name)
            return reading.manifest

        return load

    def _agree_on_good(self) -> list[Entry]:
        """The checkpoints that look whole to rank 0; on all ranks, or its error on all."""
        answer = _Answer()
        if self._rank == 0:
            try:
                answer = _Answer(self.find_good())
            except FtlabError as error:
                answer = _Answer(error=error)
        answer = ranks.agree(answer)
        if answer.error is not None:
            raise answer.error
        return answer.good

    def _condemn(self, entry: Entry, reason: str) -> None:
        if self._rank == 0:
            self._tell_damage(Damage.mark(self.vault, entry, reason))

    def _tell_damage(self, damage: Damage) -> None:
        self._report("checkpoint.damaged", **asdict(damage))
        log.warning("checkpoint %s is damaged and set aside: %s", damage.name, damage.reason)

    def _put_off(self, step: int) -> bool:
        """Alone, training does not wait for slow storage: the snapshot is taken as soon as there is room for it."""
        if self._world > 1 or not self._writer.busy:
            self._told = False
            return False
        if not self._told:
            self._report("checkpoint.delayed", step=step, seconds=0.0, reason=SLOW)
        self._told = True
        return True

    def _due(self, step: int) -> bool:
        """Whether it is time; in a group all ranks go by rank 0's clock."""
        if every_steps(self.config.every) is not None:
            return self._due_here(step)
        return ranks.agree_on(self._due_here(step))

    def _due_here(self, step: int) -> bool:
        seconds, steps = every_seconds(self.config.every), every_steps(self.config.every)
        now = time.monotonic()
        if seconds is not None:
            return now - self._last_time >= seconds
        if steps is None:
            self._auto.observe_step((now - self._last_time) / max(1, step - self._last_step))
            steps = self._auto.steps()
        return step - self._last_step >= steps

    def _tell_earlier_failure(self, step: int) -> None:
        if self._writer.error is not None:
            log.warning("[step=%d] the checkpoint before this one failed: %s", step, self._writer.error)

    def _report(self, kind: str, **facts: Any) -> None:
        if kind == "checkpoint.committed":
            self._auto.observe_commit(facts["seconds"])
        if self._on_event is not None:
            try:
                self._on_event(kind, facts)
            except Exception:  # somebody else's code must not make a saved checkpoint count as failed
                log.exception("the listener raised on %s", kind)


def as_state(state: State, step: int) -> TrainingState:
    """A TrainingState as it is; names of parts become one, with the random generators beside them."""
    if isinstance(state, TrainingState):
        return state
    if GENERATORS in state:
        raise ConfigError(f"a part cannot be called {GENERATORS!r}: the random generators are saved by that name")
    return TrainingState.of({**state, GENERATORS: Generators()}, step)


def _numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"metrics must be numbers: {error}") from None
