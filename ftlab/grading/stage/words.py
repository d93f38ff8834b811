"""What a child of the stage says, with a deadline, and what it prints, however much that is."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

MAX_LINE = 1 << 22  # bytes of one line; more than that is not what our own code says
_KEPT = 8 << 10  # bytes kept of what was printed first, and of what was printed last


class Printed:
    """The output of a child: all of it is read, so that the child never waits, and its two ends are kept."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self._head, self._tail, self._dropped = b"", b"", 0
        os.set_blocking(pipe, False)

    def drain(self) -> None:
        """Take in what is there."""
        while True:
            try:
                got = os.read(self.pipe, 1 << 16)
            except BlockingIOError:
                return
            if not got:
                return
            room = _KEPT - len(self._head)
            self._head += got[:room]
            tail = self._tail + got[room:] if room < len(got) else self._tail
            self._dropped += max(0, len(tail) - _KEPT)
            self._tail = tail[-_KEPT:]

    def text(self) -> str:
        """What was printed, with the middle left out if it was long."""
        gap = f"\n[... {self._dropped} bytes left out ...]\n".encode() if self._dropped else b""
        return (self._head + gap + self._tail).decode(errors="replace")


class Words:
    """The JSON lines that a child says, with a deadline; `printed` is read meanwhile."""

    def __init__(self, pipe: int, deadline: float, printed: Printed | None = None, limit: int = MAX_LINE) -> None:
        self.pipe, self.deadline, self.printed, self.limit, self.late = pipe, deadline, printed, limit, False
        self.taken = 0  # bytes of the line before
        self._raw = b""

    def next(self) -> dict[str, Any] | None:
        """The next line; None when the child ended, was late or spoke nonsense."""
        while b"\n" not in self._raw and len(self._raw) < self.limit:
            got = self._more()
            if not got:
                return None
            self._raw += got
        line, _, self._raw = self._raw.partition(b"\n")
        self.taken = len(line)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None

    def _more(self) -> bytes:
        """The next bytes; empty when the child ended, or its time is up."""
        pipes = [self.pipe, *([self.printed.pipe] if self.printed else [])]
        while True:
            left = self.deadline - time.monotonic()
            ready = select.select(pipes, [], [], max(0.0, left))[0]
            if self.printed and self.printed.pipe in ready:
                self.printed.drain()
            if self.pipe in ready:
                return os.read(self.pipe, 1 << 16)
            if left <= 0:
                self.late = True
                return b""
