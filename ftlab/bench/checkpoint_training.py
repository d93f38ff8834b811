"""What do saves cost the training behind whose back they are written? Blocks of steps with one save and blocks of the
same steps without, in turn in one run, on one torch thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
import torch

from ftlab.bench.checkpoint_methods import Workload
from ftlab.checkpoint.manager import CheckpointManager

EVERY = 50  # steps from one save to the next
STEP_S = 0.02
_WARM = 2  # pairs that do not count: the manager copies into two buffers in turn


@dataclass
class _Block:
    """The steps between two saves."""

    ends: list[float] = field(default_factory=list)  # when each step was over
    steps: list[float] = field(default_factory=list)  # how long each took
    seconds: float = 0.0  # all together, the save included
    blocking: float = 0.0  # of its save


def bench_training(folder: Path, megabytes: float, pairs: int,
                   say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The share of time that saving takes from a training loop, over all steps and over those during a save."""
    load, durable = Workload.of(megabytes), [0.0]

    def note(kind: str, facts: dict[str, Any]) -> None:
        if kind == "checkpoint.committed":
            durable[0] = time.perf_counter()

    overall, during, blocking, lasted, others = [], [], [], [], []
    with _one_thread(), CheckpointManager(str(folder), every=EVERY, on_event=note) as manager:
        work = _calibrated()
        for pair in range(1 - _WARM, pairs + 1):
            say(f"training with saves of {megabytes:g} MB: {max(0, pair)}/{pairs}")

            def save(step: int = pair) -> None:
                manager.save(load.parts(), step + _WARM)

            blocks, busy, start = {}, _others_s(), time.perf_counter()
            for saves in ((True, False), (False, True))[pair % 2]:
                os.sync()
                begin = time.perf_counter()
                blocks[saves] = _run(work, save if saves else None)
                manager.wait()
                if saves and pair > 0:
                    lasted.append(durable[0] - begin)
            if pair > 0:
                overall.append(blocks[True].seconds / blocks[False].seconds - 1)
                during.append(_slowdown(blocks[True], blocks[False], durable[0]))
                blocking.append(blocks[True].blocking)
                others.append((_others_s() - busy) / (time.perf_counter() - start))
    return {"size_mb": megabytes, "step_s": STEP_S, "every_steps": EVERY, "pairs": pairs,
            "overall_share": round(median(overall), 4), "during_save_share": round(median(during), 4),
            "blocking_s": round(median(blocking), 5), "save_s": round(median(lasted), 4),
            "others_cores": round(median(others), 2), "others": [round(each, 2) for each in others],
            "overall_shares": [round(each, 4) for each in overall],
            "during_save_shares": [round(each, 4) for each in during]}


def _run(work: Callable[[], None], save: Callable[[], None] | None) -> _Block:
    block = _Block()
    begin = now = time.perf_counter()
    if save is not None:
        save()
        now = time.perf_counter()
        block.blocking = now - begin
    for _ in range(EVERY):
        work()
        block.ends.append(time.perf_counter())
        block.steps.append(block.ends[-1] - now)
        now = block.ends[-1]
    block.seconds = now - begin
    return block


def _slowdown(saving: _Block, bare: _Block, durable: float) -> float:
    """How much longer the steps took that were over before the save was, than the same steps without a save."""
    count = max(1, sum(end <= durable for end in saving.ends))
    return fmean(saving.steps[:count]) / fmean(bare.steps[:count]) - 1


def _calibrated() -> Callable[[], None]:
    """Work of one step's length on this machine."""
    matrix = torch.randn(256, 256)

    def multiply(rounds: int) -> float:
        begin = time.perf_counter()
        for _ in range(rounds):
            matrix @ matrix
        return time.perf_counter() - begin

    multiply(200)
    rounds = max(1, round(STEP_S / median(multiply(50) / 50 for _ in range(20))))

    def work() -> None:
        multiply(rounds)

    return work


def _others_s() -> float:
    """Processor time that everybody else on this machine has taken: saves are only free where a core is."""
    all_of_it, mine = psutil.cpu_times(), os.times()
    return float(all_of_it.user + all_of_it.nice + all_of_it.system - mine.user - mine.system)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
