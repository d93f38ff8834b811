"""A schedule of faults from a seed: the same seed gives the same faults, at the same steps, on the same nodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ftlab.errors import ConfigError, UnknownFault
from ftlab.faults.catalogue import KINDS, Fault, make
from ftlab.validation import check, check_least

RANDOM_KINDS = ("kill", "crash", "hang", "stall", "partition", "controller")


@dataclass(frozen=True)
class Schedule:
    """Faults in the order of their steps."""

    faults: tuple[Fault, ...]
    seed: int | None = None
    left_out: tuple[Fault, ...] = ()  # that were drawn too, and cannot be done here

    def describe(self) -> str:
        """One line per fault."""
        return "\n".join(fault.describe() for fault in self.faults)


def random_schedule(seed: int, count: int, nodes: Sequence[str], steps: int,
                    kinds: Sequence[str] = RANDOM_KINDS) -> Schedule:
    """`count` faults spread over a run of `steps` steps; some close together, some during the other's recovery."""
    check("seed", seed, int)
    check_least("count", count, 0)
    check_least("steps", steps, 1)
    for name, values in (("nodes", nodes), ("kinds", kinds)):
        if not check(name, values, tuple[str, ...]):
            raise ConfigError(f"{name} must not be empty: every fault needs one of them")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise UnknownFault(f"no fault is called {unknown[0]!r}", hint=f"faults are {', '.join(KINDS)}")
    draw = random.Random(seed)
    low, high = min(5, steps - 1), max(min(5, steps - 1), int(steps * 0.85))
    faults = []
    for at_step in sorted(draw.randint(low, high) for _ in range(count)):
        kind = draw.choice(list(kinds))
        heal = round(draw.uniform(0.7, 2.5), 2) if kind in ("hang", "partition") else None
        faults.append(make(kind, draw.choice(list(nodes)), at_step=at_step, after=round(draw.uniform(0.0, 0.05), 4),
                           heal_after=heal))
    return Schedule(tuple(faults), seed)
