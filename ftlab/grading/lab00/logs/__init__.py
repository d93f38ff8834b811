"""The event logs of four real jobs, three nodes and a spare each, in which one thing broke.

    from ftlab.grading.lab00.logs import NAMES, report_of

They hold what one machine did on one day. Reports are read from them as from any log.
"""

from __future__ import annotations

from pathlib import Path

from ftlab.events import read_events
from ftlab.report.report import Report

FOLDER = Path(__file__).parent
NAMES = ("kill", "crash", "hang", "blackout")


def report_of(name: str) -> Report:
    """The report of a recorded job."""
    return Report.of(name, list(read_events(FOLDER / f"{name}.jsonl")), config={"nodes": 3, "spares": 1})
