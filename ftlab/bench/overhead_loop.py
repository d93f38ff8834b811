"""The loop that `bench overhead` runs on every rank; shipped to the workers by value."""

from __future__ import annotations

import time
from typing import Any

BLOCK = 25  # steps in a row of one kind


def compare_steps(ctx: Any, steps: int, step_s: float) -> list[float]:
    """Seconds that a protected step takes more than a bare one with the same work, one figure per pair of blocks."""
    import torch

    matrix = torch.randn(192, 192)
    begin = time.perf_counter()
    for _ in range(200):
        matrix @ matrix
    rounds = max(1, round(step_s / ((time.perf_counter() - begin) / 200)))

    def work() -> None:
        for _ in range(rounds):
            matrix @ matrix

    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    ctx.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    found, bare, begin = [], 0.0, 0.0
    for step in ctx.steps(steps):
        if step % BLOCK == 0:
            if step > BLOCK:  # the first block warms up
                found.append((time.perf_counter() - begin) / BLOCK - bare)
            begin = time.perf_counter()
            for _ in range(BLOCK):
                work()
            bare, begin = (time.perf_counter() - begin) / BLOCK, time.perf_counter()
        with ctx.step():
            work()
            ctx.report(loss=1.0)
    return found
