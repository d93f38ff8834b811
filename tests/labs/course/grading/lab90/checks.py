"""Two checks that judge live functions on the spot: what is tested with them is the way around, not the judging."""

from __future__ import annotations

from collections.abc import Callable

from ftlab.grading.card import Card


def task1(part: Callable[[int], int], *, points: float = 2.0, number: int = 21) -> float:
    """Whether it doubles."""
    card = Card("lab90_task1", points)
    card.expect("a number is doubled", _value(part, number) == 2 * number, expected=str(2 * number))
    return card.close()


def task2(part: Callable[[int], int], *, points: float = 3.0) -> float:
    """Whether it squares, negative numbers too."""
    card = Card("lab90_task2", points)
    card.expect("a number is squared", _value(part, 4) == 16, weight=2, expected="16")
    card.expect("a negative number is squared", _value(part, -3) == 9, expected="9")
    return card.close()


def _value(part: Callable[[int], int], number: int) -> int | str:
    try:
        return part(number)
    except Exception as error:
        return repr(error)
