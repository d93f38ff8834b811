"""Pauses between two steps: training stops when so many steps are committed, and goes on when it is told to.

Whoever wants to do something at one step exactly, however short steps are, has training held there first. Every rank
answers: it pauses, or it is already beyond that step. A pause is over when it is not asked for any more, with the end
of its generation or of the job, when the controller dies, and after `LONGEST_S` in any case.

Two threads meet here. The training thread writes `begun` before it reads `first`, the link's thread writes `first`
before it reads `begun`: so at least one of them sees that a step was asked for just as it began.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from ftlab import messages

LONGEST_S = 10.0
_NEVER = 1 << 62


class Holds:
    """The steps after which one worker is to pause."""

    def __init__(self, changed: threading.Condition, send: Callable[[messages.Message], None]) -> None:
        self._changed, self._send = changed, send
        self._steps: set[int] = set()
        self._at = -1  # where the training thread pauses now
        self.first = _NEVER  # of the steps: what the training thread looks at in every step
        self.begun = -1  # the step that the training thread began last, in this generation

    def ask(self, steps: Iterable[int], generation: int) -> list[messages.Held]:
        """Pause after these steps and no others; the answers for those that it is too late for. With `_changed`."""
        self._set(steps)
        late = sorted(step for step in self._steps if step <= self.begun and step != self._at)
        self._set(self._steps.difference(late))
        return [messages.Held(generation=generation, asked=step, step=self.begun, missed=True) for step in late]

    def begin_anew(self, steps: Iterable[int]) -> None:
        """The same for the next generation, in which no step has begun yet. With `_changed`."""
        self._set(steps)

    def go_on(self) -> None:
        """The present pause is over. With `_changed`."""
        self._set(self._steps - {self._at})

    def pause(self, step: int, generation: int, over: Callable[[], bool]) -> None:
        """So many steps are committed: pause if that was asked for, and tell what it is too late for."""
        with self._changed:
            late = sorted(asked for asked in self._steps if asked < step)
            self._set(self._steps.difference(late))
            held = step in self._steps
            self._at = step if held else -1
        for asked in late:
            self._send(messages.Held(generation=generation, asked=asked, step=step, missed=True))
        if held:
            self._send(messages.Held(generation=generation, asked=step, step=step))
            self._wait(step, generation, over)

    def _wait(self, step: int, generation: int, over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONGEST_S
        with self._changed:
            while step in self._steps and not over() and time.monotonic() < deadline:
                self._changed.wait(deadline - time.monotonic())
            expired = step in self._steps and not over()
            self._at = -1
            if not over():  # else the next generation may already have asked for the same step
                self._set(self._steps - {step})
        if expired:
            self._send(messages.Held(generation=generation, asked=step, step=step, missed=True))

    def _set(self, steps: Iterable[int]) -> None:
        self._steps = set(steps)
        self.first = min(self._steps, default=_NEVER)
