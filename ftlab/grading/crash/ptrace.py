"""The few ptrace requests a recorder needs, through ctypes: no strace program, no compiler, no root.

A process is *seized* thread by thread; from then on it stops at the entry and at the exit of every system call until
`resume`. Everything it starts is seized by the kernel at birth, and everything dies with the tracer. All requests must
come from the thread that seized, so a tracer is single-threaded.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
import sys
from dataclasses import dataclass

from ftlab.errors import FaultUnavailable

WALL = 0x40000000  # waitpid: threads too
SYSCALL_STOP = signal.SIGTRAP | 0x80

_SEIZE, _INTERRUPT, _SYSCALL, _GET_SYSCALL_INFO = 0x4206, 0x4207, 24, 0x420E
_SYSGOOD, _FORK, _VFORK, _CLONE, _EXITKILL = 0x1, 0x2, 0x4, 0x8, 0x100000
_OPTIONS = _SYSGOOD | _FORK | _VFORK | _CLONE | _EXITKILL
_INFO_BYTES = 88  # struct ptrace_syscall_info
_ENTRY, _EXIT = 1, 2
_PR_SET_CHILD_SUBREAPER = 36
ARCHITECTURES = {0xC000003E: "x86_64", 0xC00000B7: "aarch64"}  # AUDIT_ARCH_* -> platform.machine()

_HINT = "run it on Linux (x86_64 or aarch64); in a container, start that with --cap-add SYS_PTRACE"


@dataclass(frozen=True)
class Stop:
    """A thread stopped at a system call: at its entry with number and arguments, or at its exit with the result."""

    entry: bool
    machine: str  # "" for a foreign one, as 32-bit code on a 64-bit machine
    number: int = -1
    args: tuple[int, ...] = ()
    result: int = 0


def check_machine() -> None:
    """Raise FaultUnavailable where system calls cannot be traced at all."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES.values():
        raise FaultUnavailable(f"crash points need ptrace, which {platform.system()} on {platform.machine()} "
                               "does not offer in the way we use it", hint=_HINT)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can slip away; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def seize(thread: int) -> None:
    """Begin to trace a running thread and ask it to stop; raises FaultUnavailable where that is forbidden."""
    for request, data in ((_SEIZE, _OPTIONS), (_INTERRUPT, 0)):
        try:
            _ptrace(request, thread, 0, data)
        except ProcessLookupError:
            return
        except OSError as error:
            raise FaultUnavailable(f"this machine does not let us trace our own child: {error.strerror}",
                                   seen=f"ptrace request {request:#x}: {errno.errorcode.get(error.errno or 0, '?')}",
                                   hint=_HINT) from None


def resume(thread: int, deliver: int = 0) -> None:
    """Let a stopped thread run to its next system call, with a signal if it was about to get one."""
    try:
        _ptrace(_SYSCALL, thread, 0, deliver)
    except ProcessLookupError:  # killed meanwhile; waitpid will say so
        pass


def syscall_stop(thread: int) -> Stop | None:
    """Where a thread stopped; None when it is gone. The layout is the same on every architecture."""
    raw = ctypes.create_string_buffer(_INFO_BYTES)
    try:
        _ptrace(_GET_SYSCALL_INFO, thread, _INFO_BYTES, ctypes.addressof(raw))
    except ProcessLookupError:
        return None
    except OSError as error:
        raise FaultUnavailable(f"PTRACE_GET_SYSCALL_INFO: {error.strerror}", hint=_HINT) from None
    kind, arch = struct.unpack_from("=B3xI", raw)
    machine = ARCHITECTURES.get(arch, "")
    if kind == _ENTRY:
        number, *args = struct.unpack_from("=7Q", raw, 24)
        return Stop(True, machine, number, tuple(args))
    return Stop(False, machine, result=struct.unpack_from("=q", raw, 24)[0]) if kind == _EXIT else None


def _ptrace(request: int, thread: int, address: int, data: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    got: int = libc.ptrace(request, thread, address, data)
    if got < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return got
