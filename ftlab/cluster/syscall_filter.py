"""System calls that untrusted code does without, whatever sandbox it is in: a filter that this process puts on itself.

`fallocate` takes gigabytes of the disk in a millisecond, long before anybody looks at how much there is (who writes the
bytes is slow enough to be stopped; the C library's `posix_fallocate` writes them then). Keyrings belong to a user and
not to any namespace, so two submissions could leave notes for each other. `io_uring` is a second way to the first.
They fail as if this kernel did not have them. The filter is inherited, and cannot be taken off.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys

_SET_NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of the kernel's filter language
_NUMBER, _MACHINE = 0, 4  # where a call's number and machine stand in what a filter is given
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_X32 = 0x40000000  # calls of the x32 kind have numbers of their own from here on
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {  # name -> its number on x86_64 and aarch64, and the error it gives
    "fallocate": (285, 47, errno.EOPNOTSUPP),
    "add_key": (248, 217, errno.ENOSYS),
    "request_key": (249, 218, errno.ENOSYS),
    "keyctl": (250, 219, errno.ENOSYS),
    "io_uring_setup": (425, 425, errno.ENOSYS),
}


def install() -> bool:
    """Put the filter on this process and all it will start; False where the kernel has no such thing."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _MACHINES:
        return False
    raw = program(machine)
    code = ctypes.create_string_buffer(raw, len(raw))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(raw) // 8, ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return not libc.prctl(_SET_SECCOMP, _MODE_FILTER, header, 0, 0)


def program(machine: str) -> bytes:
    """The filter, in the kernel's instructions: each says how far to jump if it holds, and if not."""
    steps = [_step(_LOAD, _MACHINE), _step(_EQUAL, _MACHINES[machine], 1, 0), _step(_RETURN, _FAIL | errno.ENOSYS),
             _step(_LOAD, _NUMBER), _step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _FAIL | errno.ENOSYS)]
    for intel, arm, error in CALLS.values():
        steps += [_step(_EQUAL, intel if machine == "x86_64" else arm, 0, 1), _step(_RETURN, _FAIL | error)]
    return b"".join([*steps, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_so, if_not, value)
