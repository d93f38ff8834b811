"""The process between the grader and the student's code: it forks a child per task, traces it, and cleans up after it.

It imports torch once, so that each of some hundred loads starts in milliseconds. It is single-threaded (forks and
ptrace want that), never unpickles anything itself, and adopts whatever its children leave behind in order to kill it.
Requests and replies are JSON lines on its stdin and stdout, each reply with the number of its request. When the grader
closes the pipe or is gone, it ends at once, also in the middle of a task, with all that it has started. In a sandbox it
is the first process (signals from inside do not reach it), and nobody of the same user can look into it or its pipes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from ftlab.cluster import syscall_filter, temporary
from ftlab.cluster.forks import fork
from ftlab.errors import FtlabError, JobError, WaitTimeout
from ftlab.grading.crash import ptrace
from ftlab.grading.crash.operations import Recording, read_folder
from ftlab.grading.crash.recorder import Recorder
from ftlab.grading.crash.tracing import follow, sweep
from ftlab.grading.stage.actor import act_answering, act_load, act_member, act_play, act_save, act_telling
from ftlab.grading.stage.words import Printed, Words

_MAX_TOLD = 64 << 20  # bytes that a play may tell in all
_MAX_TOLD_LINE = 32 << 20
_PR_SET_DUMPABLE = 4
_LOOK_S = 0.1  # how often a task looks whether its grader is still there
_GONE_S = 0.05  # for a grader that was killed to be gone, after its pipe was closed
_home: list[Path] = []  # the folder of this stage, if we may remove it
_tell_grader: list[Callable[[dict[str, Any]], None]] = []  # while a task runs
_wiped: list[str] = []  # folders that are emptied after every child
_talk: list[_Talk] = []  # the child that answers questions now
_members: list[tuple[int, tuple[int, int]]] = []  # of a group: the pipe to each, and the child
_end_members: list[Callable[[], None]] = []


def main() -> None:
    """Answer requests until the grader is gone."""
    ptrace.adopt_orphans()
    _protect_itself()
    with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # what a module prints when it is imported is no reply
        for line in sys.stdin:
            request = json.loads(line)
            number = request.pop("id")
            _tell_grader[:] = [partial(_send, replies, number)]
            try:
                with _grader_watched():
                    _end_talk(request["task"])
                    reply = {"id": number, "value": _TASKS[request.pop("task")](**request)}
            except FtlabError as error:
                reply = {"id": number, "error": error.to_dict()}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    _end()


def _send(replies: IO[str], number: int, told: dict[str, Any]) -> None:
    """Tell the grader something before the reply: it has it, whatever becomes of this sandbox."""
    replies.write(json.dumps({"id": number, "told": told}) + "\n")
    replies.flush()


@contextlib.contextmanager
def _grader_watched() -> Iterator[None]:
    """End when the grader has closed the pipe, also in the middle of a task. No thread does this, since we fork."""
    signal.signal(signal.SIGALRM, _end_without_grader)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _end_without_grader(*_: Any) -> None:
    pipe = select.poll()
    pipe.register(0, 0)
    if any(event & (select.POLLHUP | select.POLLERR) for _, event in pipe.poll(0)):
        signal.setitimer(signal.ITIMER_REAL, 0)
        _end()


def _end() -> NoReturn:
    """Leave nobody behind; nor the folder, where its owner was killed and cannot remove it."""
    try:
        sweep()
        deadline = time.monotonic() + _GONE_S
        for folder in _home:
            while temporary.in_use(folder) and time.monotonic() < deadline:
                time.sleep(0.005)
            temporary.remove_abandoned(folder)
    finally:
        os._exit(0)


def begin(wiped: list[str], home: str = "") -> dict[str, Any]:
    """Note which folders are emptied after each child, and which one goes when its owner is gone; a sandbox, which has
    none such, does without some system calls from now on."""
    if not home:
        syscall_filter.install()
    _wiped[:], _home[:] = wiped, [Path(home)] if home else []
    return {}


def preload(modules: list[str]) -> dict[str, Any]:
    """Import what every child will need."""
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
        recorder = Recorder(place, nodes, (mark.st_dev, mark.st_ino), before)
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


def gather(count: int) -> dict[str, Any]:
    """Fork the children of a group, before this process knows what any of them will be told."""
    with contextlib.ExitStack() as stack:
        null = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, null)
        for _ in range(count):
            asked, ask = stack.enter_context(_pipe())
            child = stack.enter_context(_child(lambda say, asked=asked: act_member(asked, say, null),  # type: ignore[misc]
                                               (null, asked)))
            _members.append((ask, child))
        _end_members.append(stack.pop_all().close)
    return {}


def group(plays: list[str], seconds: float, lost: int) -> dict[str, Any]:
    """Tell each member its play, and hear what each says, in their order. `lost` is not waited for."""
    begin = time.monotonic()
    for text, (pipe, _) in zip(plays, _members, strict=True):
        raw = text.encode() + b"\n"
        while raw:
            raw = raw[os.write(pipe, raw):]
    said = [{"ended": "as planned"} if number == lost else _reply(child, begin + seconds)
            for number, (_, child) in enumerate(_members)]
    return {"said": [{**each, "seconds": time.monotonic() - begin} for each in said]}


def _reply(child: tuple[int, int], deadline: float) -> dict[str, Any]:
    words = Words(child[1], deadline)
    reply = words.next()
    if reply is not None:
        return reply
    return {"late": True} if words.late else _end_of(child[0], deadline)


def tell(play: str, seconds: float, each_s: float) -> dict[str, Any]:
    """Perform a play that tells as it goes, and pass it on, until it ends, is silent for too long, or late."""
    begin, size = time.monotonic(), 0
    with _pipe() as (printed, output), _child(lambda say: act_telling(Path(play), say, output), (output,)) as child:
        heard = Printed(printed)
        words = Words(child[1], begin + min(seconds, each_s), heard, _MAX_TOLD_LINE)
        while (line := words.next()) is not None and size < _MAX_TOLD:
            _tell_grader[0](line)
            size += words.taken
            words.deadline = min(begin + seconds, time.monotonic() + each_s)
        heard.drain()
        end = {"late": True} if words.late else _end_of(child[0], words.deadline)
        return {**end, "output": heard.text(), "seconds": time.monotonic() - begin}


class _Talk:
    """A child that answers questions, one at a time; what it has printed; when its time is up."""

    def __init__(self, play: str, seconds: float) -> None:
        self.begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            printed, output = stack.enter_context(_pipe())
            asked, ask = stack.enter_context(_pipe())
            self.process, said = stack.enter_context(
                _child(lambda say: act_answering(Path(play), say, output, asked), (output, asked)))
            self.ask, self.heard = ask, Printed(printed)
            self.words = Words(said, self.begin + seconds, self.heard)
            self.end = stack.pop_all().close

    def next(self) -> dict[str, Any]:
        """What it says next, or how it ended."""
        reply = self.words.next()
        if reply is None:
            reply = {"late": True} if self.words.late else _end_of(self.process, self.words.deadline)
        self.heard.drain()
        return {**reply, "output": self.heard.text(), "seconds": time.monotonic() - self.begin}


def talk(play: str, seconds: float) -> dict[str, Any]:
    """Begin a play that answers questions: {"ready"}, or how it ended. It lasts until another task but `ask`."""
    _talk.append(_Talk(play, seconds))
    return _talk[-1].next()


def ask(question: str) -> dict[str, Any]:
    """The answer to one question, a line of JSON."""
    if not _talk:
        return {"ended": "it was not asked any more"}
    with contextlib.suppress(BrokenPipeError):  # it is gone: `next` says how
        raw = question.encode() + b"\n"
        while raw:
            raw = raw[os.write(_talk[-1].ask, raw):]
    return _talk[-1].next()


def hush() -> dict[str, Any]:
    """End the play that answers questions."""
    return {}


def _end_talk(task: str) -> None:
    """End children that outlive a task, unless this one is about them."""
    while _talk and task != "ask":
        _talk.pop().end()
    while _end_members and task != "group":
        _members.clear()
        _end_members.pop()()


_TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "begin": begin, "preload": preload, "run": run, "tell": tell, "gather": gather, "group": group, "talk": talk,
    "ask": ask, "hush": hush, "record": record, "load": load}


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
