"""The checks of all labs by their names: `check.lab01_task2(MyManager)`.

Each prints what it found and returns the points as a plain float. The student's part runs in child processes with a
deadline; a deadlock costs one cell, never the kernel. A lab's checks are the functions `task1`, `task2`, ... in
`ftlab/grading/labNN/checks.py`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable

from ftlab.errors import ConfigError

_NAME = re.compile(r"(lab\d\d)_(task\d+\w*)")


def names() -> list[str]:
    """All checks there are."""
    found = []
    for lab in pkgutil.iter_modules(importlib.import_module("ftlab.grading").__path__):
        if re.fullmatch(r"lab\d\d", lab.name) and importlib.util.find_spec(f"ftlab.grading.{lab.name}.checks"):
            module = importlib.import_module(f"ftlab.grading.{lab.name}.checks")
            found += [f"{lab.name}_{name}" for name in vars(module) if re.fullmatch(r"task\d+\w*", name)]
    return sorted(found)


def __getattr__(name: str) -> Callable[..., float]:
    if name.startswith("__"):
        raise AttributeError(name)
    match = _NAME.fullmatch(name)
    if match and importlib.util.find_spec(f"ftlab.grading.{match[1]}"):
        found = getattr(importlib.import_module(f"ftlab.grading.{match[1]}.checks"), match[2], None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    close = difflib.get_close_matches(name, names(), 3)
    raise ConfigError(f"there is no check {name!r}", hint=f"did you mean {' or '.join(close)}?" if close else
                      f"the checks are {', '.join(names()) or 'none'}")


def __dir__() -> list[str]:
    return names()
