"""A tree of plain values and tensors, taken apart into a small header and a list of tensors.

The header travels as bytes, the tensors as they are, without a copy. Reading a header executes nothing: it is
loaded with torch's `weights_only`, so only plain containers, numbers and strings come out of it. `digest` is the
same for two trees exactly when they hold the same bits in the same places.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from ftlab.errors import ConfigError

_TENSOR = "\0tensor"  # the key of a tensor's place in a header; nobody's own keys begin with a NUL
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class Piece:
    """Where a rank's part of a sharded tensor belongs in the whole."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    placements: tuple[str, ...]  # "S0": sharded along dimension 0; "R": replicated


@dataclass(frozen=True)
class Packed:
    """A tree taken apart: the header's bytes and the tensors it refers to, in order."""

    header: bytes
    tensors: list[torch.Tensor]
    pieces: dict[int, Piece] = field(default_factory=dict)  # of the tensors that are sharded, by their index


def pack(tree: Any) -> Packed:
    """Take a tree apart; the tensors are the tree's own, not copies. Raises ConfigError for what cannot travel."""
    tensors: list[torch.Tensor] = []
    pieces: dict[int, Piece] = {}

    def strip(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return _rebuild(value, strip)
        index, more = len(tensors), {}
        if is_sharded(value):
            value, pieces[index] = _local_piece(value)
            more = {"piece": asdict(pieces[index])}
        tensors.append(value.detach())
        return {_TENSOR: index, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), **more}

    skeleton = strip(tree)
    buffer = io.BytesIO()
    torch.save(skeleton, buffer)
    return Packed(buffer.getvalue(), tensors, pieces)


def is_sharded(value: Any) -> bool:
    """Whether a tensor is spread over ranks (a DTensor, as FSDP2 makes them)."""
    return hasattr(value, "to_local") and hasattr(value, "device_mesh")


def _local_piece(value: Any) -> tuple[torch.Tensor, Piece]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # only sharded jobs need it

    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    placements = tuple(f"S{each.dim}" if each.is_shard() else "R" for each in value.placements)
    return value.to_local(), Piece(tuple(value.shape), tuple(offset), placements)


@dataclass(frozen=True)
class Slot:
    """A tensor's place in a header."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    piece: Piece | None = None  # if it is a part of a sharded tensor

    @property
    def bytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def slots(header: bytes) -> list[Slot]:
    """The tensors a header asks for, in order."""
    found = sorted(_slots(_read(header)), key=lambda slot: int(slot[_TENSOR]))
    return [Slot(tuple(slot["shape"]), getattr(torch, slot["dtype"]),
                 Piece(**slot["piece"]) if "piece" in slot else None) for slot in found]


def empty_tensors(header: bytes) -> list[torch.Tensor]:
    """New tensors of the shapes and types a header asks for, to receive into."""
    return [torch.empty(slot.shape, dtype=slot.dtype) for slot in slots(header)]


def unpack(packed: Packed) -> Any:
    """Put a tree together again; its tensors are those of `packed`."""

    def fill(value: Any) -> Any:
        if isinstance(value, dict) and _TENSOR in value:
            return packed.tensors[value[_TENSOR]]
        return _rebuild(value, fill)

    return fill(_read(packed.header))


def digest(tree: Any) -> str:
    """SHA-256 over structure, names, types and bits of a tree; with sharded tensors all ranks must ask for it."""
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
    """A container with its items changed; numpy's numbers become Python's. Raises ConfigError for anything else."""
    if isinstance(value, dict):
        items = {key: change(item) for key, item in value.items()}
        return type(value)(items) if type(value) in (Counter, OrderedDict) else items
    if isinstance(value, tuple):
        return tuple(change(item) for item in value)
    if isinstance(value, list):
        return [change(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, _PLAIN):
        return value
    raise ConfigError(f"a {type(value).__name__} cannot be part of the training state: {str(value)[:80]!r}",
                      hint="use numbers, strings, lists, dicts and tensors (torch.from_numpy for arrays)")


def _feed(sha: Any, value: Any) -> None:
    """Every value with its type and its length, so that no two trees run into the same bytes."""
    if isinstance(value, torch.Tensor):
        whole: Any = value.detach()
        flat = (whole.full_tensor() if is_sharded(value) else whole).cpu().contiguous()
        _feed_bytes(sha, "tensor", f"{flat.dtype}{tuple(flat.shape)}".encode())
        sha.update(flat.reshape(-1).view(torch.uint8).numpy().data if flat.numel() else b"")
    elif isinstance(value, dict):
        _feed_bytes(sha, "dict", str(len(value)).encode())
        for key, item in value.items():
            _feed(sha, key)
            _feed(sha, item)
    elif isinstance(value, list | tuple):
        _feed_bytes(sha, "list" if isinstance(value, list) else "tuple", str(len(value)).encode())
        for item in value:
            _feed(sha, item)
    else:
        plain = value.item() if isinstance(value, np.generic) else value
        _feed_bytes(sha, type(plain).__name__, repr(plain).encode())


def _feed_bytes(sha: Any, kind: str, raw: bytes) -> None:
    sha.update(f"{kind}:{len(raw)}:".encode())
    sha.update(raw)
