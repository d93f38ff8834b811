"""A tree of plain values and tensors, taken apart into a small header and a list of tensors.

The header travels as bytes, the tensors as they are, without a copy. Reading a header executes nothing: it is
loaded with torch's `weights_only`, so only plain containers, numbers and strings come out of it. `digest` is the
same for two trees exactly when they hold the same bits in the same places.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_TENSOR = "__tensor__"


@dataclass(frozen=True)
class Packed:
    """A tree taken apart: the header's bytes and the tensors it refers to, in order."""

    header: bytes
    tensors: list[torch.Tensor]


def pack(tree: Any) -> Packed:
    """Take a tree apart; the tensors are the tree's own, not copies."""
    tensors: list[torch.Tensor] = []

    def strip(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach())
            return {_TENSOR: len(tensors) - 1, "dtype": str(value.dtype).removeprefix("torch."),
                    "shape": list(value.shape)}
        return _rebuild(value, strip)

    skeleton = strip(tree)
    buffer = io.BytesIO()
    torch.save(skeleton, buffer)
    return Packed(buffer.getvalue(), tensors)


def empty_tensors(header: bytes) -> list[torch.Tensor]:
    """New tensors of the shapes and types a header asks for, to receive into."""
    slots = sorted(_slots(_read(header)), key=lambda slot: int(slot[_TENSOR]))
    return [torch.empty(slot["shape"], dtype=getattr(torch, slot["dtype"])) for slot in slots]


def unpack(packed: Packed) -> Any:
    """Put a tree together again; its tensors are those of `packed`."""

    def fill(value: Any) -> Any:
        if isinstance(value, dict) and _TENSOR in value:
            return packed.tensors[value[_TENSOR]]
        return _rebuild(value, fill)

    return fill(_read(packed.header))


def digest(tree: Any) -> str:
    """SHA-256 over structure, names, types and bits of a tree."""
    sha = hashlib.sha256()
    _feed(sha, tree)
    return sha.hexdigest()


def _read(header: bytes) -> Any:
    return torch.load(io.BytesIO(header), weights_only=True)


def _slots(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and _TENSOR in value:
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _slots(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _slots(item)


def _rebuild(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(change(item) for item in value)
    if isinstance(value, list):
        return [change(item) for item in value]
    return value


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous()
        sha.update(f"T{flat.dtype}{tuple(flat.shape)}".encode())
        sha.update(flat.reshape(-1).view(torch.uint8).numpy().data if flat.numel() else b"")
    elif isinstance(value, dict):
        sha.update(f"D{len(value)}".encode())
        for key, item in value.items():
            sha.update(repr(key).encode())
            _feed(sha, item)
    elif isinstance(value, list | tuple):
        sha.update(f"L{len(value)}".encode())
        for item in value:
            _feed(sha, item)
    else:
        sha.update(repr(value).encode())
