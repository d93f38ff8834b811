"""Random numbers as a function of (seed, step, shard), never of who happens to compute them.

A replacement cannot inherit a dead worker's generators, and need not: before each step the generators of Python,
NumPy and torch are set from these three numbers, so a step that is run again draws the same numbers again.
"""

from __future__ import annotations

import random

import numpy as np
import torch

_MASK = (1 << 64) - 1
_HAS_CUDA = torch.backends.cuda.is_built()

# What `random.seed` and `np.random.seed` do for a number, without their detour over other kinds of seeds: this runs
# before every step, when 10 ms of arithmetic have pushed everything else out of the caches.
_python = random.seed.__self__  # type: ignore[attr-defined]
_seed_python = super(random.Random, _python).seed
_draw_bits = _python.getrandbits
_seed_numpy = np.random.mtrand._rand.seed
_seed_torch = torch.default_generator.manual_seed


def mix(*numbers: int) -> int:
    """One 63-bit number from several (the SplitMix64 finaliser over each)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) & _MASK
        state = (state * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_step(seed: int, step: int, shard: int) -> None:
    """Set all generators for one shard of one step: Python's by all three numbers, the others by what it draws."""
    _seed_python((seed & _MASK) << 128 | step << 64 | shard)
    _python.gauss_next = None
    _seed_numpy(_draw_bits(32))
    value = _draw_bits(63)
    _seed_torch(value)
    if _HAS_CUDA and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
