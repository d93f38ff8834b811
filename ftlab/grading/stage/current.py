"""The stage that checks use: one per process, started when the first check needs it; a grader puts in its own.

Where a grader put in a sandboxed stage, nothing else is ever used, even when that one has broken down: student's code
must not find its way out of the sandbox through a check that goes on.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator

from ftlab.grading.stage.stage import Stage, only

_own: list[Stage] = []
_given: list[Stage] = []  # by a grader; the last one counts


def current_stage() -> Stage:
    """The stage of the present checks; started here, for the rest of this process, if there is none."""
    if _given:
        return _given[-1]
    if not _own or not _own[-1].open:
        _own[:] = [Stage().__enter__()]
        atexit.register(_own[0].close)
    return _own[-1]


def given_stage() -> Stage | None:
    """The stage that a grader put in, if there is one."""
    return _given[-1] if _given else None


@contextlib.contextmanager
def using(stage: Stage) -> Iterator[Stage]:
    """Have all checks inside of this block use a stage of the caller's; if it is sandboxed, no other can be opened."""
    _given.append(stage)
    try:
        with only(stage):
            yield stage
    finally:
        _given.remove(stage)
