"""Ranks that hold the same state compare it: a difference is an error, before it is saved or handed on.

Compared are fingerprints of all that is protected: after the first steps, at every checkpoint, after every recovery,
and every so many steps that it costs less than a thousandth of the time. A comparison happens right after a step was
committed, when a peer that dies in it costs nothing. At the end of a job the controller compares whole digests.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ftlab.checkpoint.fingerprint import STRIPES, combined, fingerprints
from ftlab.checkpoint.state import TrainingState
from ftlab.config import CheckpointConfig, every_steps
from ftlab.elastic.seeding import mix
from ftlab.errors import RanksDiverged
from ftlab.health.memory import find_limits, tightest

SHARE = 0.001  # of the time
_SELDOM, _OFTEN = 5000, 50  # steps
_COPIES = 12  # times the parameters: a copy of them with an optimizer's state and gradients, and of what is loaded back


class RankComparison:
    """Knows when the next comparison is due, which all ranks must know alike."""

    def __init__(self, state: TrainingState, checkpoint: CheckpointConfig | None) -> None:
        self._state = state
        self._saves = every_steps(checkpoint.every) if checkpoint else None
        self._next = 1
        self._alike = 0  # the newest step that was compared
        self._last = (0, 0.0)  # the step and the time of the last comparison
        self.roomy = True  # every rank had memory for a copy of the state when this generation began

    def due(self, step: int) -> bool:
        """Whether ranks compare after this step; asked in every step."""
        return step >= self._next or (self._saves is not None and step % self._saves == 0)

    def begin_generation(self) -> None:
        """All ranks are there: compare, and look whether there is memory for a copy of the state everywhere."""
        size = sum(each.numel() * each.element_size() for each in self._state.all_parameters())
        self.roomy = tightest(find_limits()).free_bytes > _COPIES * size
        self.compare()
        self._next = self._state.step + 1  # what is wrong shows in the first step

    def compare(self) -> None:
        """Compare with all ranks; raises RanksDiverged on all of them."""
        if not dist.is_initialized() or dist.get_world_size() == 1 or self._state.sharded:
            self._next = self._state.step + _SELDOM
            return
        step, begin = self._state.step, time.monotonic()
        prints = fingerprints(self._state.shared(), mix(step) % STRIPES)
        cost = time.monotonic() - begin
        mine = torch.tensor([combined(prints), self._interval(step, begin, cost), self.roomy])
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        if len({int(row[0]) for row in rows}) > 1:
            self._explain(prints)
        self.roomy = all(bool(row[2]) for row in rows)
        self._alike, self._last = step, (step, time.monotonic())
        self._next = step + max(int(row[1]) for row in rows)

    def _interval(self, step: int, now: float, cost: float) -> int:
        before, then = self._last
        if not then or step <= before:
            return _OFTEN
        per_step = (now - then) / (step - before)
        return max(_OFTEN, min(_SELDOM, int(cost / (SHARE * per_step)) + 1))

    def _explain(self, prints: dict[str, int]) -> None:
        everyone: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, prints)
        places = sorted({place for each in everyone for place in each})
        differ = [place for place in places if len({each.get(place) for each in everyone}) > 1]
        step = self._state.step
        raise RanksDiverged(
            f"the ranks hold different states at step {step}; up to step {self._alike} they were the same",
            seen=f"{len(differ)} of {len(places)} values differ: {', '.join(differ[:8])}"
                 f"{', ...' if len(differ) > 8 else ''}",
            hint="average gradients with ctx.backward(loss), not loss.backward(); protect only what is the same on "
                 "every rank, and change it alike", tensors=differ[:50], step=step, alike=self._alike)
