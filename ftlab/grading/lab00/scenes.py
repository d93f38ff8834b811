"""What runs in a child with the student's parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftlab.events import Event
from ftlab.report.report import Report


def read(reader: Callable[[Report], dict[str, Any]], logs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What the student's function reads from the reports of jobs whose events are these."""
    return [dict(reader(Report.of("job", [Event(**each) for each in events], config={"nodes": 3, "spares": 1})))
            for events in logs]


def tell(guess: Any) -> dict[str, Any]:
    """A guess, as data."""
    return dict(guess)
