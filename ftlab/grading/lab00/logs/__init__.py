"""The event logs of four real jobs, three nodes and a spare each, in which one thing broke.

    from ftlab.grading.lab00.logs import NAMES, report_of

They hold what one machine did on one day. Reports are read from them as from any log.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ftlab.events import Event, read_events
from ftlab.report.report import Report

FOLDER = Path(__file__).parent
NAMES = ("kill", "crash", "hang", "blackout")


def events_of(name: str, stretch: float = 1.0) -> list[Event]:
    """The events of a recorded job, as if it had been so many times as slow."""
    events = list(read_events(FOLDER / f"{name}.jsonl"))
    return [replace(each, at=events[0].at + stretch * (each.at - events[0].at)) for each in events]


def report_of(name: str, stretch: float = 1.0) -> Report:
    """The report of a recorded job."""
    return Report.of(name, events_of(name, stretch), config={"nodes": 3, "spares": 1})
