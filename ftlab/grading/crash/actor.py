"""What runs in the forked children: the only places where the student's functions are unpickled and called.

A child has no terminal and no way to the grader but one pipe, on which it says in JSON lines what came out.
"""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from ftlab.grading.crash.canonical import digest, short_repr

_TRACEBACK_LINES = 12
_MAX_TEXT = 4000


def act_save(functions: Path, folder: Path, say: int, go: int) -> int:
    """Run `prepare`, wait for the tracer, run `save`, tell at once that it returned, let its threads end."""
    _leave_the_terminal()
    prepare, save, _ = _attempt(say, "was read", lambda: cloudpickle.loads(functions.read_bytes()))
    _attempt(say, "prepare", lambda: prepare(folder))
    _say(say, prepared=True)
    os.read(go, 1)
    _attempt(say, "save", lambda: save(folder))
    _say(say, returned=True)  # the tracer sees this very write, and so knows the moment
    threading._shutdown()  # type: ignore[attr-defined]  # what a normal end would do: pools finish, threads are joined
    return 0


def act_load(functions: Path, folder: Path, say: int) -> int:
    """Run `load` on a folder and tell the digest of what it gave, or what it raised."""
    _leave_the_terminal()
    try:
        value = cloudpickle.loads(functions.read_bytes())[2](folder)
        _say(say, digest=digest(value), text=short_repr(value))
    except BaseException as error:
        _say(say, raised=f"{type(error).__name__}: {error}"[:_MAX_TEXT])
    return 0


def _attempt(say: int, what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:
        lines = "".join(traceback.format_exception(error)[-_TRACEBACK_LINES:])
        _say(say, failed=what, raised=f"{type(error).__name__}: {error}"[:_MAX_TEXT], traceback=lines[-_MAX_TEXT:])
        os._exit(1)


def _say(pipe: int, **facts: Any) -> None:
    os.write(pipe, (json.dumps(facts) + "\n").encode("utf-8", "replace"))


def _leave_the_terminal() -> None:
    """The descriptors 0 to 2 lead to the grader: student's code must not write replies there."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
