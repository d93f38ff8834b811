"""A batch cut into smaller pieces, so that one that does not fit into memory is trained on bit by bit.

The gradient of a mean over B samples is the sum of the gradients of its pieces' means, each times n / B. `split` gives
every piece with that weight. Where it stops: the loss must be a mean over the batch; layers that look at the whole
batch (BatchNorm) see a smaller one; and dropout draws other numbers for pieces than for the whole.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ftlab.errors import ConfigError

_WHOLE = (type(None), bool, str, bytes, numbers.Number, torch.dtype, torch.device)  # without rows: every piece has it


def split(batch: Any, pieces: int) -> list[tuple[Any, float]]:
    """The batch in `pieces` parts of as equal sizes as possible, each with its share of the rows.

    Tensors and arrays are cut along their first dimension, also inside of tuples, lists and dicts, and so are lists of
    plain values with one for each row; numbers and strings are repeated. At most one piece per row. Raises ConfigError
    for a batch that cannot be cut.
    """
    if pieces < 1:
        raise ConfigError(f"pieces must be at least 1: nothing would be left of the batch (got {pieces})")
    if pieces == 1:
        return [(batch, 1.0)]
    rows = count_rows(batch)
    pieces = min(pieces, rows)
    parts, begin = [], 0
    for number in range(pieces):
        end = begin + rows // pieces + (number < rows % pieces)
        parts.append((_cut(batch, begin, end, rows), (end - begin) / rows))
        begin = end
    return parts


def can_cut(batch: Any) -> int:
    """Into how many pieces a batch can be cut; 1 if not at all."""
    try:
        return count_rows(batch)
    except ConfigError:
        return 1


def count_rows(batch: Any) -> int:
    """How many rows a batch has; raises ConfigError if its parts disagree or none has any."""
    found = sorted(set(_rows(batch)))
    if len(found) == 1 and found[0] > 0:
        return found[0]
    if not found:
        raise ConfigError(f"a batch without a tensor cannot be cut: {_name(batch)}",
                          hint="let the loader give tensors, or tuples, lists and dicts of them")
    if len(found) == 1:
        raise ConfigError("a batch without rows cannot be cut")
    raise ConfigError(f"a batch cannot be cut whose tensors have different numbers of rows: {found}",
                      hint="let the first dimension of every tensor be the batch")


def _rows(value: Any) -> Iterator[int]:
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim:
            yield value.shape[0]
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _rows(item)
    elif _is_container(value):
        for item in value:
            yield from _rows(item)
    elif not isinstance(value, _WHOLE):
        raise ConfigError(f"a batch with a {_name(value)} in it cannot be cut",
                          hint="let the loader give tensors, or tuples, lists and dicts of them")


def _cut(value: Any, begin: int, end: int, rows: int) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value[begin:end] if value.ndim else value
    if isinstance(value, Mapping):
        return type(value)({key: _cut(item, begin, end, rows) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        if len(value) == rows and all(isinstance(item, _WHOLE) for item in value):
            return value[begin:end]  # names, say: one for each row
        items = [_cut(item, begin, end, rows) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _is_container(value: Any) -> bool:
    """A list or tuple of things; a PackedSequence is a tuple too, but its rows are not where a cut would look."""
    return isinstance(value, list | tuple) and not isinstance(value, torch.nn.utils.rnn.PackedSequence)


def _name(value: Any) -> str:
    return type(value).__name__
