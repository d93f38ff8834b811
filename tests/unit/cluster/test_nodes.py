"""What all backends' faults share."""

from __future__ import annotations

import itertools

from ftlab.cluster import nodes
from ftlab.cluster.nodes import least_use

MB = 1 << 20


def test_the_least_use_is_found_although_all_of_the_usual_look_falls_into_one_long_step():
    uses = itertools.chain(itertools.repeat(100 * MB, 40), itertools.repeat(64 * MB))  # 40 looks take 80 ms or more
    assert least_use(lambda: next(uses), seconds=0.02) == 64 * MB


def test_what_a_step_takes_and_gives_back_does_not_count():
    uses = itertools.cycle([64 * MB, 100 * MB, 90 * MB])
    assert least_use(lambda: next(uses), seconds=0.05) == 64 * MB


def test_memory_that_never_changes_is_looked_at_for_a_while_and_no_longer(monkeypatch):
    monkeypatch.setattr(nodes, "_LONGEST_LOOK_S", 0.1)
    assert least_use(lambda: 64 * MB, seconds=0.02) == 64 * MB
