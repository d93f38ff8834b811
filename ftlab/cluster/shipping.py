"""Packing a train function for the nodes, with an error that names the thing that cannot travel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from ftlab.config import MAX_CODE_BYTES
from ftlab.errors import NotPicklable

_HINT = "make it inside the train function: each node needs its own"


def ship(train: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None,
         policy: Callable[..., Any] | None = None, manager: Any = None) -> bytes:
    """The train function, its arguments, its policy and its checkpoint manager as bytes; raises NotPicklable that names
    the culprit."""
    if not callable(train):
        raise NotPicklable(f"a train function must be callable, got {type(train).__name__}",
                           hint="def train(ctx): ...")
    try:
        raw = cloudpickle.dumps((train, args, kwargs or {}, policy, manager))
    except Exception as error:
        more = {"the checkpoint manager": manager} if manager is not None else {}
        raise _explain(train, args, {**(kwargs or {}), **more}, error) from None
    if len(raw) > MAX_CODE_BYTES:
        raise NotPicklable(f"the train function carries {len(raw) >> 20} MB with it, the limit is "
                           f"{MAX_CODE_BYTES >> 20} MB", seen=_heaviest(train), hint=_HINT)
    return bytes(raw)


def pack_own(what: str, part: Callable[..., Any]) -> bytes:
    """Somebody's own part of the control plane (a detector) as bytes; raises NotPicklable."""
    name = getattr(part, "__name__", type(part).__name__)
    if not callable(part):
        raise NotPicklable(f"a {what} of your own must be a class, got {name}",
                           hint=f"hand in the class itself: {what}=MyClass")
    try:
        return bytes(cloudpickle.dumps(part))
    except Exception as error:
        raise NotPicklable(f"{name} cannot be sent to the controller: {error}",
                           hint="open files and start threads inside of its methods") from None


def _explain(train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
             error: Exception) -> NotPicklable:
    for name, value in _captured(train, args, kwargs):
        try:
            cloudpickle.dumps(value)
        except Exception as reason:
            return NotPicklable(f"the train function uses {name!r} (a {type(value).__name__}), which cannot be sent to "
                                f"the nodes: {reason}", hint=_HINT, name=name)
    return NotPicklable(f"the train function cannot be sent to the nodes: {error}", hint=_HINT)


def _heaviest(train: Callable[..., Any]) -> str:
    sizes = []
    for name, value in _captured(train, (), {}):
        try:
            sizes.append((len(cloudpickle.dumps(value)), name))
        except Exception:
            continue
    return ", ".join(f"{name}: {size >> 20} MB" for size, name in sorted(sizes, reverse=True)[:3])


def _captured(train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values a function takes along: its globals, its closure, its defaults, its arguments."""
    function = inspect.unwrap(train)
    if inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        yield from found.nonlocals.items()
        yield from found.globals.items()
        yield from ((f"default of {name}", parameter.default)
                    for name, parameter in inspect.signature(function).parameters.items()
                    if parameter.default is not inspect.Parameter.empty)
    yield from ((f"argument {index}", value) for index, value in enumerate(args))
    yield from kwargs.items()
