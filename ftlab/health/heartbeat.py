"""Is a node alive? A verdict from the time of its last heartbeat, pure: the time is passed in.

A silent node becomes SUSPECT, then DEAD. The watcher may be late itself (a busy machine, a stopped process): time in
which nobody looked is no evidence against a node, so what `Watch.look` returns is taken off the silence.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftlab.membership import Verdict


@dataclass(frozen=True, kw_only=True)
class FixedTimeout:
    """SUSPECT and DEAD after fixed times of silence."""

    suspect_s: float
    dead_s: float

    def judge(self, silence_s: float) -> Verdict:
        """The verdict on a node that has been silent for so long."""
        if silence_s >= self.dead_s:
            return Verdict.DEAD
        return Verdict.SUSPECT if silence_s >= self.suspect_s else Verdict.ALIVE


@dataclass
class Watch:
    """Keeps the watcher honest: how late it looked, which must not count as a node's silence."""

    every_s: float  # when the next look is planned; may be changed after each
    looked: float
    slack_s: float | None = None  # lateness that is not worth a word; None: as much as `every_s`

    def look(self, now: float) -> float:
        """To be called at each look; how much longer than planned nobody looked."""
        late = now - self.looked - self.every_s
        self.looked = now
        return late if late > (self.every_s if self.slack_s is None else self.slack_s) else 0.0
