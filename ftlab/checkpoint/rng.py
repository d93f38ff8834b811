"""The random generators of Python, NumPy and torch, as part of a training state.

Jobs on a cluster do not need it: there random numbers are a function of (seed, step, shard), and their checkpoints have
no such part.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

GENERATORS = "generators"  # the part's name


class Generators:
    """All global generators of this process, with the two methods that make them protectable."""

    def state_dict(self) -> dict[str, Any]:
        """Where the generators are."""
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return {"python": [version, torch.tensor(words, dtype=torch.int64), gauss],
                "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss),
                          float(cached)],
                "torch": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Put the generators there."""
        version, words, gauss = saved["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        kind, keys, position, has_gauss, cached = saved["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(saved["torch"].clone())
        if saved["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(saved["cuda"])
