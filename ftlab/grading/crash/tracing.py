"""The tracer's loop: seize a process with all its threads and descendants, and follow each to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from ftlab.errors import FaultError, WaitTimeout
from ftlab.grading.crash import ptrace
from ftlab.grading.crash.recorder import Handler, Recorder
from ftlab.grading.crash.syscalls import read_call

LINGER_S = 2.0  # so long may what a process left running go on after its end
_TICK_S = 0.2  # how often the clock is looked at while nothing happens


def follow(process: int, recorder: Recorder, go: Callable[[], object], seconds: float) -> int:
    """Trace a process that waits for `go`, until it and all it started have ended; its wait status.

    Raises WaitTimeout when that takes too long. Whatever happens, the caller has to `sweep`.
    """
    following = _Following(process, recorder, seconds)
    with _child_signals_held():
        while following.seize_new_threads():
            following.run_until(lambda: not following.unstopped)
        go()
        following.run_until(lambda: False)
    return following.status


def sweep(seconds: float = 60.0) -> None:
    """Kill every descendant of this process and wait until none is left."""
    deadline = time.monotonic() + seconds
    while _anybody_left():
        if os.getpid() == 1:  # all that a sandbox holds; the kernel kills them in one go, however fast they fork
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        if time.monotonic() > deadline:
            raise WaitTimeout(f"processes of a save or load are still there {seconds:g} s after they were killed",
                              seen=str(psutil.Process().children(recursive=True)))
        time.sleep(0.001)


def _anybody_left() -> bool:
    """Take in the children that have ended; whether there are others."""
    try:
        while os.waitpid(-1, ptrace.WALL | os.WNOHANG)[0]:
            pass
        return True
    except ChildProcessError:
        return False


class _Following:
    """The threads being traced, and the system call each of them is in."""

    def __init__(self, process: int, recorder: Recorder, seconds: float) -> None:
        self.process, self.recorder, self.seconds = process, recorder, seconds
        self.deadline = time.monotonic() + seconds
        self.status, self.ended = 0, False
        self.unstopped: set[int] = set()  # seized, but not yet seen to stop
        self._seized: set[int] = set()
        self._inside: dict[int, Handler | None] = {}

    def seize_new_threads(self) -> bool:
        """Seize the threads of the process and its descendants that are not yet; whether there were any."""
        fresh = [thread for thread in _threads_below(self.process) if thread not in self._seized]
        for thread in fresh:
            ptrace.seize(thread)
        self._seized.update(fresh)
        self.unstopped.update(fresh)
        return bool(fresh)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Let everybody run, and record, until `done` or until nobody is left."""
        while not done():
            try:
                thread, status = os.waitpid(-1, ptrace.WALL | os.WNOHANG)
            except ChildProcessError:
                return
            if thread:
                self._handle(thread, status)
            else:
                signal.sigtimedwait([signal.SIGCHLD], _TICK_S)
            if time.monotonic() > self.deadline:
                self._give_up()

    def _handle(self, thread: int, status: int) -> None:
        if not os.WIFSTOPPED(status):
            self._inside.pop(thread, None)
            self.unstopped.discard(thread)
            if thread == self.process:
                self.status, self.ended = status, True
                self.deadline = min(self.deadline, time.monotonic() + LINGER_S)
            return
        code, event = os.WSTOPSIG(status), status >> 16
        self.unstopped.discard(thread)
        if code == ptrace.SYSCALL_STOP:
            self._at_syscall(thread)
        ptrace.resume(thread, 0 if event or code == ptrace.SYSCALL_STOP else code)

    def _at_syscall(self, thread: int) -> None:
        stop = ptrace.syscall_stop(thread)
        if stop is None:
            return
        if stop.entry:
            if not stop.machine:
                raise FaultError("save runs code of another architecture, which cannot be followed")
            call = read_call(stop.machine, stop.number, stop.args)
            self._inside[thread] = self.recorder.enter(thread, call) if call else None
        else:
            handler = self._inside.pop(thread, None)
            if handler is not None:
                self.recorder.leave(handler, stop.result)

    def _give_up(self) -> None:
        if self.ended:  # a process it left behind: no part of the save
            sweep()
            return
        done = self.recorder.operations
        raise WaitTimeout(f"save did not return within {self.seconds:g} s", operations=len(done),
                          seen=f"{len(done)} operations on the folder" + (f", the last: {done[-1]}" if done else ""),
                          hint="does it wait for a thread, a lock or a process that never answers?")


def _threads_below(process: int) -> list[int]:
    found = []
    with contextlib.suppress(psutil.Error):
        family = [process, *(child.pid for child in psutil.Process(process).children(recursive=True))]
        for each in family:
            with contextlib.suppress(OSError):
                found += [int(task.name) for task in Path(f"/proc/{each}/task").iterdir()]
    return found


@contextlib.contextmanager
def _child_signals_held() -> Iterator[None]:
    """Keep SIGCHLD pending, so that waiting for a child can have an end and misses nobody."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
