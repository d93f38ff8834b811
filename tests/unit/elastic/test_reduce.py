"""Gradients in one flat tensor, and their sum in an order that does not depend on who computed what."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ftlab.elastic.reduce import FlatGradients, sum_in_shard_order, sum_over_ranks
from ftlab.elastic.sampler import Seating, owned_shards
from tests.unit.elastic.forks import run


def parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    """Parameters of different shapes, a scalar and an empty one among them, with gradients."""
    shapes = [(2, 3), (), (0, 4), (5,)]
    made = []
    for index, (shape, dtype) in enumerate(zip(shapes, dtypes or (torch.float32,) * 4, strict=True)):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.full(shape, index + 1.0, dtype=dtype)
        made.append(parameter)
    return made


def test_what_was_taken_is_put_back_times_its_weight():
    owners = parameters()
    before = [owner.grad.clone() for owner in owners]
    flat = FlatGradients(owners)
    taken = flat.take(0.5)
    assert all(owner.grad is None for owner in owners), "the gradients have moved"
    flat.put(taken, held=[None] * 4)
    for owner, grad in zip(owners, before, strict=True):
        assert torch.equal(owner.grad, grad * 0.5) and owner.grad.shape == owner.shape


def test_a_missing_gradient_stays_missing():
    owners = parameters()
    owners[0].grad = owners[3].grad = None
    flat = FlatGradients(owners)
    flat.put(flat.take(1.0), held=[None] * 4)
    assert [owner.grad is None for owner in owners] == [True, False, False, True]


def test_a_gradient_that_only_another_rank_has_arrives():
    here, there = parameters(), parameters()
    here[0].grad = None
    flat, other = FlatGradients(here), FlatGradients(there)
    flat.put(flat.take(0.5) + other.take(0.5), held=[None] * 4)
    assert torch.equal(here[0].grad, torch.full((2, 3), 0.5)), "the missing one counts as zeros"
    assert torch.equal(here[3].grad, torch.full((5,), 4.0))


def test_sums_come_on_top_of_what_was_held():
    owners = parameters()
    owners[1].grad = None
    held = [torch.full((2, 3), 10.0), torch.tensor(20.0), None, None]
    flat = FlatGradients(owners)
    flat.put(flat.take(1.0), held)
    assert torch.equal(owners[0].grad, torch.full((2, 3), 11.0))
    assert owners[1].grad is held[1], "no new gradient: the held one stays"
    assert torch.equal(owners[3].grad, torch.full((5,), 4.0))
    assert torch.equal(held[0], torch.full((2, 3), 10.0)), "what was held is not written to: a rollback needs it"


@pytest.mark.parametrize(("dtypes", "wide"), [
    ((torch.float32,) * 4, torch.float32),
    ((torch.float64,) * 4, torch.float64),
    ((torch.float32, torch.float64, torch.float32, torch.float32), torch.float64),
    ((torch.bfloat16,) * 4, torch.float32),
    ((torch.float16, torch.bfloat16, torch.float32, torch.float16), torch.float32),
], ids=["float32", "float64", "mixed", "bfloat16", "halves"])
def test_the_flat_tensor_is_wide_enough_for_every_gradient(dtypes, wide):
    owners = parameters(*dtypes)
    owners[0].grad = torch.rand(2, 3, dtype=torch.float64).to(dtypes[0])
    before = [owner.grad.clone() for owner in owners]
    flat = FlatGradients(owners)
    taken = flat.take(1.0)
    assert taken.dtype == wide
    flat.put(taken, held=[None] * 4)
    for owner, grad in zip(owners, before, strict=True):
        assert torch.equal(owner.grad, grad) and owner.grad.dtype == owner.dtype


def test_buffers_ride_along_and_are_replaced_by_their_mean():
    owners = parameters()
    here, there = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])
    flat = FlatGradients(owners)
    mine = flat.take(0.25, [here])
    theirs = FlatGradients(parameters()).take(0.75, [there])
    flat.put(mine + theirs, [None] * 4, [here])
    assert here.tolist() == [2.5, 5.0]
    assert torch.equal(owners[3].grad, torch.full((5,), 4.0)), "and the gradients are not mixed up with them"


# ---- real groups ---------------------------------------------------------------------------------------------------

SHARDS = 4


def shard(number: int, size: int) -> torch.Tensor:
    """Numbers of very different sizes: any other order of additions gives other bits."""
    draw = torch.Generator().manual_seed(number)
    return torch.randn(size, generator=draw) * torch.pow(10.0, torch.randint(-6, 7, (size,), generator=draw).float())


def test_shards_are_summed_to_the_same_bits_in_worlds_of_every_size(tmp_path):
    sizes = (1, 3, 1001)  # fewer numbers than ranks, as many as some, and many
    wanted = [torch.zeros(size) for size in sizes]
    for number in range(SHARDS):
        wanted = [total + shard(number, total.numel()) for total in wanted]
    backwards = torch.zeros(1001)
    for number in reversed(range(SHARDS)):
        backwards += shard(number, 1001)
    assert not torch.equal(backwards, wanted[-1]), "the order must matter, or this test shows nothing"

    for world in (1, 2, 3, 4):
        def work(rank, line, world=world):
            store = dist.FileStore(str(tmp_path / f"store-{world}"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
            seating = Seating(rank, world, SHARDS)
            sums = [sum_in_shard_order([shard(number, size) for number in owned_shards(seating)], seating)
                    for size in sizes]
            whole = sum_over_ranks(torch.full((3,), float(rank + 1)))
            return [each.numpy().tobytes() for each in sums], whole.tolist()

        for sums, whole in run(work, world):
            assert sums == [each.numpy().tobytes() for each in wanted], f"in a world of {world}"
            assert whole == [world * (world + 1) / 2] * 3
