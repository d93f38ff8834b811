"""What a worker prints, on its way to the notebook: all of it into a file, not too much of it onto the screen.

A worker that prints megabytes must neither block nor flood anybody. Every byte goes to the node's log file; of the
lines, a burst and then a steady trickle is passed on, and the rest is counted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

BURST_LINES = 200  # passed on at once
LINES_PER_S = 20.0  # and then so many a second
MAX_LINE = 500  # characters of a line that are passed on
MAX_LOG_BYTES = 256 << 20  # of one worker's file


@dataclass
class OutputFilter:
    """Splits a worker's output into lines and decides which are shown; `now` is passed in."""

    log: Path | None = None
    allowance: float = BURST_LINES
    refilled: float = field(default_factory=time.monotonic)
    hidden: int = 0
    written: int = 0
    _rest: bytes = b""

    def feed(self, data: bytes, now: float) -> list[str]:
        """Take in what was printed; the lines to show."""
        self._save(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > 1 << 16:  # no end of line in sight
            lines.append(self._rest)
            self._rest = b""
        self.allowance = min(BURST_LINES, self.allowance + (now - self.refilled) * LINES_PER_S)
        self.refilled = now
        shown = []
        for line in lines:
            if self.allowance < 1:
                self.hidden += 1
                continue
            if self.hidden:
                shown.append(self._notice())
            self.allowance -= 1
            shown.append(_clip(line))
        return shown

    def finish(self) -> list[str]:
        """What is left when the worker has ended."""
        rest = [_clip(self._rest)] if self._rest else []
        self._rest = b""
        return ([self._notice()] if self.hidden else []) + rest

    def _notice(self) -> str:
        count, self.hidden = self.hidden, 0
        where = f"; all of it: {self.log}" if self.log else ""
        return f"... {count} lines not shown{where}"

    def _save(self, data: bytes) -> None:
        if self.log and self.written < MAX_LOG_BYTES:
            with self.log.open("ab") as file:
                file.write(data)
            self.written += len(data)


def _clip(line: bytes) -> str:
    text = line.decode(errors="replace").rstrip("\r")
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}... ({len(text)} characters)"
