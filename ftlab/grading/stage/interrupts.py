"""The stop button: when it may strike, and what a student sees of it."""

from __future__ import annotations

from ftlab.cluster.interrupts import deferred

held = deferred  # for what must not be left half done, and does not take long


class Stopped(KeyboardInterrupt):
    """A check was stopped. Notebooks show its message alone: the frames below the student's cell are all ours."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]
