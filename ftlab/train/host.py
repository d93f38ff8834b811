"""Where training runs: alone, or as one rank of a process group. Everything that differs between the two is here.

`exchange` is the one collective of a step; `gather` and `agree` run only when something failed or is loaded. When one
of them fails, a rank is gone: nothing can be mended from inside, `broken` is set and TrainingFailed raised. Whoever
started the group (torchrun) starts it again, and training resumes from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ftlab.elastic.reduce import sum_over_ranks
from ftlab.errors import TrainingFailed

Value = TypeVar("Value")


class Host(Protocol):
    """What training needs of its surroundings; all ranks call the same methods in the same order."""

    rank: int
    world: int
    broken: bool  # the ranks cannot reach each other any more

    def exchange(self, flat: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, by rank."""

    def agree(self, value: Value) -> Value:
        """Rank 0's value, on every rank."""

    def running(self, model: nn.Module) -> AbstractContextManager[None]:
        """While this lasts the model's own passes wait for no other rank."""

    def commit(self, step: int, facts: Mapping[str, Any]) -> None:
        """A step is committed."""


def find_host() -> Host:
    """The surroundings of this process."""
    grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return GroupHost() if grouped else AloneHost()


class AloneHost:
    """One process: everything is agreed on at once."""

    def __init__(self) -> None:
        self.rank, self.world, self.broken = 0, 1, False

    def exchange(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return flat

    def gather(self, value: Value) -> list[Value]:
        """The value alone."""
        return [value]

    def agree(self, value: Value) -> Value:
        """The value itself."""
        return value

    def running(self, model: nn.Module) -> AbstractContextManager[None]:
        """A group of one is as good as none: DDP does not average either."""
        return _without_waiting(model)

    def commit(self, step: int, facts: Mapping[str, Any]) -> None:
        """Nobody else wants to know."""


class GroupHost:
    """One rank of torch.distributed's default group."""

    def __init__(self) -> None:
        self.rank, self.world, self.broken = dist.get_rank(), dist.get_world_size(), False

    def exchange(self, flat: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; the same bits on each."""
        return self._try(lambda: sum_over_ranks(flat))

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, by rank."""
        found: list[Any] = [None] * self.world
        self._try(lambda: dist.all_gather_object(found, value))
        return found

    def agree(self, value: Value) -> Value:
        """Rank 0's value, on every rank."""
        box: list[Any] = [value]
        self._try(lambda: dist.broadcast_object_list(box, src=0))
        return box[0]  # type: ignore[no-any-return]

    def running(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep DDP from meeting the other ranks: one that fails before its backward pass would be waited for."""
        return _without_waiting(model)

    def commit(self, step: int, facts: Mapping[str, Any]) -> None:
        """The others have committed it too."""

    def _try(self, collective: Callable[[], Value]) -> Value:
        try:
            return collective()
        except RuntimeError as error:  # gloo's and NCCL's errors; a rank died, or was too slow
            self.broken = True
            raise TrainingFailed(f"rank {self.rank} cannot reach the other ranks", seen=str(error)[:300],
                                 hint="a rank died: start the group again; it resumes from the newest "
                                      "checkpoint") from error


@contextlib.contextmanager
def _without_waiting(model: nn.Module) -> Iterator[None]:
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    model.require_forward_param_sync = False  # else the first forward pass still broadcasts the buffers
    try:
        with model.no_sync():
            yield
    finally:
        model.require_forward_param_sync = True
