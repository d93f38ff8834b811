"""A traceback for people who use ftlab: the lines of their own code that led to an error, then the error.

Lines of ftlab and of libraries are left out: the message says what they would. What is shown stays complete where it is
about the user's code: every line of it, and an error of theirs that ftlab's error was raised from.
"""

from __future__ import annotations

import os
import re
import site
import sysconfig
import traceback
from types import TracebackType

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = tuple({os.path.abspath(folder) + os.sep for folder in (
    sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages(),
    site.getusersitepackages())})
_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$|^<ipython-input")


def render(error: BaseException) -> list[str]:
    """The lines that a notebook shows for an error."""
    lines = _of_one(error)
    if error.__cause__ is not None:
        lines = [*_of_one(error.__cause__), "", "and therefore:", "", *lines]
    return lines


def _of_one(error: BaseException) -> list[str]:
    shown = [_line(frame) for frame in own_frames(error.__traceback__)]
    return [*shown, f"{type(error).__name__}: {error}"]


def own_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """Those frames of a traceback that are neither ftlab's nor a library's."""
    return [frame for frame in traceback.extract_tb(trace) if not _is_foreign(frame.filename)]


def _is_foreign(file: str) -> bool:
    return file.startswith((_OURS, "<frozen")) or (file.startswith(_LIBRARIES) and not _CELL.search(file))


def _line(frame: traceback.FrameSummary) -> str:
    place = "this cell" if _CELL.search(frame.filename) else frame.filename
    inside = "" if frame.name == "<module>" else f", in {frame.name}"
    return f"line {frame.lineno} of {place}{inside}:\n    {(frame.line or '').strip()}"
