"""The parts of a training state: what can be protected, and how each kind is saved and loaded.

A part is a module, an optimizer, a dict, a random generator (torch's, NumPy's or Python's), or anything else with
`state_dict` and `load_state_dict`. What cannot come back by these is refused by name, with what to do instead.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ftlab.checkpoint.loader_position import follow_position
from ftlab.errors import ConfigError

_IN_PART = "raised in the protected part"
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def require_protectable(name: str, part: Any) -> None:
    """Raise ConfigError for something that could not be brought back."""
    if isinstance(part, dict | torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
        return
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return
    raise ConfigError(f"cannot protect {name}={type(part).__name__}: it has no state_dict() and load_state_dict()",
                      hint=_advice(part))


def _advice(part: Any) -> str:
    if isinstance(part, DataLoader):
        return ("take the samples of a step from ctx.sampler(...), or use torchdata's StatefulDataLoader, whose "
                "iterators go on at the right batch after a recovery")
    if isinstance(part, torch.Tensor):
        return "pass a module, an optimizer, a dict: ctx.protect(extras={\"name\": tensor}), and change it in place"
    if isinstance(part, Iterator):
        return "an iterator cannot go back: protect what it iterates over, or take samples from ctx.sampler(...)"
    return "pass a module, an optimizer, a dict, a random generator, or give it both"


def prepare(name: str, part: Any) -> None:
    """What a part needs before it can be protected."""
    require_protectable(name, part)
    if is_loader(part):
        follow_position(name, part)


def is_loader(part: Any) -> bool:
    """Whether a part is a data loader that knows its position. Positions are the same on every rank only as far as
    batches go: what else is in them (seeds of its workers) may differ, so they are in no digest."""
    return isinstance(part, DataLoader) and hasattr(part, "state_dict")


def is_generator(part: Any) -> bool:
    """Whether a part is a source of random numbers."""
    return isinstance(part, _GENERATORS)


def bare(part: Any) -> Any:
    """The module under DistributedDataParallel: its names do not depend on how it is trained."""
    return part.module if isinstance(part, nn.parallel.DistributedDataParallel) else part


def raised_in_part(error: BaseException) -> str:
    """In which part's state_dict or load_state_dict an exception was raised, in words; empty if in none."""
    return next((note for note in getattr(error, "__notes__", []) if note.startswith(_IN_PART)), "")


def save_part(part: Any, name: str) -> Any:
    """A tree of plain values and tensors; the tensors are the live ones."""
    if isinstance(part, dict):
        return dict(part)
    if is_generator(part):
        return _save_generator(part)
    try:
        return part.state_dict()
    except Exception as error:
        error.add_note(f"{_IN_PART} {name}: {type(part).__name__}.state_dict")
        raise


def load_part(part: Any, saved: Any, name: str) -> None:
    """Put a saved tree back into the live part."""
    if isinstance(part, dict):
        _load_dict(part, saved)
    elif is_generator(part):
        _load_generator(part, saved)
    else:
        _load_own(part, saved, name)


def _load_dict(part: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    """In place, tensors too: the train function may hold on to them."""
    items = {}
    for key, value in saved.items():
        here = part.get(key)
        if (isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor) and here.shape == value.shape
                and here.dtype == value.dtype):
            with torch.no_grad():
                here.copy_(value)
            value = here
        items[key] = value
    part.clear()
    part.update(items)


def _save_generator(part: Any) -> dict[str, Any]:
    if isinstance(part, torch.Generator):
        return {"generator": part.get_state()}
    if isinstance(part, random.Random):
        version, words, gauss = part.getstate()
        return {"python": [version, torch.tensor(words, dtype=torch.int64), gauss]}
    bits = part.bit_generator.state if isinstance(part, np.random.Generator) else part.get_state(legacy=False)
    return {"numpy": json.dumps(bits, default=lambda array: array.tolist())}  # its numbers have up to 128 bits


def _load_generator(part: Any, saved: Mapping[str, Any]) -> None:
    if isinstance(part, torch.Generator):
        part.set_state(saved["generator"])
    elif isinstance(part, random.Random):
        version, words, gauss = saved["python"]
        part.setstate((version, tuple(words.tolist()), gauss))
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = _numpy_state(saved)
    else:
        part.set_state(_numpy_state(saved))


def _numpy_state(saved: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(saved["numpy"])
    for name, value in state["state"].items():
        if isinstance(value, list):
            state["state"][name] = np.asarray(value, dtype=np.uint64 if max(value, default=0) >> 32 else np.uint32)
    return state


def _load_own(part: Any, saved: Any, name: str) -> None:
    try:
        part.load_state_dict(saved)
        if is_loader(part):
            part.state_dict()  # makes its iterator, which draws random numbers: now, before the generators are set
    except Exception as error:
        error.add_note(f"{_IN_PART} {name}: {type(part).__name__}.load_state_dict")
        raise
