"""What a child of the stage has to do: one of our functions by name, with the student's parts and plain arguments."""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from ftlab.errors import ConfigError
from ftlab.grading.stage.answer import Answer, pack


@dataclass(frozen=True)
class Play:
    """`function` is "package.module:name" inside ftlab.grading; it is called as `name(*parts, **args)`.

    Parts are the student's; arguments and the value that is returned must be JSON.
    """

    function: str
    parts: tuple[Answer, ...] = ()
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.function.startswith("ftlab.grading.") or ":" not in self.function:
            raise ConfigError(f"a play names a function of ftlab.grading as 'module:name' (got {self.function!r})")

    @classmethod
    def of(cls, function: Callable[..., Any], *parts: Any, **args: Any) -> Play:
        """The play of one of our functions; student's parts are packed, unless they already are."""
        return cls(f"{function.__module__}:{function.__qualname__}", tuple(pack(each) for each in parts), args)

    @classmethod
    def of_any(cls, function: Callable[..., Any]) -> Play:
        """The play of a live function, which travels itself as if it were a student's part."""
        return cls(f"{__name__}:call", (pack(function),))

    def to_json(self) -> str:
        """For the file that a child reads."""
        parts = [base64.b64encode(each.raw).decode() for each in self.parts]
        return json.dumps({"function": self.function, "parts": parts, "args": self.args})

    @classmethod
    def from_json(cls, text: str) -> Play:
        """As it was written."""
        data = json.loads(text)
        parts = tuple(Answer("", base64.b64decode(each)) for each in data["parts"])
        return cls(data["function"], parts, data["args"])

    def perform(self, *more: Any, **others: Any) -> Any:
        """Unpickle the parts and call the function. Only ever in a child: this runs the student's code."""
        module, _, name = self.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        return function(*[cloudpickle.loads(each.raw) for each in self.parts], *more, **self.args, **others)


def ask(function: Callable[..., Any], *, args: list[Any]) -> Any:
    """Scene: what the student's function returns for these arguments."""
    return function(*args)


def call(function: Callable[[Path], Any], *args: Any) -> Any:
    """Call a function that travelled as a part."""
    return function(*args)
