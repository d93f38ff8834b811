"""Wrong solutions, a maintained set per lab: each makes one mistake, and loses exactly the marks that it should.

    WRONG = {"no fsync": Wrong(cells={"task2-stub": SOURCE}, points={"task2-check": 1.0, "task2-hidden": 0.0})}

`make test` runs those in QUICK through the checks, one or two a task, `make test-all` all of them; a few also go
through the whole cycle of nbgrader.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A student who made one mistake."""

    cells: Mapping[str, str]  # cell id → the source that stands there in place of the solution
    points: Mapping[str, float] = field(default_factory=dict)  # graded cell → marks; all others get full marks


def cases(wrong: Mapping[str, Wrong], quick: Collection[str]) -> list[Any]:
    """The names of wrong solutions, as pytest takes them: all but the quick ones only with --full."""
    assert set(quick) <= set(wrong), f"there is no wrong solution {set(quick) - set(wrong)}"
    return [pytest.param(name, marks=() if name in quick else pytest.mark.full) for name in wrong]
