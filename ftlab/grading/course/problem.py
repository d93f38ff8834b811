"""One thing that is wrong with a lab, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One line for an author."""

    where: str  # "solutions/lab01/checkpointing.ipynb task2-stub"
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.do}"
