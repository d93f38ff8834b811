"""The sum of the ranks' gradients, in an order that depends on the shards and not on who computed them.

`sum_over_ranks` is gloo's all-reduce: identical bits as long as the world keeps its size. `sum_in_shard_order`
adds the shards' gradients one after the other, so the bits stay identical when the same shards are spread over
fewer or more ranks; the price is that every rank receives every shard's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ftlab.elastic.sampler import Seating, owned_shards
from ftlab.errors import ConfigError


class FlatGradients:
    """Gradients of a fixed list of parameters in one flat tensor, with a mark for those that have none.

    Buffers that the forward pass changed ride along: their mean over the batch replaces each rank's own, so that
    every rank holds the same state after a step and any of them can replace any other. So does the loss. Two last
    cells: a stamp, by which ranks see that they sum the same thing, and the count of ranks that failed; after the sum
    all ranks know of it, without a message of its own.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.total = sum(self.sizes)
        self.dtype = torch.float32  # sums of half-precision gradients keep their bits
        for parameter in self.parameters:
            self.dtype = torch.promote_types(self.dtype, parameter.dtype)
        self.length = 0  # of the last flat tensor; ranks that train alike have the same

    def take(self, weight: float, buffers: Sequence[torch.Tensor] = (),
             loss: torch.Tensor | None = None) -> torch.Tensor:
        """Move the gradients out of the parameters into a flat tensor, with buffers and loss, each times `weight`."""
        device = self.parameters[0].device
        try:
            pieces = [torch.zeros(size, dtype=self.dtype, device=device) if p.grad is None else
                      p.grad.reshape(-1).to(self.dtype) for p, size in zip(self.parameters, self.sizes, strict=True)]
        except RuntimeError:
            self._refuse_sparse()
            raise
        tail = torch.tensor([*(p.grad is not None for p in self.parameters), 0.0, 0.0], dtype=self.dtype, device=device)
        for parameter in self.parameters:
            parameter.grad = None
        last = torch.zeros(1, device=device) if loss is None else loss
        riders = [rider.detach().reshape(-1).to(self.dtype) for rider in (*buffers, last)]
        flat = torch.cat([*pieces, *riders, tail])
        if weight != 1.0:
            flat[:-len(tail)].mul_(weight)
        self.length = len(flat)
        return flat

    def _refuse_sparse(self) -> None:
        if any(p.grad is not None and p.grad.is_sparse for p in self.parameters):
            raise ConfigError("a sparse gradient cannot be averaged over the ranks",
                              hint="build the embedding with sparse=False, and train it with a dense optimizer")

    def take_failure(self) -> torch.Tensor:
        """What a rank contributes that has no gradients, because it failed."""
        flat = torch.zeros(self.length, dtype=self.dtype, device=self.parameters[0].device)
        flat[-1] = 1.0
        return flat

    def read(self, flat: torch.Tensor) -> tuple[float, int]:
        """Of a sum: the loss, and how many ranks failed."""
        return float(flat[-len(self.sizes) - 3]), round(float(flat[-1]))

    @staticmethod
    def stamp(flat: torch.Tensor, value: float) -> None:
        """Say what is summed here; a sum of equal stamps is their number times the stamp."""
        flat[-2] = value

    @staticmethod
    def read_stamp(flat: torch.Tensor) -> float:
        """The stamps' sum."""
        return float(flat[-2])

    def norm(self, flat: torch.Tensor) -> float:
        """Of a sum: the 2-norm of its gradients. In every step, so with one look at each number and no more."""
        gradients = flat[:self.total]
        if flat.is_cpu:
            plain = gradients.numpy()
            return math.sqrt(float(np.dot(plain, plain)))  # half the time of torch's
        return math.sqrt(float(torch.dot(gradients, gradients)))

    def put(self, flat: torch.Tensor, held: Sequence[torch.Tensor | None],
            buffers: Sequence[torch.Tensor] = ()) -> None:
        """Move sums back into the parameters' gradients, on top of what was `held` before, and into the buffers."""
        present = flat[-len(self.sizes) - 2:-2].tolist()
        pieces = flat[:-len(self.sizes) - 3].split([*self.sizes, *(buffer.numel() for buffer in buffers)])
        pieces, statistics = pieces[:len(self.sizes)], pieces[len(self.sizes):]
        with torch.no_grad():
            for buffer, mean in zip(buffers, statistics, strict=True):
                buffer.copy_(mean.view_as(buffer))
        for parameter, piece, seen, before in zip(self.parameters, pieces, present, held, strict=True):
            if not seen:
                parameter.grad = before
                continue
            grad = piece.view_as(parameter).to(parameter.dtype)
            parameter.grad = grad if before is None else before + grad


def sum_over_ranks(flat: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks."""
    dist.all_reduce(flat)
    return flat


def sum_in_shard_order(flats: Sequence[torch.Tensor], seating: Seating) -> torch.Tensor:
    """The sum over all shards, added in shard order whoever owns them; `flats` are this rank's, in order."""
    counts = [len(owned_shards(Seating(rank, seating.world, seating.shards))) for rank in range(seating.world)]
    most = max(counts)
    mine = torch.stack([*flats, *(torch.zeros_like(flats[0]) for _ in range(most - len(flats)))])
    everyone = mine.new_empty((seating.world * most, mine.shape[1]))
    dist.all_gather_into_tensor(everyone, mine)
    total = torch.zeros_like(flats[0])
    for rank, count in enumerate(counts):
        for shard in everyone[rank * most:rank * most + count]:
            total += shard
    return total
