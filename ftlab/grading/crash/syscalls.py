"""System calls that change a folder, by number, and the older spellings rewritten as the newer ones.

`open(path)` is `openat(AT_FDCWD, path)`, `rename(a, b)` is `renameat2(AT_FDCWD, a, AT_FDCWD, b, 0)`, and so on, so that
the recorder knows one form of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_CWD = (1 << 64) - 100  # AT_FDCWD, as it stands in a register
_REMOVEDIR = 0x200
_O_CREAT_WRONLY_TRUNC = 0o1101

_X86_64 = {
    1: "write", 2: "open", 9: "mmap", 16: "ioctl", 18: "pwrite64", 20: "writev", 40: "sendfile", 74: "fsync",
    75: "fdatasync", 76: "truncate", 77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link",
    87: "unlink", 88: "symlink", 133: "mknod", 162: "sync", 257: "openat", 258: "mkdirat", 259: "mknodat",
    263: "unlinkat", 264: "renameat", 265: "linkat", 266: "symlinkat", 275: "splice", 285: "fallocate", 296: "pwritev",
    306: "syncfs", 316: "renameat2", 326: "copy_file_range", 328: "pwritev2", 425: "io_uring_setup",
    426: "io_uring_enter", 437: "openat2",
}
_AARCH64 = {
    29: "ioctl", 33: "mknodat", 34: "mkdirat", 35: "unlinkat", 36: "symlinkat", 37: "linkat", 38: "renameat",
    45: "truncate", 46: "ftruncate", 47: "fallocate", 56: "openat", 64: "write", 66: "writev", 68: "pwrite64",
    70: "pwritev", 71: "sendfile", 76: "splice", 81: "sync", 82: "fsync", 83: "fdatasync", 222: "mmap", 267: "syncfs",
    276: "renameat2", 285: "copy_file_range", 287: "pwritev2", 425: "io_uring_setup", 426: "io_uring_enter",
    437: "openat2",
}
NAMES = {"x86_64": _X86_64, "aarch64": _AARCH64}

Args = tuple[int, ...]
_MODERN: dict[str, Callable[[Args], tuple[str, Args]]] = {
    "open": lambda a: ("openat", (_CWD, *a)),
    "creat": lambda a: ("openat", (_CWD, a[0], _O_CREAT_WRONLY_TRUNC, a[1])),
    "rename": lambda a: ("renameat2", (_CWD, a[0], _CWD, a[1], 0)),
    "renameat": lambda a: ("renameat2", (*a[:4], 0)),
    "link": lambda a: ("linkat", (_CWD, a[0], _CWD, a[1], 0)),
    "symlink": lambda a: ("symlinkat", (a[0], _CWD, a[1])),
    "unlink": lambda a: ("unlinkat", (_CWD, a[0], 0)),
    "rmdir": lambda a: ("unlinkat", (_CWD, a[0], _REMOVEDIR)),
    "mkdir": lambda a: ("mkdirat", (_CWD, *a)),
    "mknod": lambda a: ("mknodat", (_CWD, *a)),
    "fdatasync": lambda a: ("fsync", a),
    "syncfs": lambda a: ("sync", a),
}


@dataclass(frozen=True)
class Call:
    """A system call by name, as a thread made it."""

    name: str
    args: Args


def read_call(machine: str, number: int, args: Args) -> Call | None:
    """The call behind a number, in its newer spelling; None when it cannot change a folder."""
    name = NAMES[machine].get(number)
    if name is None:
        return None
    return Call(*_MODERN[name](args)) if name in _MODERN else Call(name, args)
