"""The loop that `bench overhead` runs on every rank; shipped to the workers by value."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

BLOCK = 25  # steps in a row of one kind


def compare_steps(ctx: Any, steps: int, step_s: float) -> list[float]:
    """Seconds that a typical protected step takes more than a bare one with the same work, for each pair of blocks."""
    import torch

    work = _work(step_s)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    ctx.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    found: list[float] = []
    ends: list[float] = []  # of the steps of this block
    bare = 0.0
    for step in ctx.steps(steps):
        if step % BLOCK == 0:
            if step > BLOCK:  # the first block warms up
                found.append(_typical(ends) - bare)
            ends = [time.perf_counter()]
            for _ in range(BLOCK):
                work()
                ends.append(time.perf_counter())
            bare, ends = _typical(ends), []
        with ctx.step():
            work()
            ctx.report(loss=1.0)
        ends.append(time.perf_counter())
    return found


def compare_monitoring(ctx: Any, steps: int, step_s: float) -> list[float]:
    """Seconds that looking at loss and gradients adds to a step, for each pair of neighbours with and without.

    Which of the two comes first is drawn by lot: whatever else happens in every second step hits both kinds alike.
    """
    import random

    import torch

    work = _work(step_s)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ctx.protect(model=model, optimizer=optimizer)
    inputs = torch.randn(16, 256)
    lots = random.Random(1)
    taken: dict[bool, list[float]] = {True: [], False: []}
    first = True
    for step in ctx.steps(steps):
        if step % 2 == 0:
            first = lots.random() < 0.5
        watched = ctx._gradients.judging = first == (step % 2 == 0)
        begin = time.perf_counter()
        with ctx.step():
            work()
            ctx.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        taken[watched].append(time.perf_counter() - begin)
    return [watched - bare for watched, bare in zip(taken[True][BLOCK:], taken[False][BLOCK:], strict=False)]


def _work(step_s: float) -> Callable[[], None]:
    """Something that keeps a core busy for about so long."""
    import torch

    matrix = torch.randn(192, 192)
    begin = time.perf_counter()
    for _ in range(200):
        matrix @ matrix
    rounds = max(1, round(step_s / ((time.perf_counter() - begin) / 200)))

    def work() -> None:
        for _ in range(rounds):
            matrix @ matrix

    return work


def _typical(ends: list[float]) -> float:
    return median(later - sooner for sooner, later in pairwise(ends))
