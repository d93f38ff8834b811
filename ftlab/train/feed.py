"""Batches by their numbers: what a loader gives, made the same however often and after whatever it is asked for.

Orders and random augmentations become a function of (seed, epoch, number, rank): the generators are set before the
loader is iterated and before each batch is fetched. Batches that are passed over are loaded all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ftlab.elastic.seeding import mix, seed_step
from ftlab.errors import ConfigError

_ORDER, _FETCH = 0x0D, 0xFE  # kinds of random numbers beside those of a step


class Feed:
    """The batches of a loader by epoch and number, each the same however often and after whatever it is asked for."""

    def __init__(self, loader: Any, seed: int, rank: int) -> None:
        self.loader, self._seed, self._rank = loader, seed, rank
        try:
            self.batches = len(loader)
        except TypeError as error:
            raise ConfigError("the loader has no length: after an interruption nobody knows which batches are left",
                              hint="use a dataset with a length, or give your loader a __len__") from error
        if self.batches < 1:
            raise ConfigError("the loader has no batches", hint="is the dataset empty, or smaller than a batch with "
                                                                "drop_last=True?")
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._next = 0

    def fetch(self, epoch: int, number: int) -> Any:
        """One batch; goes on from the last one if that is on the way, else begins the epoch again."""
        try:
            if self._iterator is None or epoch != self._epoch or number < self._next:
                self._begin(epoch)
            while self._next < number:
                self._draw()
            return self._draw()
        except StopIteration:
            self._iterator = None
            raise ConfigError(f"the loader promised {self.batches} batches and gave {self._next}") from None
        except BaseException:
            self._iterator = None
            raise

    def _begin(self, epoch: int) -> None:
        self._epoch, self._next = epoch, 0
        sampler = getattr(self.loader, "sampler", None)
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        for owner in (self.loader, sampler):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                generator.manual_seed(mix(self._seed, _ORDER, epoch))
        seed_step(mix(self._seed, _ORDER), epoch, 0)  # a sampler that shuffles draws its order with the first batch
        self._iterator = iter(self.loader)

    def _draw(self) -> Any:
        assert self._iterator is not None
        if self._next:  # datasets may draw random numbers too
            seed_step(mix(self._seed, _FETCH, self._epoch), self._next, self._rank)
        batch = next(self._iterator)
        self._next += 1
        return batch
