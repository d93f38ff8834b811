"""`train_with_auto_recovery` inside a cluster job: the same plain `train_epoch`, with everything a train context mends.

    def train(ctx):
        model, optimizer, loader = ...
        return train_with_auto_recovery(train_epoch, model, optimizer, loader, 10, ctx=ctx)

The loader gives the batches of the whole job, the same on every rank; each rank trains on its rows of them, so the
world may change its size. A batch is a step of the context: what breaks in it (a node, numbers, memory) is healed
there, and `train_epoch` is called again for the rest of its epoch. An exception of the loop itself ends the worker,
which is started again, as everywhere in a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ftlab.errors import ConfigError
from ftlab.train.context import TrainContext
from ftlab.train.feed import Feed
from ftlab.train.microbatch import can_cut, split
from ftlab.train.rates import Rates

TrainEpoch = Callable[[Any, Any, Any], Mapping[str, Any] | None]


class ClusterLoop:
    """Stands between a loop and the train context."""

    def __init__(self, ctx: TrainContext, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, seed: int,
                 parts: Mapping[str, Any]) -> None:
        self.ctx, self.model, self.real = ctx, model, optimizer
        self.feed = Feed(loader, seed, 0)
        ctx.protect(**{"model": model, "optimizer": optimizer, **parts})
        ctx._can_split = self._can_split
        ctx._rehearsal.wanted = False  # its batches come from a feed that is replayable by itself
        self._steps: Iterator[int] = iter(())
        self._ahead: int | None = None  # a step that was begun for a later call of train_epoch
        self._open = False
        self._epoch, self._rows = 0, 1
        self._weight, self._last = 1.0, True
        self._rates: Rates | None = None

    def run(self, train_epoch: TrainEpoch, epochs: int) -> list[dict[str, Any]]:
        """All epochs that are not done yet; the metrics of each."""
        self._steps = self.ctx.steps(epochs * self.feed.batches)
        loader, optimizer = _Loader(self), _Optimizer(self)
        while (step := self._next_step()) is not None:
            self._epoch = step // self.feed.batches
            try:
                metrics = train_epoch(self.model, loader, optimizer)
                self._close()
            except Exception as error:
                if not (self._open and self.ctx.step().__exit__(type(error), error, error.__traceback__)):
                    raise
                self._open = False
                continue
            self._note(metrics)
        return self._metrics()

    # ---- the loader's side ---------------------------------------------------------------------------------

    def pieces(self) -> Iterator[Any]:
        """The rest of the epoch, piece by piece."""
        while True:
            self._close()
            step = self._next_step()
            if step is None or step // self.feed.batches != self._epoch:
                return
            self._ahead = None
            for piece, weight, last in self._begin(step):
                self._weight, self._last = weight, last
                yield piece
                if not last and self._rates is not None:
                    self._rates.put_back()

    def count(self) -> int:
        """Pieces up to the end of the epoch."""
        left = self.feed.batches - self.ctx.committed % self.feed.batches
        return left * self.ctx.pieces

    def _next_step(self) -> int | None:
        """The step to do next, which has begun; None after the last."""
        if self._ahead is None:
            self._ahead = next(self._steps, None)
        return self._ahead

    def _begin(self, step: int) -> Iterator[tuple[Any, float, bool]]:
        self.ctx.step().__enter__()
        self._open = True
        batch = self.feed.fetch(*divmod(step, self.feed.batches))
        self.ctx._begin_batch(step)
        rows = can_cut(batch)
        if rows < self.ctx.world_size:
            raise ConfigError(f"a batch of {rows} rows cannot be shared by {self.ctx.world_size} ranks",
                              hint="raise the loader's batch_size: its batches are those of the whole job")
        mine, weight = split(batch, self.ctx.world_size)[self.ctx.rank]
        self._rows = round(weight * rows)
        parts = split(mine, min(self.ctx.pieces, self._rows))
        self._rates = Rates(self.real, self.ctx._state) if len(parts) > 1 else None
        for number, (piece, share) in enumerate(parts):
            yield piece, weight * share, number == len(parts) - 1

    def _can_split(self) -> bool:
        return self._rows >= 2 * self.ctx.pieces

    def _close(self) -> None:
        """The loop is done with the batch in flight: commit it."""
        if self._open:
            self.ctx.step().__exit__(None, None, None)
            self._open = False

    def _note(self, metrics: Mapping[str, Any] | None) -> None:
        """Keep what train_epoch returned, if its epoch is over."""
        if self.ctx.committed // self.feed.batches > self._epoch:
            found = {str(name): float(value) for name, value in (metrics or {}).items()}
            self.ctx._mender.book.notes["metrics"] = [*self._metrics()[:self._epoch], found]

    def _metrics(self) -> list[dict[str, Any]]:
        """Each rank has its own, so they only ride with the state, and are no part of it."""
        return list(self.ctx._mender.book.notes.get("metrics", []))

    # ---- the optimizer's side ------------------------------------------------------------------------------

    def step(self) -> None:
        """Sum over ranks and pieces, judge, and step, if this is the batch's last piece."""
        if not self._open:
            raise ConfigError("optimizer.step() belongs into the loop over the loader")
        self.ctx._gradients.take(self._weight, None, self._last)
        if self._last:
            self.real.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, also those of earlier batches."""
        self.ctx._gradients.drop_held()
        self.real.zero_grad(set_to_none)


class _Loader:
    """What the loop takes for its loader."""

    def __init__(self, loop: ClusterLoop) -> None:
        self._loop = loop

    def __iter__(self) -> Iterator[Any]:
        return self._loop.pieces()

    def __len__(self) -> int:
        return self._loop.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop.feed.loader, name)


class _Optimizer:
    """What the loop takes for its optimizer."""

    def __init__(self, loop: ClusterLoop) -> None:
        self._loop = loop

    @property  # type: ignore[misc]  # schedulers and scalers ask with isinstance whether this is an Optimizer
    def __class__(self) -> type:
        return type(self._loop.real)

    def step(self) -> None:
        """Commit the batch."""
        self._loop.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self._loop.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop.real, name)
