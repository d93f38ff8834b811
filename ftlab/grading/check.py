"""The checks of all labs by their names: `check.lab01_task2(MyManager)`.

Each prints what it found and returns the points as a plain float. The student's part runs in child processes with a
deadline; a deadlock costs one cell, never the kernel. The stop button ends a check with all its processes, and the next
one begins afresh. A lab's checks are the functions `task1`, `task2`, ... in `ftlab/grading/labNN/checks.py`; those that
only grading runs are in `hidden.py` beside it. With `unseen=True` a check is called with settings that are drawn there,
for each submission anew.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable
from types import ModuleType

from ftlab.errors import ConfigError
from ftlab.grading.draws import draws
from ftlab.grading.hidden import NAME, hidden_part
from ftlab.grading.stage import Stopped, held, one_check

_NAME = re.compile(r"(lab\d\d)_(task\d+\w*)")


def names() -> list[str]:
    """All checks there are."""
    found = []
    for lab in pkgutil.iter_modules(importlib.import_module("ftlab.grading").__path__):
        if re.fullmatch(r"lab\d\d", lab.name):
            found += [f"{lab.name}_{name}" for module in _modules(lab.name) for name in vars(module)
                      if re.fullmatch(r"task\d+\w*", name)]
    return sorted(found)


def _modules(lab: str) -> list[ModuleType]:
    """Where the checks of a lab are: those that students see, and those that only grading has."""
    names = [f"ftlab.grading.{lab}.{part}" for part in ("checks", NAME)]
    return [importlib.import_module(name) for name in names if importlib.util.find_spec(name)]


def __getattr__(name: str) -> Callable[..., float]:
    if name.startswith("__"):
        raise AttributeError(name)
    match = _NAME.fullmatch(name)
    if match and importlib.util.find_spec(f"ftlab.grading.{match[1]}"):
        with held():  # a module that was imported by half, torch's above all, could not be imported again
            found = [getattr(module, match[2]) for module in _modules(match[1]) if hasattr(module, match[2])]
        if found:
            return _stoppable(found[0], match[1], match[2])
    close = difflib.get_close_matches(name, names(), 3)
    raise ConfigError(f"there is no check {name!r}", hint=f"did you mean {' or '.join(close)}?" if close else
                      f"the checks are {', '.join(names()) or 'none'}")


def _stoppable(found: Callable[..., float], lab: str, task: str) -> Callable[..., float]:
    name = f"{lab}_{task}"

    @functools.wraps(found)
    def run(*parts: object, unseen: bool = False, **settings: object) -> float:
        try:
            with one_check():
                drawn = hidden_part(lab).settings(task, draws(name)) if unseen else {}
                return found(*parts, **{**settings, **drawn})
        except KeyboardInterrupt:
            raise Stopped(f"{name} was stopped: nothing was marked. Run the cell again when you are ready.") from None
    return run


def __dir__() -> list[str]:
    return names()
