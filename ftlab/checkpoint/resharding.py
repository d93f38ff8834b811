"""Shards of one world, put together for another: every tensor's pieces know where they belong in the whole.

A rank takes from each saved piece what overlaps with its own piece. In a world without a mesh (one process, no FSDP)
its own piece is the whole tensor, so a checkpoint of many ranks loads on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ftlab.checkpoint import tree
from ftlab.checkpoint.state import TrainingState

Mesh = Any


@dataclass(frozen=True)
class Box:
    """A piece of a tensor: where it begins in the whole and how large it is."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: Box) -> Box | None:
        """What two pieces have in common."""
        begin = tuple(map(max, zip(self.offset, other.offset, strict=True)))
        end = tuple(min(a + b, c + d) for a, b, c, d in zip(self.offset, self.shape, other.offset, other.shape,
                                                            strict=True))
        shape = tuple(stop - start for start, stop in zip(begin, end, strict=True))
        return Box(begin, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this piece inside of a larger one."""
        return tuple(slice(start - base, start - base + size)
                     for start, base, size in zip(self.offset, outer.offset, self.shape, strict=True))


def assemble(shards: Sequence[tree.Packed], training: TrainingState) -> Any:
    """The saved tree with this rank's pieces in it."""
    mesh = find_mesh(training)
    alike = mesh is not None and mesh.size() == len(shards)
    first = shards[mesh.get_rank() if mesh is not None and alike else 0]  # what is not sharded: this rank's own
    tensors = []
    for index, tensor in enumerate(first.tensors):
        if index not in first.pieces:
            tensors.append(tensor)
            continue
        saved = [(Box(shard.pieces[index].offset, tuple(shard.tensors[index].shape)), shard.tensors[index])
                 for shard in shards]
        tensors.append(_build(first.pieces[index], saved, mesh))
    return tree.unpack(tree.Packed(first.header, tensors))


def find_mesh(training: TrainingState) -> Mesh | None:
    """The device mesh that the live parameters are sharded over, if they are."""
    return next((parameter.device_mesh for parameter in training.parameters() if isinstance(parameter, DTensor)), None)


def _build(piece: tree.Piece, saved: Sequence[tuple[Box, torch.Tensor]], mesh: Mesh | None) -> torch.Tensor:
    whole = tuple(piece.whole)
    if mesh is None:
        return _gather(Box((0,) * len(whole), whole), saved)
    placements = [Shard(int(each[1:])) if each.startswith("S") else Replicate() for each in piece.placements]
    shape, offset = compute_local_shape_and_global_offset(torch.Size(whole), mesh, placements)
    local = _gather(Box(tuple(offset), tuple(shape)), saved)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(whole),
                              stride=torch.empty(whole, device="meta").stride())


def _gather(mine: Box, saved: Sequence[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    result = torch.empty(mine.shape, dtype=saved[0][1].dtype)
    for box, tensor in saved:
        common = mine.overlap(box)
        if common is not None:
            result[common.within(mine)] = tensor[common.within(box)]
    return result
