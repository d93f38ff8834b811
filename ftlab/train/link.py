"""The worker's link to its agent: a thread that listens while the training thread trains.

The controller's word arrives here. `Terminate` cuts the group under the training thread, again and again until that
thread has noticed; `Join` is kept until the training thread comes for it. When the agent is gone, so is the worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ftlab import messages
from ftlab.elastic.group import Group
from ftlab.train.holds import Holds

_FLUSH_S = 0.25  # how long a committed step may wait to be reported; its node's heartbeat goes with it
_NOBODY = 1 << 62
_RESEVER_S = 0.005  # a group that is being built may open a socket right after it was cut
_STUCK_S = 0.2  # a collective that has not noticed the cut by then lost a message, and never will
_STUCK_CUTS = 40  # nor by so many cuts: where this thread gets so few turns, so does the training thread
_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"  # where the training thread is then


class WorkerLink:
    """Messages from and to the agent, and the group that may have to be cut."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._group: Group | None = None
        self.ended = 0  # the newest generation that is over, by the controller's word
        self._join: messages.Join | None = None
        self._joined_at = 0.0
        self._steps: list[messages.StepRow] = []  # committed, not yet reported
        self._watched = _NOBODY  # the step somebody waits for
        self.holds = Holds(self._changed, self.send)
        self.on_saved: Callable[[messages.Saved], None] = lambda message: None
        self.waits_for_peers: Callable[[], bool] = in_collective  # whether the training thread does
        self.released = False

    def start(self) -> None:
        """Begin to listen."""
        threading.Thread(target=self._listen, name="ftlab-link", daemon=True).start()

    def send(self, message: messages.Message) -> None:
        """Tell the agent, after the steps that came before; a worker without an agent ends."""
        with self._sending:
            self._flush()
            self._write(message)

    def note_step(self, row: messages.StepRow, urgent: bool) -> None:
        """Report a committed step: now if it is urgent or somebody waits for it, else with the next few."""
        self._steps.append(row)  # no system call, no wake-up: this runs once a step
        if urgent or row[1] >= self._watched:
            if row[1] >= self._watched:
                self._watched = _NOBODY
            with self._sending:
                self._flush()

    def _flush(self) -> None:
        if self._steps:
            rows: list[Any] = self._steps
            self._steps = []
            self._write(messages.Steps(rows=rows))

    def _write(self, message: messages.Message) -> None:
        try:
            self._connection.send_bytes(messages.dumps(message))
        except OSError:
            os._exit(1)

    def over(self, generation: int) -> bool:
        """Whether the controller has ended this generation."""
        return generation <= self.ended

    def watch(self, group: Group | None) -> None:
        """The group to cut when its generation ends; None while there is none."""
        with self._changed:
            self._group = group
            self._changed.notify_all()

    def wait_for_join(self, after: int) -> tuple[messages.Join, float] | None:
        """The newest seat beyond generation `after` and when it arrived; None once the job released the worker."""
        with self._changed:
            while True:
                if self.released:
                    return None
                if self._join is not None:
                    generation = self._join.table["generation"]
                    if generation > after and not self.over(generation):
                        return self._join, self._joined_at
                self._changed.wait()

    def wait_for_end(self, generation: int) -> None:
        """Block until this generation is over or the job released the worker."""
        with self._changed:
            while not (self.released or self.over(generation)):
                self._changed.wait()

    def _listen(self) -> None:
        waiting = select.poll()  # kept: Connection.poll makes a selector at each call
        waiting.register(self._connection, select.POLLIN)
        while True:
            try:
                if not waiting.poll(1000 * _FLUSH_S):
                    with self._sending:
                        self._flush()
                    continue
                message = messages.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(1)
            with self._changed:
                answers = self._hear(message)
                self._changed.notify_all()
            for answer in answers:
                self.send(answer)
            self._cut()

    def _hear(self, message: messages.Message) -> Sequence[messages.Message]:
        match message:
            case messages.Watch():
                self._watched = message.step
            case messages.Terminate():
                self.ended = max(self.ended, message.generation)
            case messages.Join():
                self._join, self._joined_at = message, time.monotonic()
                self.holds.begin_anew(map(int, message.holds))
            case messages.Hold():
                return self.holds.ask(map(int, message.steps), self._generation())
            case messages.GoOn():
                self.holds.go_on()
            case messages.Saved():
                self.on_saved(message)
            case messages.Release():
                self.released = True
                self.holds.begin_anew(())
        return ()

    def _generation(self) -> int:
        return self._group.table.generation if self._group is not None else 0

    def _cut(self) -> None:
        """Sever the group of an ended generation until the training thread has let go of it; tell if it does not."""
        begin, cuts = time.monotonic(), 0
        with self._changed:
            while (group := self._group) is not None and self.over(group.table.generation):
                with contextlib.suppress(OSError):  # a descriptor that vanished meanwhile: the next round gets the rest
                    group.sever()
                cuts += 1
                if cuts >= _STUCK_CUTS and time.monotonic() - begin > _STUCK_S and self.waits_for_peers():
                    self.send(messages.Stuck(generation=group.table.generation))
                    begin, cuts = time.monotonic(), 0
                if self._connection.poll(0):
                    return  # hear what is new first; the cut goes on after it
                self._changed.wait(_RESEVER_S)


def in_collective() -> bool:
    """Whether the training thread, which is the main one, waits in torch.distributed, whoever called it there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and _COLLECTIVES in frame.f_code.co_filename
