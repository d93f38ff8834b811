"""A thread that writes snapshots to storage while training goes on: one at a time, with bounded memory.

A save that fails is kept as `error` and told to `report`; training hears of it at its next save, and goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

from ftlab.checkpoint.arena import Slot, make_room
from ftlab.checkpoint.pace import Pace, at_once, moderate, step_back
from ftlab.checkpoint.saving import SaveOrder, persist, retire
from ftlab.checkpoint.tree import Packed
from ftlab.checkpoint.vault import Vault
from ftlab.errors import CheckpointError, CheckpointFenced, StorageError, WaitTimeout

log = logging.getLogger(__name__)
SLOW = "two snapshots are still being written: storage is slower than the interval"
Report = Callable[..., None]  # kind, step=, and the facts


class BackgroundWriter:
    """Owns two slots; whoever wants to save borrows a free one and hands it back filled."""

    def __init__(self, vault: Vault, *, keep: int, timeout_s: float, report: Report) -> None:
        self.vault, self.keep, self.timeout_s, self.report = vault, keep, timeout_s, report
        self.error: CheckpointError | None = None  # of the last save, if it failed
        self._free: queue.LifoQueue[Slot] = queue.LifoQueue()  # the one used last is the warmest
        self._slots = [Slot(), Slot()]
        for slot in self._slots:
            self._free.put(slot)
        self._orders: queue.SimpleQueue[tuple[Slot, SaveOrder] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._waiting = 0  # orders not yet done
        self._hurried = False  # somebody waits for them
        self._closed = False
        self._thread: threading.Thread | None = None

    def make_room(self, packed: Packed) -> None:
        """Get the memory for snapshots like this one before the first is taken."""
        make_room(self._slots, packed)

    def borrow(self, step: int) -> Slot | None:
        """A free slot; waits for one, and says so, when storage is slower than the saves. None: it does not answer."""
        if self._closed:
            raise CheckpointError("the checkpoint manager is closed", hint="make a new one")
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return self._borrow_later(step)

    def give_back(self, slot: Slot) -> None:
        """A slot that was not filled after all."""
        self._free.put(slot)

    @property
    def busy(self) -> bool:
        """Whether a save now would have to wait."""
        return self._free.empty()

    def submit(self, slot: Slot, order: SaveOrder) -> None:
        """Have a filled slot written."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ftlab-checkpoints", daemon=True)
            self._thread.start()
        with self._idle:
            self._waiting += 1
        self._orders.put((slot, order))

    def wait(self, timeout: float | None = None) -> None:
        """Block until everything is written; raises WaitTimeout."""
        with self._idle:
            self._hurried = self._waiting > 0
            if not self._idle.wait_for(lambda: self._waiting == 0, timeout):
                raise WaitTimeout(f"{self._waiting} checkpoints are not written after {timeout:g} s",
                                  hint="storage is slow or does not answer")

    def close(self, timeout: float | None = None) -> None:
        """Write what is left, then end; raises WaitTimeout if storage does not answer. May be called twice."""
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._orders.put(None)
            self.wait(timeout)  # else the thread, a daemon, keeps its slots and goes on trying
            thread.join()
        for slot in self._slots:
            slot.close()

    def _borrow_later(self, step: int) -> Slot | None:
        begin, self._hurried = time.monotonic(), True
        try:
            slot = self._free.get(timeout=self.timeout_s)
        except queue.Empty:
            self.error = StorageError(f"no checkpoint of step {step}: storage does not answer", hint=SLOW)
            self.report("checkpoint.failed", step=step, name="", reason=self.error.message, seen=SLOW)
            return None
        self.report("checkpoint.delayed", step=step, seconds=round(time.monotonic() - begin, 4), reason=SLOW)
        return slot

    def _run(self) -> None:
        step_back()
        while (work := self._orders.get()) is not None:
            slot, order = work
            try:
                self._write(slot, order)
            except Exception as error:  # a listener of ours raised: that is no reason to stop saving
                log.exception("[step=%d] saving went wrong", order.step)
                self.error = CheckpointError(f"{type(error).__name__}: {error}")
            self._free.put(slot)
            with self._idle:
                self._waiting -= 1
                self._hurried = self._hurried and self._waiting > 0
                self._idle.notify_all()

    def _write(self, slot: Slot, order: SaveOrder) -> None:
        self.error = write_and_report(self.vault, order, slot.view(order.bytes), keep=self.keep,
                                      timeout_s=self.timeout_s, report=self.report,
                                      pace=moderate(lambda: self._hurried))


def write_and_report(vault: Vault, order: SaveOrder, data: memoryview, *, keep: int, timeout_s: float,
                     report: Report, over: Callable[[], bool] = lambda: False,
                     given_up: Callable[[], bool] = lambda: False, pace: Pace = at_once) -> CheckpointError | None:
    """Persist a snapshot and say how that went; the error, if there was one."""
    try:
        persist(vault, order, data, timeout_s=timeout_s, over=over, given_up=given_up, pace=pace)
    except Exception as error:  # the outer edge of a thread: training must not die of a full disk
        error.__cause__ = error.__context__ = error.__traceback__ = None  # they would keep the snapshot's memory
        problem = error if isinstance(error, CheckpointError) else CheckpointError(f"{type(error).__name__}: {error}")
        log.warning("[step=%d] the checkpoint was not saved: %s", order.step, problem)
        kind = "checkpoint.refused" if isinstance(problem, CheckpointFenced) else "checkpoint.failed"
        report(kind, step=order.step, name=order.name, reason=problem.message, seen=problem.seen)
        return problem
    if order.rank == 0:
        report("checkpoint.committed", step=order.step, seconds=round(time.monotonic() - order.taken, 4),
               name=order.name, bytes=order.bytes, world=order.world)
        removed = retire(vault, keep, order.name, lambda damage: report("checkpoint.damaged", **asdict(damage)))
        if removed:
            report("checkpoint.retired", step=order.step, names=removed)
    return None
