"""The settings of lab 00's hidden test. Only grading has this file: `ftlab labs pack` leaves it out."""

from __future__ import annotations

import random
from typing import Any


def settings(task: str, draw: random.Random) -> dict[str, Any]:
    """Recorded runs, and how much slower they went: other figures for every submission."""
    return {"logs": ["blackout", draw.choice(["hang", "crash"])], "stretch": round(draw.uniform(1.1, 3.0), 4)}
