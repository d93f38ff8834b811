"""A process that gets only a part of its time: stopped and continued in turn, many times a second."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from dataclasses import dataclass

PERIOD_S = 0.04  # on average; never twice the same, or whoever looks at fixed times might always meet it running


@dataclass
class Slowdown:
    """One slowed process; `turn` it whenever `due` has come."""

    pid: int
    share: float  # of the time that it runs
    due: float
    _stopped: bool = False
    _period_s: float = PERIOD_S

    def turn(self, now: float) -> bool:
        """Stop or continue it if it is time to; False once it is gone."""
        if now < self.due:
            return True
        self._stopped = not self._stopped
        if self._stopped:
            self._period_s = random.uniform(0.5, 1.5) * PERIOD_S
        self.due = now + self._period_s * (1 - self.share if self._stopped else self.share)
        try:
            os.kill(self.pid, signal.SIGSTOP if self._stopped else signal.SIGCONT)
        except ProcessLookupError:
            return False
        return True

    def end(self) -> None:
        """Let it run."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
