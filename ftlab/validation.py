"""Checks of what callers hand in: every value against its annotation, every name against those that exist.

A wrong value is a ConfigError that names the argument, says what would be right and what was given, before anything is
done with it. `Checked` does so for all fields of a dataclass; `check` does it for one argument of a function.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields
from difflib import get_close_matches
from typing import Any, Self, TextIO, Union, cast, get_args, get_origin, get_type_hints

from ftlab.errors import ConfigError

_WORDS: dict[Any, str] = {int: "a whole number", float: "a finite number", str: "text", bool: "True or False",
                          type(None): "None", Callable: "something that can be called",
                          TextIO: "something with a write method"}


class Checked:
    """The base of settings: dataclasses whose names and values are checked when they are made."""

    def __new__(cls, *values: Any, **given: Any) -> Self:
        """Refuse what has no name, or one that nobody knows."""
        if values:
            raise ConfigError(f"{cls.__name__} takes its settings by name (got {values[0]!r} without one)")
        check_names(given, [each.name for each in fields(cls)], cls.__name__)  # type: ignore[arg-type]
        return super().__new__(cls)

    def check_types(self) -> None:
        """Every field against its annotation; numbers of other libraries and paths become plain ones."""
        for name, kind in _annotations(cast(Any, type(self))).items():
            object.__setattr__(self, name, check(name, getattr(self, name), kind))

    def require(self, holds: bool, message: str) -> None:
        """Raise a ConfigError with this message unless the condition holds."""
        if not holds:
            raise ConfigError(message)

    def require_positive(self, *names: str) -> None:
        """The same for numbers that must exceed 0."""
        for name in names:
            self.require(getattr(self, name) > 0, f"{name} must be positive (got {getattr(self, name)})")

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-able data."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The settings that `to_dict` described."""
        return cls(**data)


def check(name: str, value: Any, kind: Any) -> Any:
    """The value of an argument, as plain as its kind is; raises ConfigError if it is of another kind."""
    for each in _alternatives(kind):
        if _fits(value, each):
            return _plain(value, each)
    raise ConfigError(f"{name} must be {describe_kind(kind)}: got {value!r}")


def check_least(name: str, value: Any, least: int) -> int:
    """A whole number that is not less than another one."""
    number = int(check(name, value, int))
    if number < least:
        raise ConfigError(f"{name} must be at least {least} (got {number})")
    return number


def check_seconds(name: str, value: Any) -> float:
    """A time to wait for; it may be nothing, but not negative."""
    seconds = float(check(name, value, float))
    if seconds < 0:
        raise ConfigError(f"{name} must not be negative: it is a number of seconds (got {seconds:g})")
    return seconds


def check_names(given: Collection[str], known: Collection[str], whose: str) -> None:
    """Raise ConfigError for the first name that nobody knows, with the one that was probably meant."""
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}: {whose} has none of this name", hint=suggest(name, known))


def suggest(name: str, known: Collection[str]) -> str:
    """The name that was probably meant, or all there are."""
    close = get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"


def describe_kind(kind: Any) -> str:
    """An annotation in words: `a whole number or None`."""
    return " or ".join(dict.fromkeys(_word(each) for each in _alternatives(kind)))


def _word(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is tuple:
        return f"a list of {_word(get_args(kind)[0])}s".replace("texts", "strings")
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, value = get_args(kind)
        return "a dict" if value is Any else f"a dict from {_word(key)} to {_word(value)}"
    return _WORDS.get(origin, f"a {getattr(origin, '__name__', origin)}")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if kind is Any:
        return True
    if origin is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if origin is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if origin is str:
        return isinstance(value, str | os.PathLike)
    if origin is tuple:
        wanted = get_args(kind)[0]
        return isinstance(value, list | tuple) and all(_fits(each, wanted) for each in value)
    if origin is Callable:
        return callable(value)
    if origin is TextIO:
        return callable(getattr(value, "write", None))
    if issubclass(origin, Mapping):
        key, item = get_args(kind)
        return isinstance(value, Mapping) and all(_fits(k, key) and _fits(v, item) for k, v in value.items())
    return isinstance(value, origin)


def _plain(value: Any, kind: Any) -> Any:
    if kind in (int, float) and type(value) not in (int, float):
        return kind(value)  # such as NumPy's
    if kind is str and not isinstance(value, str):
        return os.fspath(value)
    return tuple(value) if get_origin(kind) is tuple else value


@functools.cache
def _annotations(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}
