"""One digest for any value, so that two processes can compare what they loaded without sending it.

Values that are equal, in the same types, have equal digests: dicts and sets do not depend on order, tensors and arrays
count bit by bit, and other objects are taken apart the way pickle would. Runs where the student's code runs, never in
the grader's process.
"""

from __future__ import annotations

import hashlib
import sys
from types import BuiltinFunctionType, FunctionType
from typing import Any

_MAX_REPR = 300


def digest(value: Any) -> str:
    """SHA-256 over the canonical form of a value."""
    return _digest(value, {}).hex()


def short_repr(value: Any) -> str:
    """What a student sees of a value: its repr, on one line and not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_REPR else text[:_MAX_REPR - 1] + "…"


def _digest(value: Any, seen: dict[int, int]) -> bytes:
    """`seen` holds the containers around this value: a value inside itself counts by how deep it was first met."""
    if id(value) in seen:
        return _hash("again", str(seen[id(value)]).encode())
    bits = _bits(value)
    if bits is not None:
        return _hash(*bits)
    inner = {**seen, id(value): len(seen)}
    kind = type(value).__name__
    if isinstance(value, dict):
        pairs = (_digest(key, inner) + _digest(item, inner) for key, item in value.items())
        return _hash("dict", *sorted(pairs))
    if isinstance(value, set | frozenset):
        return _hash("set", *sorted(_digest(item, inner) for item in value))
    if isinstance(value, list | tuple):
        return _hash(kind, *(_digest(item, inner) for item in value))
    return _hash(kind, *_parts(value, inner))


def _bits(value: Any) -> tuple[str, bytes] | None:
    """(kind, bytes) of a value that has no parts; None for all others."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous()
        raw = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return f"tensor {flat.dtype} {tuple(flat.shape)}", raw
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype != object:
        return f"array {value.dtype} {value.shape}", value.tobytes()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | bytearray):
        return type(value).__name__, repr(value).encode()
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return "name", f"{value.__module__}.{value.__qualname__}".encode()
    return None


def _parts(value: Any, seen: dict[int, int]) -> list[bytes]:
    """The parts pickle would take an object into: how to make it, its state, its items."""
    return [_digest(list(part) if hasattr(part, "__next__") else part, seen) for part in value.__reduce_ex__(4)]


def _hash(kind: str, *parts: bytes) -> bytes:
    """Every part with its length, so that no two values run into the same bytes."""
    sha = hashlib.sha256(kind.encode())
    for part in parts:
        sha.update(f":{len(part)}:".encode())
        sha.update(part)
    return sha.digest()
