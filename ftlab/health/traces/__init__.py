"""A trace: when the heartbeats of one node arrived, and what was done to the node meanwhile.

The files in this folder were recorded by `ftlab.bench.heartbeats.record_traces`, one file per condition with one trace
per node. They hold what one machine did on one day: enough to compare detectors on the same heartbeats, not to promise
how often any other machine is late.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ftlab.errors import ConfigError

FOLDER = Path(__file__).parent
CONDITIONS = ("idle", "loaded", "paused")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The heartbeats of one node; all times are seconds since the recording began."""

    name: str  # the condition: idle, loaded, paused, ...
    node: str
    interval_s: float  # how long the node slept between two heartbeats
    arrivals: tuple[float, ...]  # when they were received, rising
    pauses: tuple[tuple[float, float], ...] = ()  # when the node was stopped, and when it went on
    death: float | None = None  # when the node was killed
    recorded: str = ""  # how, where and when

    def __post_init__(self) -> None:
        if any(later < sooner for sooner, later in pairwise(self.arrivals)):
            raise ConfigError(f"the arrivals of {self.node} must rise: nothing arrives before what came before it")
        if self.interval_s <= 0:
            raise ConfigError(f"interval_s must be positive (got {self.interval_s:g})")

    def longest_gap(self) -> float:
        """The longest silence between two heartbeats; 0 if there are not two."""
        return max((later - sooner for sooner, later in pairwise(self.arrivals)), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The trace as JSON-able data; `from_dict` gives it back."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Trace:
        """The trace that `to_dict` described."""
        pauses = tuple((float(begin), float(end)) for begin, end in data["pauses"])
        return Trace(**{**data, "arrivals": tuple(map(float, data["arrivals"])), "pauses": pauses})


def load_traces(folder: Path = FOLDER) -> list[Trace]:
    """All traces of a folder, condition by condition; without a folder, those that come with ftlab."""
    files = sorted(folder.glob("*.json"))
    return [Trace.from_dict(data) for file in files for data in json.loads(file.read_text(encoding="utf-8"))]


def save_traces(traces: Iterable[Trace], folder: Path) -> list[Path]:
    """Write one file per condition, one line per node; the files."""
    conditions: dict[str, list[str]] = {}
    for trace in traces:
        conditions.setdefault(trace.name, []).append(json.dumps(trace.to_dict(), separators=(",", ":")))
    for name, lines in conditions.items():
        (folder / f"{name}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    return [folder / f"{name}.json" for name in conditions]
