"""An exam whose scenarios take several plays, often in new folders: one process saves, another one loads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ftlab.grading.card import own_frames
from ftlab.grading.exam import SECONDS, Exam
from ftlab.grading.lab01 import scenes
from ftlab.grading.lab01.truth import Truth
from ftlab.grading.stage import Outcome, Play, current_stage

_MODULES = ("torch._dynamo", "ftlab.grading.lab01.groups")  # torch.optim imports the first one, which takes seconds
EMPTY = "NotImplementedError: a stub is still empty"


class Trial(Exam):
    """Runs plays with a student's parts and notes findings; each scenario has a key by which it can be run alone."""

    def __init__(self, task: str, points: float, *parts: Any, only: str = "") -> None:
        super().__init__(task, points, *parts, only=only)
        self.parts = self._parts
        self.cost: dict[str, Any] = {}
        self._begin = time.monotonic()
        self._folders, self._hung = 0, False
        if not self.absent:
            current_stage().need(*_MODULES)

    def wants(self, key: str) -> bool:
        """Whether this scenario is to be run."""
        self.known.append(key)
        return not self.absent and self.only in ("", key)

    def folder(self) -> str:
        """A new empty folder."""
        self._folders += 1
        return str(current_stage().new_folder(f"{self.task}-{self._folders}"))

    def play(self, scene: Callable[..., Any], *, seconds: float = SECONDS, own: bool = True, **args: Any) -> Outcome:
        """Perform a scene with the student's parts (`own`), or one of ours alone; none after one that hung."""
        if self._hung:
            return Outcome(raised="not tried, as an earlier scenario did not end")
        outcome = current_stage().run(Play.of(scene, *(self.parts if own else ()), **args), seconds)
        self._hung = outcome.late
        return outcome

    def save(self, truth: Truth, folder: str, keep: int = 100) -> Outcome:
        """Have the states of a truth saved by a child of their own."""
        return self.play(scenes.save_states, folder=folder, states=truth.states, losses=truth.losses, keep=keep)

    def judge(self, key: str, scenario: str, outcomes: Sequence[Outcome], problem: Callable[..., str], *,
              expected: str, look: str, weight: float = 1.0) -> bool:
        """Note how a scenario went: `problem` is called with the outcomes' values and gives "" or what is wrong."""
        bad = next((each for each in outcomes if not each.ok), None)
        if bad is not None:
            got = _trouble(bad)
        else:
            try:
                got = problem(*(each.value for each in outcomes))
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                got = f"an answer that makes no sense here ({type(error).__name__}: {error})"
        return self.note(key, scenario, got, expected=expected, look=look, weight=weight)

    def note(self, key: str, scenario: str, got: str, *, expected: str, look: str, weight: float = 1.0) -> bool:
        """Note a scenario; it went well if `got` is empty."""
        return self.card.expect(scenario, not got, expected=expected, got=got, look=look, weight=weight,
                                repeat=self._repeat(key))

    def finish(self) -> float:
        """Print the card and give the points."""
        self.seconds = time.monotonic() - self._begin
        return self.close(**self.cost)


def _trouble(outcome: Outcome) -> str:
    if outcome.raised.startswith("NotImplementedError"):
        return EMPTY
    return "\n".join([outcome.trouble(SECONDS), *own_frames(outcome.traceback)])
