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
_check: list[Stage | None] = []  # while a check runs: the stage that it began with, as soon as it needed one


def current_stage() -> Stage:
    """The stage of the present checks; started here, for the rest of this process, if there is none that can be used.

    Within one check it is always the same, even when that has broken down: what the check has left in its folders would
    not be in another one's.
    """
    if _given:
        return _given[-1]
    if not _check:
        return _usable()
    stage = _check[0] = _check[0] or _usable()
    return stage


@contextlib.contextmanager
def one_check() -> Iterator[None]:
    """Have a check use one stage from its begin to its end; if it does not come to its end, whatever the reason, that
    stage is thrown away with all that it has started."""
    _check[:] = [None]  # whatever an earlier one left here that was interrupted at its very end
    try:
        yield
    except BaseException:
        throw_away()
        raise
    finally:
        _check.clear()


def throw_away() -> None:
    """End the stage that was started here, if there is one."""
    for stage in _own:
        stage.close()
    _own.clear()


def _usable() -> Stage:
    if not _own or not _own[-1].open:
        throw_away()
        stage = Stage()
        _own.append(stage)  # first: an interrupted start is found there
        atexit.unregister(throw_away)
        atexit.register(throw_away)
        stage.__enter__()
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
