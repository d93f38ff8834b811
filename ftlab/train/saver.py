"""Snapshots of a job's state, taken when it is time and handed to the node's agent, which writes them to storage.

The training thread waits for one memory copy. Two slots are filled in turn; while both are still being written the
next snapshot is put off, and said to be. With sharded state every rank saves its own shard at the same step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftlab import messages
from ftlab.checkpoint.arena import Slot, make_room
from ftlab.checkpoint.interval import DEFAULT_STEPS, AutoInterval
from ftlab.checkpoint.saving import SaveOrder
from ftlab.checkpoint.tree import pack
from ftlab.config import CheckpointConfig, every_seconds, every_steps

if TYPE_CHECKING:
    from ftlab.train.link import WorkerLink
    from ftlab.train.session import Session


class Saver:
    """Decides when a worker takes a snapshot, and takes it."""

    def __init__(self, config: CheckpointConfig, link: WorkerLink, job: str, slots: Sequence[Slot],
                 busy: Sequence[int]) -> None:
        self.config, self._link, self._job = config, link, job
        self._steps, self._seconds = every_steps(config.every), every_seconds(config.every)
        self._slots = list(slots)
        self._free = [slot for slot in range(len(self._slots)) if slot not in busy]
        self._changed = threading.Condition()
        self._auto = AutoInterval()
        self._last_step, self._last_time = 0, time.monotonic()
        self._put_off = 0  # the first step whose snapshot is overdue
        self._generation = 0  # in which the last snapshot was taken
        self._roomy = False  # memory for snapshots was asked for
        link.on_saved = self._on_saved

    def after_step(self, session: Session) -> None:
        """A step was committed: take a snapshot if it is time. Only ranks that save have anything to do."""
        if session.sharded is not None:
            self._after_sharded_step(session)
        elif session.rank == 0:
            if self._put_off or self._due(session.state.step):
                self._take_or_put_off(session, session.state.step)
            elif not self._roomy:
                make_room(self._slots, pack(session.state.capture()))
                self._roomy = True

    def finish(self, session: Session) -> None:
        """The train function returned: save its last step, and wait until all is written or the deadline is over."""
        if session.sharded is None and session.rank != 0:
            return
        deadline = time.monotonic() + self.config.timeout_s
        if session.state.step > self._last_step and self._await(lambda: bool(self._free), deadline):
            self._take(session, session.state.step)
        self._await(lambda: len(self._free) == len(self._slots), deadline)

    def _after_sharded_step(self, session: Session) -> None:
        """All ranks save together: every few steps, and after the first step of a generation, because a rank that was
        replaced has no replica yet."""
        step, every = session.state.step, self._steps or DEFAULT_STEPS
        if step % every == 0 or session.generation != self._generation:
            self._await(lambda: bool(self._free), time.monotonic() + self.config.timeout_s)
            self._take_or_put_off(session, step)

    def _take_or_put_off(self, session: Session, step: int) -> None:
        if self._free:
            self._take(session, step)
        elif not self._put_off:
            self._put_off = step
            self._note("checkpoint.delayed", step, reason="two snapshots are still being written: storage is slower "
                                                          "than the interval")

    def _take(self, session: Session, step: int) -> None:
        begin = time.monotonic()
        with self._changed:
            slot = self._free.pop(0)
        filled = self._slots[slot].fill(pack(session.state.capture()))
        now = time.monotonic()
        rank, world = (session.rank, session.world) if session.sharded is not None else (0, 1)
        order = SaveOrder(step=step, tag=f"{self._job}g{session.generation:x}", bytes=filled.bytes, rank=rank,
                          world=world, header_bytes=filled.header_bytes, taken=now, generation=session.generation)
        self._link.send(messages.Snapshot(slot=slot, order=order.to_dict(), blocking_s=round(now - begin, 5)))
        self._auto.observe_snapshot(now - begin)
        self._last_step, self._last_time, self._put_off = step, now, 0
        self._generation = session.generation

    def _due(self, step: int) -> bool:
        if self._steps is not None:
            return step % self._steps == 0
        now = time.monotonic()
        if self._seconds is not None:
            return now - self._last_time >= self._seconds
        self._auto.observe_step((now - self._last_time) / max(1, step - self._last_step))
        return step - self._last_step >= self._auto.steps()

    def _on_saved(self, message: messages.Saved) -> None:
        with self._changed:
            self._free.append(message.slot)
            if message.ok:
                self._auto.observe_commit(message.seconds)
            self._changed.notify_all()

    def _await(self, condition: object, deadline: float) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, max(0.0, deadline - time.monotonic()))  # type: ignore[arg-type]

    def _note(self, event: str, step: int, **facts: object) -> None:
        self._link.send(messages.Noted(job=self._job, event=event, step=step, data=facts))
