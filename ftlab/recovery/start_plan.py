"""Who sits when a job starts: all the nodes it wants, or those that are there if they are enough for it.

A job with `min_nodes` does not wait long for more: nodes that come later are added while it trains.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE_S = 5.0  # for the rest, once there are enough: a world that grows later costs one generation more


@dataclass(frozen=True, kw_only=True)
class Muster:
    """The nodes a job may start on, as they stand now."""

    wanted: int
    minimum: int
    ready: tuple[str, ...]  # those at their first step, in the order of their numbers
    coming: int  # others that are starting, or running the set-up
    enough_for_s: float  # how long the minimum has been ready


def choose_seats(muster: Muster) -> tuple[str, ...]:
    """The nodes to start on now; none while it is better to wait."""
    if len(muster.ready) >= muster.wanted:
        return muster.ready[:muster.wanted]
    enough = len(muster.ready) >= muster.minimum
    return muster.ready if enough and (not muster.coming or muster.enough_for_s > PATIENCE_S) else ()
