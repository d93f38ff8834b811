"""A student's part (a class or a function) as bytes that only a child of the stage unpickles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cloudpickle

from ftlab.config import MAX_CODE_BYTES
from ftlab.errors import NotPicklable


@dataclass(frozen=True)
class Answer:
    """A part by its name; `absent` says why there is none (its cell raised, was left empty, or is gone)."""

    name: str
    raw: bytes = b""
    absent: str = ""


def pack(part: Any) -> Answer:
    """The part as an Answer; one that is an Answer already is left as it is. Raises NotPicklable."""
    if isinstance(part, Answer):
        return part
    name = getattr(part, "__name__", type(part).__name__)
    try:
        raw = bytes(cloudpickle.dumps(part))
    except Exception as error:
        raise NotPicklable(f"{name} runs in another process and cannot be sent there: {error}",
                           hint="open files and start threads inside of its methods") from None
    if len(raw) > MAX_CODE_BYTES:
        raise NotPicklable(f"{name} carries {len(raw) >> 20} MB with it, the limit is {MAX_CODE_BYTES >> 20} MB",
                           hint="make large things inside of it")
    return Answer(name=name, raw=raw)
