"""Which save a sharded job goes on from: all shards of one save, wherever they are."""

from __future__ import annotations

from typing import Any

import pytest

from ftlab.train.sharded import choose_save


def card(rank: int, step: int, world: int = 3, tag: str = "a") -> dict[str, Any]:
    return {"rank": rank, "step": step, "world": world, "tag": tag}


def chosen(*everyone: list[dict[str, Any]]) -> tuple[int, dict[int, int]] | None:
    found = choose_save(everyone)
    return (found.step, found.holders) if found else None


@pytest.mark.parametrize(("everyone", "expected"), [
    ([[], [], []], None),
    ([[card(0, 10)], [card(1, 10)], [card(2, 10)]], (10, {0: 0, 1: 1, 2: 2})),
    ([[card(0, 10)], [card(1, 10)], []], None),
    ([[card(0, 10), card(2, 10)], [card(1, 10)], []], (10, {0: 0, 1: 1, 2: 0})),  # rank 2 is new: rank 0 has it
    ([[card(0, 20), card(0, 10)], [card(1, 10), card(0, 20)], [card(2, 20), card(2, 10), card(1, 10)]],
     (10, {0: 0, 1: 1, 2: 2})),  # step 20 misses rank 1's
    ([[card(0, 20), card(0, 10)], [card(1, 20), card(1, 10)], [card(2, 20), card(2, 10)]],
     (20, {0: 0, 1: 1, 2: 2})),
    ([[card(0, 10, tag="a")], [card(1, 10, tag="b")], [card(2, 10, tag="b")]], None),  # not of one save
    ([[card(1, 10), card(0, 10)], [card(1, 10)], [card(2, 10)]], (10, {0: 0, 1: 1, 2: 2})),  # its own rank's first
    ([[card(0, 10), card(2, 10)], [card(1, 10)]], (10, {0: 0, 1: 1, 2: 0})),  # the world has shrunk
])
def test_the_newest_save_that_is_whole_is_chosen(everyone, expected):
    assert chosen(*everyone) == expected
