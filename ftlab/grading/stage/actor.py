"""What runs in the forked children: the only places where the student's parts are unpickled and called.

A child has no terminal and no way to the grader but one pipe, on which it says in JSON lines what came out.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftlab.grading.stage.canonical import digest, short_repr
from ftlab.grading.stage.play import Play

_TRACEBACK_LINES = 12
_MAX_TEXT = 4000
_PR_SET_DUMPABLE = 4


def act_save(functions: Path, folder: Path, say: int, go: int) -> int:
    """Run `prepare`, wait for the tracer, run `save`, tell at once that it returned, let its threads end."""
    _leave_the_terminal()
    prepare, save = (play.perform for play in read_plays(functions))
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
        value = read_plays(functions)[0].perform(folder)
        _say(say, digest=digest(value), text=short_repr(value))
    except BaseException as error:
        _say(say, raised=f"{type(error).__name__}: {error}"[:_MAX_TEXT])
    return 0


def act_play(play: Path, say: int, output: int) -> int:
    """Perform a play and tell the value, or what it raised; what it prints goes to `output`."""
    _leave_the_terminal()
    for number in (1, 2):
        os.dup2(output, number)
    value = _attempt(say, "play", lambda: json.dumps(Play.from_json(play.read_text()).perform()))
    _write(say, f'{{"value": {value}}}\n'.encode())
    return 0


def act_member(told: int, say: int, output: int) -> int:
    """Perform the play that one of a group is told, and nobody else. One that raised ends, as in training, and its
    peers see that. The others stay until they are killed: a peer must not take their end for a failure."""
    _leave_the_terminal()
    for number in (1, 2):
        os.dup2(output, number)
    with os.fdopen(told) as lines:
        play = Play.from_json(lines.readline())
    value = _attempt(say, "play", play.perform)
    _write(say, f'{{"value": {json.dumps(value)}}}\n'.encode())
    while not (isinstance(value, dict) and value.get("raised")):
        signal.pause()
    return 0


def act_telling(play: Path, say: int, output: int) -> int:
    """Perform a play that tells things as it goes: it is called with `tell=`, which sends its arguments at once."""
    me = os.getpid()

    def tell(**facts: Any) -> None:
        if os.getpid() != me:  # a copy that the student's code forked, and that runs on as if it were us
            os._exit(1)
        _say(say, **facts)

    _leave_the_terminal()
    for number in (1, 2):
        os.dup2(output, number)
    _attempt(say, "play", lambda: Play.from_json(play.read_text()).perform(tell=tell))
    return 0


def act_answering(play: Path, say: int, output: int, ask: int) -> int:
    """Perform a play that gives a function, and answer one question after the other with it; a question is seen only
    when the one before is answered."""
    _leave_the_terminal()
    for number in (1, 2):
        os.dup2(output, number)
    answer = _attempt(say, "play", lambda: Play.from_json(play.read_text()).perform())
    _say(say, ready=True)
    with os.fdopen(ask) as questions:
        for line in questions:
            said = _attempt(say, "play", lambda line=line: json.dumps(answer(json.loads(line))))  # type: ignore[misc]
            _write(say, f'{{"value": {said}}}\n'.encode())
    return 0


def read_plays(file: Path) -> list[Play]:
    """The plays in a file, one a line."""
    return [Play.from_json(line) for line in file.read_text().splitlines()]


def _attempt(say: int, what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:
        lines = "".join(traceback.format_exception(error)[-_TRACEBACK_LINES:])
        _say(say, failed=what, raised=f"{type(error).__name__}: {error}"[:_MAX_TEXT], traceback=lines[-_MAX_TEXT:])
        os._exit(1)


def _say(pipe: int, **facts: Any) -> None:
    _write(pipe, (json.dumps(facts) + "\n").encode("utf-8", "replace"))


def _write(pipe: int, raw: bytes) -> None:
    while raw:
        raw = raw[os.write(pipe, raw):]


def _leave_the_terminal() -> None:
    """The descriptors 0 to 2 lead to the grader: student's code must not write replies there.

    The server cannot be looked into by others of the same user, and its children inherit that. The tracer has to look
    into this one; and when memory runs out, this one goes first.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
