"""A rehearsal: early in a run one step is run, taken back as in a recovery, and run again, with the same bits.

No list of mistakes is complete, so the job tests its own loop, before the first fault and at the price of two steps.
The step is first cut short where its gradients would be agreed on, as by a peer that dies there, and undone. Then it
runs to its end, is taken back by loading the state as a replacement does, and runs once more; only this last one
counts. Code before, inside and after `with ctx.step()` runs each time.

What differs cannot survive a fault either: `NotReplayable` names it. If only the last digits of the gradients differ,
a kernel is not deterministic: training goes on, and reports can say `equivalent` at best. A step that changes
parameters before one of its collectives can only be undone from a copy: if the rehearsal sees one, copies are kept.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_post_hook

from ftlab import messages
from ftlab.checkpoint.fingerprint import fingerprints
from ftlab.checkpoint.state_copy import StateCopy
from ftlab.errors import NotReplayable
from ftlab.train.gradients import StepGradients
from ftlab.train.session import Session

FIRST_STEP = 2  # by then optimizers have made their state
ROUNDING = 1e-4  # of the gradients' norm: below, a difference is taken for the order of additions


class RehearsalCut(RuntimeError):
    """Raised where a collective would begin, in the pass that is cut short; a lost peer raises a RuntimeError too."""


class Rehearsal:
    """Goes through the passes of one step: "cut", "whole", "again"."""

    def __init__(self, session: Session, gradients: StepGradients, wanted: bool) -> None:
        assert session.mender is not None
        self._session, self._gradients, self._mender = session, gradients, session.mender
        self.wanted = wanted
        self.stage = ""
        self._where = (0, 0)  # the step and the generation it is done in
        self._copy = StateCopy()
        self._needs_copy = self._calls_outside = False
        self._before: Sighting | None = None
        self._stepped: dict[int, torch.optim.Optimizer] = {}  # every optimizer that was seen at work
        self._count_at_change = -1  # how many collectives there had been when an optimizer first changed something
        self._began = 0.0
        self._unhook: Any = None

    @property
    def trial(self) -> bool:
        """Whether the present pass does not count."""
        return self.stage in ("cut", "whole")

    def begin(self, step: int) -> None:
        """A step begins, perhaps not for the first time."""
        here = (step, self._session.generation)
        if self.stage and here != self._where:
            self.stop()  # the world broke meanwhile
        if not self.stage and self.wanted and step >= FIRST_STEP and not self._mender.book.rehearsed:
            self._start(here)
        self._count_at_change = -1
        self._gradients.cut = RehearsalCut if self.stage == "cut" else None
        self._gradients.recording = self.stage in ("whole", "again")

    def pass_over(self) -> None:
        """A pass and the code behind it are done: go back, or compare."""
        state = self._session.state
        if self.stage == "cut":
            if not state.undo_by_mark() or self._copy.differences(state):
                self._needs_copy = True
                self._copy.put_back(state)
            self.stage = "whole"
        elif self.stage == "whole":
            self._look_at_collectives()
            self._before = self._look()
            self._copy.put_back(state)
            self.stage = "again"
        else:
            after, before = self._look(), self._before
            assert before is not None
            self._finish()
            self._judge(before, after)

    def stop(self) -> None:
        """Give it up; the step is done as any other."""
        self.stage = ""
        self._gradients.cut, self._gradients.recording = None, False
        self._session.state.let_go()
        if self._unhook is not None:
            self._unhook.remove()
            self._unhook = None

    def give_up(self) -> None:
        """Something else is wrong with this step: it is not tried again."""
        self.stop()
        self._mender.book.note_rehearsed(self._gradients.trained_parameters())

    # ---- the passes ----------------------------------------------------------------------------------------

    def _start(self, here: tuple[int, int]) -> None:
        state = self._session.state
        self._where, self._began = here, time.monotonic()
        if not self._session.comparison.roomy:  # a job that needs all its memory is not put at risk
            self.give_up()
            self._tell("rehearsal.skipped", reason="a copy of the state may not fit into a rank's memory")
            return
        self._copy = state.keep_copy()
        self.stage, self._needs_copy, self._calls_outside = "cut", False, False
        self._stepped = {}
        self._unhook = register_optimizer_step_post_hook(self._optimizer_stepped)

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped[id(optimizer)] = optimizer
        if self._count_at_change < 0:
            self._count_at_change = self._gradients.collectives()

    def _look_at_collectives(self) -> None:
        """Whether parameters had changed when a collective of the step began."""
        changed = self._count_at_change if self._count_at_change >= 0 else self._gradients.count_after
        self._needs_copy = self._needs_copy or self._gradients.touched or (0 <= changed < self._gradients.count_at_exit)
        self._calls_outside = self._gradients.count_at_exit - self._gradients.count_at_begin > self._gradients.counted

    def _finish(self) -> None:
        state, book = self._session.state, self._mender.book
        self.stop()
        state.copying = self._needs_copy
        book.note_rehearsed(self._gradients.trained_parameters(), copying=self._needs_copy, foreign=self._calls_outside)

    def _look(self) -> Sighting:
        captured = self._session.state.shared()
        captured.pop("step")
        return Sighting(fingerprints(captured), list(self._gradients.sums), _generators())

    # ---- the verdict ---------------------------------------------------------------------------------------

    def _judge(self, before: Sighting, after: Sighting) -> None:
        state, forgotten = self._session.state, self._forgotten()
        differ = sorted(path for path in before.state.keys() | after.state.keys()
                        if before.state.get(path) != after.state.get(path))
        apart = _distance(before.sums, after.sums)
        facts = {"seconds": round(time.monotonic() - self._began, 4), "differ": len(differ),
                 "copies": self._copy.bytes if self._needs_copy else 0, "unprotected": forgotten}
        same = not differ and apart == 0.0 and before.generators == after.generators
        if same or (0.0 < apart < ROUNDING and before.generators == after.generators):
            self._tell("rehearsal.finished", verdict="identical" if same else "equivalent", **facts)
            return
        raise NotReplayable(
            f"step {state.step} was run twice from the same state and did not end in the same bits: after a fault this "
            f"job would end wrong", seen=_name(differ, apart, before.generators != after.generators),
            hint=_likely(differ, apart, before.generators != after.generators, forgotten), tensors=differ[:50])

    def _forgotten(self) -> list[str]:
        """Optimizers that work on protected parameters and are not protected."""
        parts = {id(part) for part in self._session.state.parts.values()}
        ours = {id(parameter) for parameter in self._session.state.all_parameters()}
        return [type(optimizer).__name__ for key, optimizer in self._stepped.items() if key not in parts
                and any(id(each) in ours for group in optimizer.param_groups for each in group["params"])]

    def _tell(self, event: str, **facts: Any) -> None:
        if self._session.rank == 0:
            self._session.link.send(messages.Noted(job=self._session.ladder.job, event=event,
                                                   step=self._session.state.step, data=facts))


class Sighting:
    """What a pass ended in: the state, the gradients that were agreed on, and where the generators are."""

    def __init__(self, state: dict[str, int], sums: list[torch.Tensor], generators: int) -> None:
        self.state, self.sums, self.generators = state, sums, generators


def _generators() -> int:
    seen = xxhash.xxh3_64(repr(random.getstate()).encode())
    _, words, *rest = np.random.get_state(legacy=True)
    seen.update(np.asarray(words).tobytes() + repr(rest).encode())
    seen.update(torch.get_rng_state().numpy().data)
    return int(seen.intdigest())


def _distance(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """How far the gradients of two passes lie apart, as a share of their norm; 0: the same bits."""
    if [each.shape for each in before] != [each.shape for each in after]:
        return float("inf")
    worst = 0.0
    for one, other in zip(before, after, strict=True):
        if not torch.equal(one, other):
            norm = float(torch.linalg.vector_norm(one.double()))
            apart = float(torch.linalg.vector_norm(one.double() - other.double()))
            worst = max(worst, apart / norm if norm else float("inf"))
    return worst


def _name(differ: list[str], apart: float, drew: bool) -> str:
    shown = [*differ[:8], *([f"and {len(differ) - 8} more"] if len(differ) > 8 else [])]
    lines = [f"other bits in {', '.join(shown)}"] if shown else []
    if apart:
        lines.append(f"the gradients differ by {apart:.0e} of their norm")
    if drew:
        lines.append("another number of random numbers was drawn")
    return "; ".join(lines)


def _likely(differ: list[str], apart: float, drew: bool, forgotten: list[str]) -> str:
    if forgotten:
        return f"{' and '.join(forgotten)} changes protected parameters and is not protected: ctx.protect(name=it)"
    if apart or drew:
        return ("the step saw other data or other random numbers the second time: protect the generator, counter or "
                "loader it takes them from (ctx.protect(generator=...)), or draw them from (seed, step)")
    return ("something behind the gradients remembers more than is protected: an optimizer, a scheduler or an average "
            "whose state_dict leaves something out; protect it, or rehearse=False and no recovery is exact")
