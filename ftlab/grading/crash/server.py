"""The process between the grader and the student's code: it forks a child per task, traces it, and cleans up after it.

It imports torch once, so that each of some hundred loads starts in milliseconds. It is single-threaded (forks and
ptrace want that), never unpickles anything itself, and adopts whatever its children leave behind in order to kill it.
Requests and replies are JSON lines on its stdin and stdout; it ends when the grader closes the pipe.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ftlab.cluster.forks import fork
from ftlab.errors import FtlabError, JobError, WaitTimeout
from ftlab.grading.crash import ptrace
from ftlab.grading.crash.actor import act_load, act_save
from ftlab.grading.crash.operations import Recording, read_folder
from ftlab.grading.crash.recorder import Recorder
from ftlab.grading.crash.tracing import follow, sweep

_MAX_REPLY = 1 << 16  # of a child; more than that is not what our own code says


def main() -> None:
    """Answer requests until the grader is gone."""
    ptrace.adopt_orphans()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = _TASKS[request.pop("task")](**request)
        except FtlabError as error:
            reply = {"error": error.to_dict()}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def preload(modules: list[str]) -> dict[str, Any]:
    """Import what every child will need."""
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return {}


def record(functions: str, folder: str, out: str, seconds: float) -> dict[str, Any]:
    """Run `prepare`, then `save` under the tracer; the recording goes to the file `out`."""
    place = Path(os.path.realpath(folder))
    with _pipe() as (wait, go), _child(lambda say: act_save(Path(functions), place, say, wait), (wait,)) as child:
        process, words = child[0], _Words(child[1], time.monotonic() + seconds)
        _expect(words, "prepared", "prepare", seconds)
        nodes: dict[tuple[int, int], int] = {}
        before = read_folder(place, nodes)
        mark = os.fstat(child[1])
        recorder = Recorder(place, nodes, (mark.st_dev, mark.st_ino))
        status = follow(process, recorder, lambda: os.write(go, b"g"), seconds)
        _expect(words, "returned", "save", seconds, status)
    recording = Recording(before, tuple(recorder.operations), read_folder(place, dict(nodes)))
    Path(out).write_text(recording.to_json())
    return {}


def load(functions: str, folder: str, seconds: float) -> dict[str, Any]:
    """Run `load` on a folder: a digest and a repr, or what happened instead."""
    place = Path(os.path.realpath(folder))
    with _child(lambda say: act_load(Path(functions), place, say)) as (process, said):
        words = _Words(said, time.monotonic() + seconds)
        answer = words.next()
        if answer:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)  # it has said all, and ends quicker this way
            os.waitpid(process, 0)
            return {name: answer[name] for name in ("digest", "text", "raised") if name in answer}
        if words.late:
            return {"raised": f"load did not end within {seconds:g} s"}
        return {"raised": f"load ended its process ({_how(os.waitpid(process, 0)[1])})"}


_TASKS: dict[str, Callable[..., dict[str, Any]]] = {"preload": preload, "record": record, "load": load}


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


@contextlib.contextmanager
def _child(act: Callable[[int], int], keep: tuple[int, ...] = ()) -> Iterator[tuple[int, int]]:
    """A forked child and the pipe on which it speaks; at the end nothing of it is left."""
    said, say = os.pipe()
    try:
        process = fork(lambda: act(say), keep=(say, *keep), new_session=True)
        os.close(say)
        yield process, said
    finally:
        sweep()
        os.close(said)


class _Words:
    """The JSON lines that a child says, with a deadline."""

    def __init__(self, pipe: int, deadline: float) -> None:
        self.pipe, self.deadline, self.late = pipe, deadline, False
        self._raw = b""

    def next(self) -> dict[str, Any] | None:
        """The next line; None when the child ended, was late or spoke nonsense."""
        while b"\n" not in self._raw and len(self._raw) < _MAX_REPLY:
            left = max(0.0, self.deadline - time.monotonic())
            if not select.select([self.pipe], [], [], left)[0]:
                self.late = True
                return None
            got = os.read(self.pipe, _MAX_REPLY)
            if not got:
                return None
            self._raw += got
        line, _, self._raw = self._raw.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            return None
        return answer if isinstance(answer, dict) else None


def _expect(words: _Words, word: str, function: str, seconds: float, status: int | None = None) -> None:
    """Read the next line of a child that runs student's functions; raise unless it is the expected word."""
    answer = words.next()
    if answer and word in answer:
        return
    if answer and "raised" in answer:
        raise JobError(f"{function} raised {answer['raised']}", seen=str(answer.get("traceback", "")).strip(),
                       function=function)
    if words.late and status is None:
        raise WaitTimeout(f"{function} did not return within {seconds:g} s")
    raise JobError(f"{function} ended its process" + (f" ({_how(status)})" if status is not None else ""),
                   function=function, hint="it must return: os._exit and signals to oneself end the check too")


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit status {code}" if code >= 0 else f"signal {-code}"
