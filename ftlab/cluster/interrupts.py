"""Ctrl-C, or a notebook's stop button, in the middle of something that must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ftlab.errors import WaitInterrupted


@contextmanager
def deferred() -> Iterator[None]:
    """Let an interrupt wait for the end of the block. Only the main thread is ever interrupted; others just go on."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    arrived: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if arrived:  # also when the block failed: whoever pressed the button is not forgotten
            before(*arrived[0])


@contextmanager
def told(message: str, hint: str = "") -> Iterator[None]:
    """Have an interrupt of the block end in a line that tells what became of it, not in a traceback through ftlab."""
    try:
        yield
    except WaitInterrupted:
        raise
    except KeyboardInterrupt:
        raise WaitInterrupted(message, hint=hint) from None
