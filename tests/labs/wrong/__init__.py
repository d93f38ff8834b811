"""Wrong solutions, a maintained set per lab: each makes one mistake, and loses exactly the marks that it should.

    WRONG = {"no fsync": Wrong(cells={"task2-stub": SOURCE}, points={"task2-check": 1.0, "task2-hidden": 0.0})}

A quick test runs them all through the checks; a few also go through the whole cycle of nbgrader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A student who made one mistake."""

    cells: Mapping[str, str]  # cell id → the source that stands there in place of the solution
    points: Mapping[str, float] = field(default_factory=dict)  # graded cell → marks; all others get full marks
