"""Batches cut into pieces: what they hold, how much each counts, and that the gradient stays the same."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from ftlab.errors import ConfigError
from ftlab.train.microbatch import can_cut, count_rows, split

Pair = namedtuple("Pair", "x y")


def gradients(batch: tuple[torch.Tensor, torch.Tensor], pieces: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    for (x, y), weight in split(batch, pieces):
        (nn.functional.mse_loss(model(x), y) * weight).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("pieces", [2, 3, 5, 13, 40])
def test_the_weighted_gradients_of_the_pieces_sum_up_to_that_of_the_batch(pieces):
    batch = (torch.randn(13, 4, dtype=torch.float64), torch.randn(13, 2, dtype=torch.float64))
    whole, cut = gradients(batch, 1, torch.float64), gradients(batch, pieces, torch.float64)
    for left, right in zip(whole, cut, strict=True):
        assert torch.allclose(left, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_the_gradient_has_the_same_bits_where_sums_are_exact(pieces):
    """Whole numbers and shares that are powers of two: nothing is rounded, so the order of additions is no matter."""
    numbers = torch.Generator().manual_seed(1)
    x, y = (torch.randint(-8, 8, shape, generator=numbers).float() for shape in ((8, 4), (8, 2)))
    found = []
    for count in (1, pieces):
        weight = torch.ones(4, 2, requires_grad=True)
        for (some, wanted), share in split((x, y), count):
            (((some @ weight - wanted) ** 2).sum(dim=1).mean() * share).backward()
        found.append(weight.grad)
    assert found[0].abs().sum() > 0
    assert torch.equal(*found)


def test_sizes_differ_by_at_most_one_row_and_the_shares_add_up_to_one():
    parts = split(torch.arange(11), 4)
    assert [part.tolist() for part, _ in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert [share for _, share in parts] == [3 / 11, 3 / 11, 3 / 11, 2 / 11]


def test_there_are_no_more_pieces_than_rows():
    assert [part.tolist() for part, _ in split(torch.arange(3), 8)] == [[0], [1], [2]]


def test_one_piece_is_the_batch_itself_whatever_it_is():
    batch = object()
    assert split(batch, 1) == [(batch, 1.0)]


def test_containers_keep_their_kind_and_what_has_no_rows_is_repeated():
    batch = {"pair": Pair(torch.arange(4), [torch.arange(8).view(4, 2), 3.5]), "scale": torch.tensor(2.0),
             "names": ["a", "b", "c", "d"], "kind": "images", "array": np.arange(4)}
    first, second = (part for part, _ in split(batch, 2))
    assert isinstance(second["pair"], Pair) and second["pair"].x.tolist() == [2, 3]
    assert second["pair"].y[0].tolist() == [[4, 5], [6, 7]] and second["pair"].y[1] == 3.5
    assert first["names"] == ["a", "b"] and second["names"] == ["c", "d"]
    assert second["scale"] == 2.0 and second["kind"] == "images" and second["array"].tolist() == [2, 3]


@pytest.mark.parametrize(("batch", "why"), [
    ((torch.ones(4, 2), torch.ones(3)), r"different numbers of rows: \[3, 4\]"),
    ((torch.ones(()), 3), "without a tensor"),
    (torch.ones(0, 3), "without rows"),
    ((torch.ones(4), object()), "a object in it"),
    (pack_sequence([torch.ones(3), torch.ones(2)]), "PackedSequence"),
], ids=["rows differ", "no tensor", "no rows", "something else", "packed"])
def test_a_batch_that_cannot_be_cut_is_told(batch, why):
    with pytest.raises(ConfigError, match=why):
        split(batch, 2)
    assert can_cut(batch) == 1


def test_the_rows_of_a_batch_say_how_far_it_can_be_cut():
    assert count_rows([torch.ones(6, 2), {"y": torch.ones(6)}]) == can_cut(torch.ones(6)) == 6


def test_no_pieces_at_all_are_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        split(torch.ones(3), 0)
