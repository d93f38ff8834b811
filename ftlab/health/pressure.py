"""How busy is the machine? The share of time in which something was ready to run and no CPU was free, as Linux counts
it ("pressure stall information").

Ranks that wait for one another compute nothing: if there is pressure while all of them wait, others take the CPUs, and
the wait proves less. Where the kernel does not count (macOS, some containers), a machine is never taken to be busy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ftlab.health.kernel import PROC, read

_BUSY = 0.5  # of the time


def cpu_pressure() -> float | None:
    """Seconds, since the machine was started, in which something waited for a CPU; None where nobody counts."""
    found = re.match(r"some .*total=(\d+)", read(PROC / "pressure" / "cpu"))
    return int(found[1]) / 1e6 if found else None


@dataclass
class Pressure:
    """The pressure on the CPUs since `begin`; `read` tells the seconds of it so far."""

    read: Callable[[], float | None] = cpu_pressure
    _begin: tuple[float, float | None] | None = field(default=None, init=False)

    def begin(self, now: float) -> None:
        """Count from now on, unless it counts already."""
        self._begin = self._begin or (now, self.read())

    def end(self) -> None:
        """Count no more."""
        self._begin = None

    def is_busy(self, now: float) -> bool:
        """Whether something waited for a CPU most of the time since `begin`."""
        if self._begin is None or self._begin[1] is None or now <= self._begin[0]:
            return False
        seconds = self.read()
        return seconds is not None and seconds - self._begin[1] > _BUSY * (now - self._begin[0])
