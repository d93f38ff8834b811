"""The settings of lab 01's hidden tests. Only grading has this file: `ftlab labs pack` leaves it out."""

from __future__ import annotations

import random
from typing import Any


def settings(task: str, draw: random.Random) -> dict[str, Any]:
    """What a task is called with, drawn anew for every submission."""
    first = 10 ** draw.randrange(1, 4)  # ten, hundred or thousand: by name it comes before the one before it
    if task == "task1":
        return {"numbers": [draw.randrange(2, 5), draw.randrange(5, 9), first - 1, first]}
    if task == "task2":
        return {"epochs": [draw.randrange(20, 90)] * 2, "images": 400}
    if task == "task3":
        return {"numbers": [first - 2, first - 1, first, first + 1], "keep": 2, "images": 250}
    if task == "task4":
        every = draw.choice([6, 7])  # no multiple of the scheduler's five steps
        stop = 2 * every + draw.randrange(1, every)
        return {"seed": draw.randrange(100, 10_000), "every": every, "stop": stop, "total": stop + draw.randrange(5, 9)}
    return {"world": draw.choice([2, 4]), "epoch": first}
