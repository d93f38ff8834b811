"""Which samples belong to a step: a pure function of (seed, epoch, step, global batch), never of who is there.

The global batch is cut into shards; a rank owns a run of neighbouring shards. With as many shards as ranks that is
the usual split; with a fixed number of shards (`exact=True`) the pieces stay the same when the world changes size,
and only their owners change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ftlab.elastic.seeding import mix
from ftlab.errors import ConfigError


@dataclass(frozen=True)
class Seating:
    """Where the asking worker sits just now."""

    rank: int
    world: int
    shards: int
    pieces: int = 1  # each shard is cut into so many: what fits into memory at once

    @cached_property
    def shard(self) -> int:
        """The first shard that is this rank's."""
        return self.rank * self.shards // self.world


@dataclass(frozen=True)
class Piece:
    """One shard's samples, or a part of them."""

    shard: int
    ids: torch.Tensor
    last: bool  # of this rank in this step
    part: int = 0  # of the shard


class GlobalSampler:
    """Sample ids for every step of a job; `len(sampler)` is the number of steps in an epoch.

    Use `for ids in sampler.shards(step)` (works in every world), or `sampler.indices(step)` where a rank owns
    one shard. `on_piece` is told of each piece before it is handed out.
    """

    def __init__(self, size: int, global_batch: int, *, seed: int, seating: Callable[[], Seating],
                 shuffle: bool = True, on_piece: Callable[[int, Piece, torch.Tensor], None] | None = None) -> None:
        if global_batch < 1 or size < global_batch:
            raise ConfigError(f"global_batch must be between 1 and the {size} samples there are: got {global_batch}")
        self.size, self.global_batch, self.seed, self.shuffle = size, global_batch, seed, shuffle
        self._seating, self._on_piece = seating, on_piece
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        self._in_pieces = False  # the train function asks for pieces, and so takes any number of them

    def __len__(self) -> int:
        return self.size // self.global_batch

    def epoch(self, step: int) -> int:
        """The epoch a step lies in."""
        return step // len(self)

    def global_ids(self, step: int) -> torch.Tensor:
        """The ids of the whole global batch of a step."""
        epoch, position = divmod(step, len(self))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._permutation(epoch)
        return self._order[position * self.global_batch:(position + 1) * self.global_batch]

    def shards(self, step: int) -> Iterator[torch.Tensor]:
        """This rank's pieces of the global batch, one after the other."""
        self._in_pieces = True
        for piece in self._pieces(step):
            if self._on_piece:
                self._on_piece(step, piece, self.global_ids(step))
            yield piece.ids

    def indices(self, step: int) -> torch.Tensor:
        """This rank's samples in one piece."""
        pieces = list(self._pieces(step))
        if len(pieces) != 1:
            raise ConfigError(
                f"this rank's share of the global batch comes in {len(pieces)} pieces, indices() hands out one",
                hint="write `for ids in data.shards(step): ...; ctx.backward(loss)` inside `with ctx.step()`")
        if self._on_piece:
            self._on_piece(step, pieces[0], self.global_ids(step))
        return pieces[0].ids

    def can_split(self) -> bool:
        """Whether this rank's shards can be cut into twice as many pieces."""
        here = self._seating()
        return self._in_pieces and self.global_batch // here.shards >= 2 * here.pieces

    def _pieces(self, step: int) -> Iterator[Piece]:
        here = self._seating()
        if self.global_batch < here.shards:
            raise ConfigError(f"global_batch={self.global_batch} is smaller than the {here.shards} shards it is cut "
                              f"into: some would be empty", hint="raise global_batch, or use fewer nodes")
        ids = self.global_ids(step)
        own = owned_shards(here)
        for shard in own:
            low, high = part(self.global_batch, here.shards, shard)
            pieces = min(here.pieces, high - low)
            for index in range(pieces):
                begin, end = part(high - low, pieces, index)
                yield Piece(shard, ids[low + begin:low + end], shard == own[-1] and index == pieces - 1, index)

    def _permutation(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(mix(self.seed, epoch)))


def part(total: int, parts: int, index: int) -> tuple[int, int]:
    """The half-open range of part `index` when `total` is cut into `parts` nearly equal runs."""
    return total * index // parts, total * (index + 1) // parts


def owned_shards(seating: Seating) -> range:
    """The shards a rank owns."""
    if seating.shards < seating.world:
        raise ConfigError(f"{seating.shards} shards cannot feed {seating.world} ranks",
                          hint="set JobConfig.shards to the largest world you will grow to")
    return range(*part(seating.shards, seating.world, seating.rank))
