"""The loop that `bench overhead` runs on every rank; shipped to the workers by value."""

from __future__ import annotations

import time
from typing import Any


def measure_steps(ctx: Any, steps: int, step_s: float) -> float:
    """Seconds per step that are not the step's own work: seeding, marking, committing, reporting."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 256))
    ctx.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    data = ctx.sampler(4096, global_batch=64)
    work, begin = 0.0, 0.0
    for step in ctx.steps(steps):
        if step == steps // 10:  # after the first steps
            work, begin = 0.0, time.perf_counter()
        with ctx.step():
            entered = time.perf_counter()
            data.indices(step)
            time.sleep(step_s)
            ctx.report(loss=1.0)
            work += time.perf_counter() - entered
    return (time.perf_counter() - begin - work) / (steps - steps // 10)
