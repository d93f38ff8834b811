"""Iterators that follow their loader: when a stateful loader is put back to an earlier batch, so are they.

`loader.load_state_dict` alone moves only iterators that are made afterwards; the one that a train function holds would
go on where it was. A protected loader hands out iterators that look, before each batch, whether it was moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ftlab.errors import ConfigError


def follow_position(name: str, loader: Any) -> None:
    """Make the iterators of this loader follow it; raises ConfigError if one was made before."""
    if getattr(type(loader), "follows_position", False):
        return
    if getattr(loader, "_iterator", None) is not None:
        raise ConfigError(f"an iterator over {name} was made before ctx.protect: it would not go back after a recovery",
                          hint=f"call iter({name}) after ctx.protect({name}={name})")
    loader.__class__ = _following(type(loader))
    loader.moves = 0


def _following(kind: type) -> type:
    class Following(kind):
        follows_position = True

        def __iter__(self) -> Iterator[Any]:
            return _FollowingIterator(self, super().__iter__)

        def load_state_dict(self, saved: Any) -> None:
            super().load_state_dict(saved)
            self.moves += 1

    Following.__name__, Following.__qualname__ = kind.__name__, kind.__qualname__
    return Following


class _FollowingIterator:
    """What a train function holds: asks the loader for a new iterator whenever it was moved."""

    def __init__(self, loader: Any, make: Callable[[], Iterator[Any]]) -> None:
        self._loader, self._make = loader, make
        self._moves, self._batches = loader.moves, make()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._moves != self._loader.moves:
            self._moves, self._batches = self._loader.moves, self._make()
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
