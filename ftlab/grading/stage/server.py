"""The process between the grader and the student's code: it forks a child per task, traces it, and cleans up after it.

It imports torch once, so that each of some hundred loads starts in milliseconds. It is single-threaded (forks and
ptrace want that), never unpickles anything itself, and adopts whatever its children leave behind in order to kill it.
Requests and replies are JSON lines on its stdin and stdout; it ends when the grader closes the pipe. In a sandbox it
is the first process (signals from inside do not reach it), and nobody of the same user can look into it or its pipes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ftlab.cluster.forks import fork
from ftlab.errors import FtlabError, JobError, WaitTimeout
from ftlab.grading.crash import ptrace
from ftlab.grading.crash.operations import Recording, read_folder
from ftlab.grading.crash.recorder import Recorder
from ftlab.grading.crash.tracing import follow, sweep
from ftlab.grading.stage.actor import act_load, act_play, act_save, act_telling
from ftlab.grading.stage.words import Printed, Words

_MAX_TOLD = 64 << 20  # bytes that a play may tell in all
_MAX_TOLD_LINE = 32 << 20
_PR_SET_DUMPABLE = 4
_wiped: list[str] = []  # folders of the sandbox's own that are emptied after every child


def main() -> None:
    """Answer requests until the grader is gone."""
    ptrace.adopt_orphans()
    _protect_itself()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = _TASKS[request.pop("task")](**request)
        except FtlabError as error:
            reply = {"error": error.to_dict()}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def preload(modules: list[str], wiped: list[str] | None = None) -> dict[str, Any]:
    """Import what every child will need, and note which folders are emptied after each."""
    _wiped[:] = _wiped if wiped is None else wiped
    gc.disable()  # imports make no garbage, and collecting none takes a quarter of their time
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.enable()
    return {}


def record(functions: str, folder: str, out: str, seconds: float) -> dict[str, Any]:
    """Run `prepare`, then `save` under the tracer; the recording goes to the file `out`."""
    place = Path(os.path.realpath(folder))
    with _pipe() as (wait, go), _child(lambda say: act_save(Path(functions), place, say, wait), (wait,)) as child:
        process, words = child[0], Words(child[1], time.monotonic() + seconds)
        _expect(words, "prepared", "prepare", seconds)
        nodes: dict[tuple[int, int], int] = {}
        before = read_folder(place, nodes)
        mark = os.fstat(child[1])
        recorder = Recorder(place, nodes, (mark.st_dev, mark.st_ino))
        status = follow(process, recorder, lambda: os.write(go, b"g"), seconds)
        _expect(words, "returned", "save", seconds, status)
    recording = Recording(before, tuple(recorder.operations), read_folder(place, dict(nodes)))
    clear(Path(out))
    with os.fdopen(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w") as file:
        file.write(recording.to_json())
    return {}


def load(functions: str, folder: str, seconds: float) -> dict[str, Any]:
    """Run `load` on a folder: a digest and a repr, or what happened instead."""
    place = Path(os.path.realpath(folder))
    with _child(lambda say: act_load(Path(functions), place, say)) as (process, said):
        words = Words(said, time.monotonic() + seconds)
        answer = words.next()
        if answer:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)  # it has said all, and ends quicker this way
            os.waitpid(process, 0)
            return {name: answer[name] for name in ("digest", "text", "raised") if name in answer}
        end = {} if words.late else _end_of(process, words.deadline)
        return {"raised": f"load ended its process ({end['ended']})" if "ended" in end else
                          f"load did not end within {seconds:g} s"}


def run(play: str, seconds: float) -> dict[str, Any]:
    """Perform a play: its value or what happened instead, with what was printed and the time it took."""
    begin = time.monotonic()
    with _pipe() as (printed, output), _child(lambda say: act_play(Path(play), say, output), (output,)) as child:
        heard = Printed(printed)
        words = Words(child[1], begin + seconds, heard)
        reply = words.next()
        if reply is None:
            reply = {"late": True} if words.late else _end_of(child[0], words.deadline)
        heard.drain()
        return {**reply, "output": heard.text(), "seconds": time.monotonic() - begin}


def tell(play: str, seconds: float, each_s: float) -> dict[str, Any]:
    """Perform a play that tells as it goes: all that it told until it ended, was silent for too long, or was late."""
    begin, told, size = time.monotonic(), list[dict[str, Any]](), 0
    with _pipe() as (printed, output), _child(lambda say: act_telling(Path(play), say, output), (output,)) as child:
        heard = Printed(printed)
        words = Words(child[1], begin + min(seconds, each_s), heard, _MAX_TOLD_LINE)
        while (line := words.next()) is not None and size < _MAX_TOLD:
            told.append(line)
            size += words.taken
            words.deadline = min(begin + seconds, time.monotonic() + each_s)
        heard.drain()
        end = {"late": True} if words.late else _end_of(child[0], words.deadline)
        return {**end, "told": told, "output": heard.text(), "seconds": time.monotonic() - begin}


_TASKS: dict[str, Callable[..., dict[str, Any]]] = {"preload": preload, "run": run, "tell": tell, "record": record,
                                                     "load": load}


def clear(path: Path, device: int | None = None) -> None:
    """Remove whatever is at a path, as far as it is ours to remove; mounts below it stay as they are."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        if device is not None and found.st_dev != device:
            return
        if not stat.S_ISDIR(found.st_mode):
            path.unlink()
            return
        path.chmod(0o700)
        for each in path.iterdir():
            clear(each, found.st_dev)
        path.rmdir()


def _protect_itself() -> None:
    """Children run as the same user: they must not reach this process, its memory or its pipes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


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
        for folder in _wiped:
            for each in Path(folder).iterdir():
                with contextlib.suppress(RecursionError):
                    clear(each, Path(folder).stat().st_dev)


def _expect(words: Words, word: str, function: str, seconds: float, status: int | None = None) -> None:
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


def _end_of(process: int, deadline: float) -> dict[str, Any]:
    """How a child ended that says nothing more; one that only closed its pipe has until the deadline."""
    while time.monotonic() < deadline:
        pid, status = os.waitpid(process, os.WNOHANG)
        if pid:
            return {"ended": _how(status)}
        time.sleep(0.005)
    return {"late": True}


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit status {code}" if code >= 0 else f"signal {-code}"
