"""Who belongs to the training world: verdicts on nodes, and the frozen rank table of each generation.

Everything here is data and pure functions. A rank table is never changed: the next generation gets a new
one, in which a replacement sits on the dead node's seats, so that the arithmetic order stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any


class Verdict(StrEnum):
    """What the controller holds of a node."""

    ALIVE = "ALIVE"
    SUSPECT = "SUSPECT"
    DEAD = "DEAD"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One rank's place: the node, its address, and which of the node's workers."""

    rank: int
    node: str
    address: str
    local_rank: int = 0


@dataclass(frozen=True, kw_only=True)
class RankTable:
    """The frozen map rank → node and address of one generation."""

    generation: int
    seats: tuple[Seat, ...]

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.seats)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes in rank order, each once."""
        return tuple(dict.fromkeys(seat.node for seat in self.seats))

    def ranks_of(self, node: str) -> tuple[int, ...]:
        """The ranks that sit on a node."""
        return tuple(seat.rank for seat in self.seats if seat.node == node)

    def rank_of(self, node: str, local_rank: int) -> int | None:
        """The rank of one worker of a node, or None if it has no seat."""
        return self._ranks.get((node, local_rank))

    @cached_property
    def _ranks(self) -> dict[tuple[str, int], int]:
        return {(seat.node, seat.local_rank): seat.rank for seat in self.seats}  # asked for every step of every rank

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON-able data; `from_dict` gives it back."""
        return {"generation": self.generation, "seats": [asdict(seat) for seat in self.seats]}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RankTable:
        """The table that `to_dict` described."""
        return RankTable(generation=int(data["generation"]), seats=tuple(Seat(**seat) for seat in data["seats"]))


def seat_nodes(generation: int, nodes: Sequence[tuple[str, str]], procs_per_node: int) -> RankTable:
    """A table that seats (name, address) nodes in the given order, `procs_per_node` ranks on each."""
    seats = [Seat(rank=index * procs_per_node + local, node=name, address=address, local_rank=local)
             for index, (name, address) in enumerate(nodes) for local in range(procs_per_node)]
    return RankTable(generation=generation, seats=tuple(seats))
