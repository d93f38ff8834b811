"""Sample ids: a pure function of seed, epoch and step; who is there only decides who reads which of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from ftlab.elastic.sampler import GlobalSampler, Piece, Seating, owned_shards, part
from ftlab.errors import ConfigError

ALONE = Seating(0, 1, 1)
SPLITS = [(world, shards) for world in (1, 2, 3, 4, 7) for shards in (world, world + 1, 8) if shards >= world]


def sampler(size: int, batch: int, seating: Seating = ALONE, *, seed: int = 3, shuffle: bool = True,
            on_piece: Callable[[int, Piece, torch.Tensor], None] | None = None) -> GlobalSampler:
    return GlobalSampler(size, batch, seed=seed, seating=lambda: seating, shuffle=shuffle, on_piece=on_piece)


def ids_of(size: int, batch: int, seating: Seating, step: int) -> list[list[int]]:
    """The pieces a rank is handed in a step."""
    return [ids.tolist() for ids in sampler(size, batch, seating).shards(step)]


@pytest.mark.parametrize(("world", "shards"), SPLITS)
@pytest.mark.parametrize(("size", "batch"), [(96, 8), (64, 16), (30, 10), (99, 11), (17, 17)])
def test_every_sample_comes_exactly_once_an_epoch(size, batch, world, shards):
    for epoch in (0, 1):
        steps = range(epoch * (size // batch), (epoch + 1) * (size // batch))
        seen = [sample for step in steps for rank in range(world)
                for piece in ids_of(size, batch, Seating(rank, world, shards), step) for sample in piece]
        assert sorted(seen) == list(range(size))


def test_a_rest_that_fills_no_batch_is_left_out_and_nothing_comes_twice():
    data = sampler(103, 10)
    assert len(data) == 10
    seen = torch.cat([data.global_ids(step) for step in range(10)]).tolist()
    assert len(set(seen)) == len(seen) == 100
    assert data.epoch(9) == 0 and data.epoch(10) == 1


@pytest.mark.parametrize(("world", "shards"), SPLITS)
def test_the_ranks_pieces_make_up_the_global_batch_in_order(world, shards):
    for step in (0, 3, 11):
        together = [sample for rank in range(world)
                    for piece in ids_of(120, 20, Seating(rank, world, shards), step) for sample in piece]
        assert together == sampler(120, 20).global_ids(step).tolist()


def test_the_pieces_of_a_shard_do_not_depend_on_the_world():
    whole = ids_of(100, 10, Seating(0, 1, 4), 5)
    for world in (2, 3, 4):
        assert [piece for rank in range(world) for piece in ids_of(100, 10, Seating(rank, world, 4), 5)] == whole


def test_ids_do_not_depend_on_the_order_in_which_steps_are_asked_for():
    forwards, backwards = sampler(60, 10), sampler(60, 10)
    there = [forwards.global_ids(step).tolist() for step in range(18)]
    back = [backwards.global_ids(step).tolist() for step in reversed(range(18))]
    assert there == back[::-1]


def test_the_seat_is_looked_up_at_every_step():
    seat = [Seating(0, 2, 2)]
    data = GlobalSampler(40, 8, seed=1, seating=lambda: seat[0])
    assert len(data.indices(0)) == 4
    seat[0] = Seating(0, 1, 1)
    assert data.indices(0).tolist() == data.global_ids(0).tolist()


def test_the_same_seed_gives_the_same_ids_and_another_seed_others():
    first, again, other = (sampler(1000, 50, seed=seed).global_ids(7).tolist() for seed in (5, 5, 6))
    assert first == again != other


def test_epochs_differ():
    data = sampler(64, 64)
    epochs = [tuple(data.global_ids(step).tolist()) for step in range(5)]
    assert len(set(epochs)) == 5


def test_without_shuffling_the_ids_are_in_order_in_every_epoch():
    data = sampler(12, 4, shuffle=False)
    assert [data.global_ids(step).tolist() for step in (0, 2, 3)] == [[0, 1, 2, 3], [8, 9, 10, 11], [0, 1, 2, 3]]


def test_indices_hands_out_one_shard_and_refuses_several():
    assert sampler(40, 8, Seating(1, 2, 2)).indices(0).tolist() == sampler(40, 8).global_ids(0).tolist()[4:]
    with pytest.raises(ConfigError, match="comes in 2 pieces") as refusal:
        sampler(40, 8, Seating(0, 2, 4)).indices(0)
    assert "for ids in data.shards(step)" in refusal.value.hint


def test_a_batch_smaller_than_the_shards_is_refused():
    with pytest.raises(ConfigError, match="smaller than the 8 shards"):
        list(sampler(40, 4, Seating(0, 2, 8)).shards(0))


def test_fewer_shards_than_ranks_are_refused():
    with pytest.raises(ConfigError, match="3 shards cannot feed 4 ranks") as refusal:
        owned_shards(Seating(0, 4, 3))
    assert "JobConfig.shards" in refusal.value.hint


@pytest.mark.parametrize(("size", "batch"), [(10, 0), (10, -1), (10, 11), (0, 1)])
def test_a_batch_that_cannot_be_filled_is_refused(size, batch):
    with pytest.raises(ConfigError, match="global_batch must be between 1 and"):
        sampler(size, batch)


def test_each_piece_is_announced_before_it_is_handed_out_and_the_last_one_says_so():
    told: list[tuple[int, int, bool, int]] = []
    data = sampler(40, 8, Seating(1, 2, 4), on_piece=lambda step, piece, ids: told.append(
        (step, piece.shard, piece.last, len(ids))))
    pieces = data.shards(6)
    assert told == []
    next(pieces)
    assert told == [(6, 2, False, 8)]
    assert len(list(pieces)) == 1
    assert told == [(6, 2, False, 8), (6, 3, True, 8)]


@pytest.mark.parametrize("total", [0, 1, 7, 64, 65])
@pytest.mark.parametrize("parts", [1, 2, 3, 64])
def test_parts_are_neighbours_of_nearly_the_same_size(total, parts):
    bounds = [part(total, parts, index) for index in range(parts)]
    assert bounds[0][0] == 0 and bounds[-1][1] == total
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    sizes = [high - low for low, high in bounds]
    assert max(sizes) - min(sizes) <= 1
