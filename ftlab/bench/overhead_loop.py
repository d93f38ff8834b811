"""The loop that `bench overhead` runs on every rank; shipped to the workers by value."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ftlab.health import kernel

WARM_UP = 25  # steps that do not count


def time_steps(ctx: Any, steps: int, step_s: float) -> dict[str, Any]:
    """What lies between the work of one step and the work of the next, in seconds: in a protected loop after steps of
    work (`cold`) and after empty ones (`warm`), and in a bare loop (`bare`). And the share of a core that the worker's
    link takes meanwhile (`link`).

    The work runs by the clock: what it does to the caches counts, how long it takes does not.
    """
    import torch

    work = _work_for(step_s)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    ctx.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    gaps: dict[str, list[float]] = {"cold": [], "warm": [], "bare": []}
    link = next(thread.native_id for thread in threading.enumerate() if thread.name == "ftlab-link")
    kind, end, began = "", 0.0, (0.0, 0.0)
    for step in ctx.steps(steps):
        with ctx.step():
            begin = time.perf_counter()
            if kind:
                gaps[kind].append(begin - end)
            if step == WARM_UP:
                began = begin, _seconds_of(link)
            kind = "" if step < WARM_UP else "warm" if step % 10 == 0 else "cold"
            if kind != "warm":
                work()
            end = time.perf_counter()
            ctx.report(loss=1.0)
    took, taken = time.perf_counter() - began[0], _seconds_of(link) - began[1]
    for _ in range(WARM_UP):
        begin = time.perf_counter()
        gaps["bare"].append(begin - end)
        work()
        end = time.perf_counter()
    return {**gaps, "bare": gaps["bare"][1:], "link": [taken / took]}


def compare_monitoring(ctx: Any, steps: int, step_s: float) -> dict[str, list[float]]:
    """Seconds `more` that looking at loss and gradients adds to a step, for each pair of neighbours with and without.

    Which of the two comes first is drawn by lot: whatever else happens in every second step hits both kinds alike.
    """
    import random

    import torch

    work = _work_for(step_s)
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
        with ctx.step():
            work()
            begin = time.perf_counter()  # the work runs by the clock and would hide what comes before it
            ctx.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        taken[watched].append(time.perf_counter() - begin)
    pairs = zip(taken[True][WARM_UP:], taken[False][WARM_UP:], strict=False)
    return {"more": [watched - bare for watched, bare in pairs]}


def _work_for(step_s: float) -> Callable[[], None]:
    """Something that keeps a core busy for so long."""
    import torch

    matrix = torch.randn(192, 192)

    def work() -> None:
        end = time.perf_counter() + step_s
        while time.perf_counter() < end:
            matrix @ matrix

    return work


def _seconds_of(thread: int | None) -> float:
    """Processor time of one thread of this process; 0 where the kernel does not tell."""
    counts = kernel.read(f"/proc/self/task/{thread}/schedstat").split()
    return int(counts[0]) / 1e9 if counts else 0.0
