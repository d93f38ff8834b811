"""Fingerprints of a captured state, by name: equal bits give equal fingerprints, and a difference can be named.

A look at everything costs as much as reading it. Ranks that compare themselves now and then look at one stripe of
each large tensor, another one each time: what differs in a few numbers only is found by the last stripe at the latest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from ftlab.checkpoint import tree

STRIPES = 16
_SMALL = 1 << 16  # bytes: a tensor of up to this size is always looked at as a whole


def leaves(captured: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a tree with its place, such as `model.0.weight`."""
    items = captured.items() if isinstance(captured, dict) else enumerate(captured) \
        if isinstance(captured, list | tuple) else None
    if items is None:
        yield path.removeprefix("parts."), captured
        return
    for key, value in items:
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def same_bits(one: Any, other: Any) -> bool:
    """Whether two values are the same to the last bit (NaN equals NaN)."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))
    return type(one) is type(other) and repr(one) == repr(other)


def fingerprints(captured: Any, stripe: int | None = None) -> dict[str, int]:
    """Of every value, by place; with `stripe` only that part of the large tensors is looked at."""
    return {path: _fingerprint(value, stripe) for path, value in leaves(captured)}


def combined(prints: dict[str, int]) -> int:
    """One number for all of them."""
    return xxhash.xxh3_64(repr(prints).encode()).intdigest() >> 1


def _fingerprint(value: Any, stripe: int | None) -> int:
    if not isinstance(value, torch.Tensor):
        return xxhash.xxh3_64(repr(value).encode()).intdigest()
    flat = _bytes(value)
    if stripe is not None and len(flat) > _SMALL:
        length = -(-len(flat) // STRIPES)
        flat = flat[stripe * length:(stripe + 1) * length]
    return xxhash.xxh3_64(flat.numpy().data, seed=value.dim()).intdigest()


def _bytes(value: torch.Tensor) -> torch.Tensor:
    whole: Any = value.detach()
    whole = whole.to_local() if tree.is_sharded(value) else whole
    flat: torch.Tensor = whole.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
