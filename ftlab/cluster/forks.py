"""How processes of a cluster are forked, so that each one ends when the one above it does.

A forked child keeps only the descriptors it is given. On Linux the kernel kills it when its parent dies (also when it
is stopped and could not notice by itself); elsewhere a closed pipe tells it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def fork(child: Callable[[], int], keep: Iterable[int], *, new_session: bool = False, alone: bool = False) -> int:
    """Fork a child that runs `child()` with only stdio and the descriptors in `keep`; the pid, in the parent.

    Only for single-threaded parents. The child never returns: it exits with what `child` returned. One that is `alone`
    may outlive this process.
    """
    kept = sorted({0, 1, 2, *keep})
    parent = os.getpid()
    gc.freeze()  # shared pages stay shared
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if not alone:
            die_with(parent)
        if new_session:
            os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)  # not SIGPIPE: an error is enough
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _close_others(kept)
        code = child()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def ended_children() -> Iterator[tuple[int, int]]:
    """(pid, wait status) of the children that have ended since the last time."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def describe_exit(status: int) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with code {os.WEXITSTATUS(status)}"


def die_with(parent: int) -> None:
    """In a forked child: end when the parent does, whatever this one is doing then; on Linux."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _close_others(kept: list[int]) -> None:
    limit = max(os.sysconf("SC_OPEN_MAX"), 256) if not os.path.isdir("/proc/self/fd") else \
        max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    for low, high in zip([-1, *kept], [*kept, min(limit, 1 << 16)], strict=True):
        if low + 1 < high:  # an empty range at 0 would close everything
            os.closerange(low + 1, high)
