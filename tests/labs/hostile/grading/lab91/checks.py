"""Two judges: the part runs in the sandbox, its answer is compared here."""

from __future__ import annotations

from typing import Any

from ftlab.grading.card import Card
from ftlab.grading.stage import Answer, Play, current_stage
from ftlab.grading.stage.play import ask

_LIMIT_S = 4.0


def task1(part: Any, *, points: float = 2.0, number: int = 21) -> float:
    """Whether it doubles."""
    return _judge("lab91_task1", part, points, number, 2 * number)


def task2(part: Any, *, points: float = 3.0, number: int = 5) -> float:
    """Whether it squares."""
    return _judge("lab91_task2", part, points, number, number * number)


def _judge(task: str, part: Any, points: float, number: int, expected: int) -> float:
    if isinstance(part, Answer) and part.absent:
        print(f"{task}: {part.absent}")
        return 0.0
    card = Card(task, points)
    outcome = current_stage().run(Play.of(ask, part, args=[number]), _LIMIT_S)
    if card.returned("it returns", outcome, _LIMIT_S):
        right = type(outcome.value) is int and outcome.value == expected
        card.expect("the number is right", right, expected=str(expected), got=outcome.value)
    return card.close(seconds=outcome.seconds)
