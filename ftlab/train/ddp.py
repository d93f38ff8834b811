"""A module under DistributedDataParallel that outlives its process group.

DDP is bound to one group, so it is wrapped anew at the first forward pass of each generation; parameters, optimizer
and the wrapper object the train function holds stay the same. DDP would re-arrange its buckets after its first
backward pass, which changes the order of additions; `find_unused_parameters=True` switches that off, so that a step
gives the same bits right after a recovery as it would have given without one. Buffers are not broadcast in each forward
pass: `ctx.backward` averages them, so all ranks hold the same ones.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ftlab.messages import Place
from ftlab.train.session import Session


class ElasticDDP(nn.Module):
    """What `ctx.ddp(model)` returns; use it like the model."""

    def __init__(self, module: nn.Module, session: Session, options: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self._session = session
        self._options = {"find_unused_parameters": True, "init_sync": False, "broadcast_buffers": False, **options}
        self._wrapped: list[DistributedDataParallel] = []  # in a list: not a submodule, its parameters are ours
        self._generation = 0
        self.syncing = True  # False inside of `no_sync`
        session.wrapped = self

    @staticmethod
    def in_use(session: Session) -> bool:
        """Whether the session's model averages its gradients by itself."""
        return session.wrapped is not None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        if self._generation != self._session.generation:
            self._wrap()
        return self._wrapped[0](*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside one step without averaging them; the next backward pass averages the sum."""
        if self._generation != self._session.generation:
            self._wrap()
        self.syncing = False
        try:
            with self._wrapped[0].no_sync():
                yield
        finally:
            self.syncing = True

    def unwrap(self) -> None:
        """The group is being left: let go of it."""
        self._wrapped.clear()
        self._generation = 0

    def _wrap(self) -> None:
        if self._session.table is None:
            self._session.join()
        self._wrapped.clear()
        page, before = self._session.page, self._session.page.place
        page.move(Place.COMMUNICATING)  # DDP meets all ranks here: who waits for a late one does not stall
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._wrapped.append(DistributedDataParallel(self.module, **self._options))
        page.move(before)
        self._generation = self._session.generation
