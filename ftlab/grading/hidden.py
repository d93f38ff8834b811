"""Checks and cases that only grading has: the module `hidden` of a lab, which is not in the bundle for students."""

from __future__ import annotations

import importlib
from typing import Any

from ftlab.errors import ConfigError

NAME = "hidden"  # of the module, in `ftlab/grading/labNN`


def hidden_part(lab: str) -> Any:
    """A lab's hidden module. Raises ConfigError where it is not there."""
    name = f"ftlab.grading.{lab}.{NAME}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(f"only the grader has the hidden checks of {lab}",
                          hint="call the check without a seed of your own") from None
