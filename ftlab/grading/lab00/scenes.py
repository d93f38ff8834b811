"""What runs in a child with the student's parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftlab.grading.lab00.logs import report_of
from ftlab.report.report import Report


def read(reader: Callable[[Report], dict[str, Any]], log: str) -> dict[str, Any]:
    """What the student's function reads from the report of a recorded job."""
    return dict(reader(report_of(log)))


def tell(guess: Any) -> dict[str, Any]:
    """A guess, as data."""
    return dict(guess)
