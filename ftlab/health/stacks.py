"""Where is a stalled worker? Its stacks, taken from another process even while it hangs in C code with the GIL.

Before it hangs, the worker lets `faulthandler` answer a signal: a handler in C, which needs no GIL, writes the stacks
of all threads to a file without a name (`StackFile`). Whoever watches holds the same file, sends the signal and reads.

Where it stops: a stopped process, or one that sits in the kernel without taking signals (a dead file server), writes
nothing until it goes on. The stacks are read while the threads run, so a thread that is not stuck may show a frame it
has just left. The dump has at most 100 threads and 100 frames each, the newest first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import linecache
import os
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

from ftlab.health.kernel import read

_QUIET_S = 0.004  # a dump that has not grown for so long is over
_POLL_S = 0.001
_LONGEST = 60  # characters of a source line
_HEAD = re.compile(r"(?P<current>Current thread|Thread) (?P<ident>0x[0-9a-f]+).* \(most recent call first\):")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_ESCAPED = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_CUT_OFF = "..."  # faulthandler's last line when there are more threads
_OURS = str(Path(__file__).parents[1]) + os.sep
_PRACTICE = str(Path(__file__).parents[1] / "train" / "example.py")  # a train function that happens to live in ftlab
_STANDARD = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_CELL = re.compile(r"<ipython-input|[/\\]ipykernel_\d+[/\\]")


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One call on a stack."""

    file: str
    line: int  # 0 where it is not known
    function: str


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One thread's stack, innermost call first."""

    ident: int
    main: bool  # the main thread, which is the one that trains
    frames: tuple[Frame, ...]


class StackFile:
    """A file without a name that a worker's stacks are written to; made before the fork, or handed over like a pipe."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            self.fd = os.memfd_create("ftlab-stacks")
        else:
            with tempfile.TemporaryFile(prefix="ftlab-stacks-", buffering=0) as file:
                self.fd = os.dup(file.fileno())
        # the worker appends, so that it begins at the front again after the reader emptied the file
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_APPEND)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def arm(self, number: int) -> None:
        """In the worker: from now on this signal writes the stacks, and does nothing else."""
        arm(self.fd, number)

    def close(self) -> None:
        """Let go of the file; the other process's copy stays good."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def arm(fd: int, number: int) -> None:
    """`StackFile.arm` for a worker that was handed the file's descriptor."""
    faulthandler.register(number, file=fd, all_threads=True, chain=False)


def capture(pid: int, fd: int, number: int, timeout_s: float = 0.1) -> str:
    """The stacks of another process that armed this file with this signal; "" when it is gone or does not answer.

    A dump that is not over after `timeout_s` is returned as far as it came. One caller at a time.
    """
    if not _takes(pid, number):
        return ""
    deadline = time.monotonic() + timeout_s
    os.ftruncate(fd, 0)
    before = _blocking(pid, number)
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return ""
    length, grown = 0, time.monotonic()
    while (now := time.monotonic()) < deadline:
        if (size := os.fstat(fd).st_size) != length:
            length, grown = size, now
        elif length and now - grown > _QUIET_S and not _blocking(pid, number) - before:
            break
        time.sleep(_POLL_S)
    return os.pread(fd, os.fstat(fd).st_size, 0).decode("utf-8", "replace")


def stacks_of_this_process() -> str:
    """The stacks of all threads of this process, in the form of `capture`; for a watchdog thread."""
    with StackFile() as file:
        faulthandler.dump_traceback(file=file.fd, all_threads=True)
        return os.pread(file.fd, os.fstat(file.fd).st_size, 0).decode("utf-8", "replace")


def parse(text: str) -> list[Thread]:
    """The threads of a dump, in its order. The interpreter lists the oldest thread last: that is the main thread."""
    lines = text.splitlines()
    heads = [number for number, line in enumerate(lines) if _HEAD.match(line)]
    complete = _CUT_OFF not in lines  # else the oldest threads are missing, and the main thread with them
    threads = []
    for begin, end in pairwise([*heads, len(lines)]):
        head = _HEAD.match(lines[begin])
        assert head is not None
        frames = tuple(_frame(match) for line in lines[begin + 1:end] if (match := _FRAME.match(line)))
        threads.append(Thread(ident=int(head["ident"], 16), main=complete and begin == heads[-1], frames=frames))
    return threads


def describe(frames: Sequence[Frame], since_s: float, source: Callable[[str, int], str] | None = None) -> str:
    """Where a thread is, in words for the user: in ``in `next(loader)` (train.py:12, train) since 3.1 s``.

    It names the innermost call of the user's own code; if there is none, the innermost that is not ftlab's.
    """
    source = source or _line_of
    if not frames:
        return f"outside Python since {since_s:.1f} s"
    frame = next((each for each in frames if is_users(each)), None) \
        or next((each for each in frames if not each.file.startswith(_OURS)), frames[0])
    name = "notebook cell" if _CELL.search(frame.file) else Path(frame.file).name
    code = " ".join(source(frame.file, frame.line).split())
    if not code:
        return f"in {frame.function} ({name}:{frame.line}) since {since_s:.1f} s"
    code = code if len(code) <= _LONGEST else code[:_LONGEST - 1].rstrip() + "…"
    return f"in `{code}` ({name}:{frame.line}, {frame.function}) since {since_s:.1f} s"


def is_users(frame: Frame) -> bool:
    """Whether a call is of the user's code: not ftlab's, the standard library's or an installed package's."""
    if _CELL.search(frame.file) or frame.file == _PRACTICE:
        return True
    return not (frame.file.startswith((_OURS, *_STANDARD, "<frozen ", "<__array_function__"))
                or any(folder in frame.file for folder in _INSTALLED))


def _line_of(file: str, line: int) -> str:
    linecache.checkcache(file)  # the user edits it while we run
    return linecache.getline(file, line)


def _frame(match: re.Match[str]) -> Frame:
    line = match["line"]
    return Frame(file=_unescape(match["file"]), line=int(line) if line.isdigit() else 0,
                 function=_unescape(match["function"]))


def _unescape(text: str) -> str:
    """Letters that faulthandler cannot write as they are, such as the ü of a folder's name."""
    return _ESCAPED.sub(lambda match: chr(int(match[0][2:], 16)), text)


def _takes(pid: int, number: int) -> bool:
    """Whether the process handles the signal: one that does not would be killed by it. Only Linux can tell."""
    if sys.platform != "linux":
        return True
    return _has(read(f"/proc/{pid}/status"), "SigCgt:", number)


def _blocking(pid: int, number: int) -> set[str]:
    """The threads that hold the signal back or have it pending: one that writes its dump does. Empty elsewhere."""
    found = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            status = read(f"/proc/{pid}/task/{thread}/status")
            if any(_has(status, field, number) for field in ("SigBlk:", "SigPnd:", "ShdPnd:")):
                found.add(thread)
    return found


def _has(status: str, field: str, number: int) -> bool:
    """Whether a set of signals in a process's status holds one signal."""
    _, _, rest = status.partition(field)
    return bool(rest) and bool(int(rest.split(maxsplit=1)[0], 16) >> (number - 1) & 1)
