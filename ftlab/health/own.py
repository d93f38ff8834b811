"""Somebody's own detector at work in a real controller: `Cluster(detector=MyDetector)`.

`MyDetector()` is made once for each node that joins. It needs `heard(at)` and `judge(now) -> Verdict`, and sees moments
on the monotonic clock. Time in which the controller itself did not look is taken off the silence, as for the built-in
detectors, so `now` is the last heartbeat plus the silence that counts. A detector that raises, or answers with
something else than a verdict, is put aside for that node, told of once, and the cluster's fixed timeout takes over.
Where it stops: one that never returns holds up the controller, which runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftlab.health.heartbeat import FixedTimeout
from ftlab.membership import Verdict

MakeOwn = Callable[[], Any]


class OwnDetector:
    """Asks somebody's detector about silences, and does without it when it fails."""

    def __init__(self, make: MakeOwn, fallback: FixedTimeout, tell: Callable[[str], None]) -> None:
        self._fallback, self._tell = fallback, tell
        self._newest: float | None = None
        self._mine: Any = None
        self._try(lambda: setattr(self, "_mine", make()))

    def heard(self, at: float) -> None:
        """A heartbeat arrived."""
        self._newest = at
        if self._mine is not None:
            self._try(lambda: self._mine.heard(at))

    def judge_silence(self, silence_s: float) -> Verdict:
        """The verdict on a silence of this length; a node that was never heard is not judged by it."""
        if self._mine is None:
            return self._fallback.judge(silence_s)
        if self._newest is None:
            return Verdict.ALIVE
        now = self._newest + silence_s
        answer = self._try(lambda: Verdict(self._mine.judge(now)))
        return answer if isinstance(answer, Verdict) else self._fallback.judge(silence_s)

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # it is somebody's own
            self._mine = None
            self._tell(f"{type(error).__name__}: {error}"[:300])
            return None
