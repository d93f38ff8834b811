"""Random numbers from (seed, step, shard): the same three numbers give the same draws, in every library."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from ftlab.elastic.seeding import mix, seed_step

DRAWS = {
    "python": lambda: [random.random() for _ in range(4)],
    "numpy": lambda: np.random.rand(4).tolist(),
    "torch": lambda: torch.rand(4).tolist(),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(64)).tolist(),
}


@pytest.fixture(autouse=True)
def keep_generators():
    """The tests after these ones draw as if nothing had happened."""
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(pytorch)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_the_same_step_draws_the_same_numbers_again(draw):
    seed_step(1, 20, 3)
    first = draw()
    draw()
    seed_step(1, 20, 3)
    assert draw() == first


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
@pytest.mark.parametrize("other", [(2, 20, 3), (1, 21, 3), (1, 20, 4), (20, 1, 3), (1, 3, 20)])
def test_another_seed_step_or_shard_draws_other_numbers(draw, other):
    seed_step(1, 20, 3)
    first = draw()
    seed_step(*other)
    assert draw() != first


def test_mixing_spreads_neighbours_over_all_bits():
    values = [mix(*numbers) for numbers in itertools.product(range(3), range(40), range(10))]
    assert len(set(values)) == len(values) and len({value & 0xFFFFFFFF for value in values}) == len(values)
    assert all(0 <= value < 1 << 63 for value in values)
    for bit in range(63):
        ones = sum(value >> bit & 1 for value in values) / len(values)
        assert 0.4 < ones < 0.6, f"bit {bit} is set in {ones:.0%} of the values"


def test_mixing_takes_any_whole_number():
    odd = [mix(-1), mix(0), mix(1 << 80), mix(), mix(0, 0)]
    assert all(0 <= value < 1 << 63 for value in odd)
    assert mix(-1) != mix(1) and mix(0) != mix(0, 0) != mix()
