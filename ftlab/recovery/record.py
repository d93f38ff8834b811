"""The record of one recovery: each step of the three phases with its begin and end, from whoever did it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ftlab.messages import PHASES

_PHASE_OF = {name: phase for phase, names in PHASES.items() for name in names}


@dataclass
class RecoveryRecord:
    """What one recovery took so far."""

    cause: str
    nodes: list[str]
    began: float  # the verdict
    generation: int = 0  # the one it leads to
    awaiting_stop: set[str] = field(default_factory=set)
    decided: float = 0.0
    seated: float = 0.0
    source: str = ""
    attempts: int = 1
    spans: list[dict[str, Any]] = field(default_factory=list)

    def span(self, name: str, begin: float, end: float, by: str = "controller") -> None:
        """Add one measured step."""
        self.spans.append({"phase": _PHASE_OF.get(name, name), "name": name, "begin": begin, "end": end, "by": by})

    def facts(self) -> dict[str, Any]:
        """For the event log."""
        return {"cause": self.cause, "nodes": self.nodes, "spans": self.spans, "phases": envelope(self.spans),
                "rung": self.source, "attempts": self.attempts}


def envelope(spans: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Seconds per step: from the first rank that began it to the last that ended it, in the order of the phases."""
    bounds: dict[str, tuple[float, float]] = {}
    for span in spans:
        begin, end = bounds.get(span["name"], (span["begin"], span["end"]))
        bounds[span["name"]] = (min(begin, span["begin"]), max(end, span["end"]))
    return {name: round(bounds[name][1] - bounds[name][0], 6) for name in _PHASE_OF if name in bounds}
