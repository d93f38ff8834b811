"""Stopping a process with SIGSTOP after any of its system calls, by its number: so that nothing it does is left out.

The process is traced (ptrace) up to that call and then let go, stopped as `kill -STOP` stops it: all its threads stand
still until somebody sends SIGCONT. Only the calls of its main thread are counted.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.limits import SOON_S

_SEIZE, _INTERRUPT, _SYSCALL, _DETACH = 0x4206, 0x4207, 24, 17
_TRACESYSGOOD = 1
_WALL = 0x40000000  # also processes that are not our children
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def seize(pid: int) -> None:
    """Begin to trace a process; it stands still."""
    _ptrace(_SEIZE, pid, _TRACESYSGOOD)
    _ptrace(_INTERRUPT, pid)
    os.waitpid(pid, _WALL)


def stop_after(pid: int, calls: int) -> bool:
    """Let a seized process make so many system calls, then stop it and trace it no more; False: it ended before."""
    left = 2 * calls  # each shows twice, when it begins and when it ends
    while left:
        _ptrace(_SYSCALL, pid)
        _, status = os.waitpid(pid, _WALL)
        if not os.WIFSTOPPED(status):
            return False
        left -= os.WSTOPSIG(status) == _SYSCALL_STOP
    os.kill(pid, signal.SIGSTOP)
    _ptrace(_DETACH, pid)
    wait_until_stopped(pid)
    return True


def wait_until_stopped(pid: int, or_else: Callable[[], bool] = lambda: False) -> None:
    """Until a process stands still by SIGSTOP, or something else has come true."""
    deadline = time.monotonic() + SOON_S
    while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
        if or_else():
            return
        assert time.monotonic() < deadline, f"process {pid} is not stopped but {state}"
        time.sleep(0.0005)


def _ptrace(request: int, pid: int, data: int = 0) -> None:
    if _libc.ptrace(request, pid, None, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace({request:#x}): {os.strerror(number)}")
