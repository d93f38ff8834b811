"""One check at work: the student's parts, the scenes they are put into, the card that is filled in, what it cost.

    exam = Exam("lab02_task1", points, monitor, only=only)
    for case in CASES:
        if exam.wants(case.name) and (seen := exam.see(case.name, scenes.look, losses=case.losses)):
            exam.expect(case.name, seen.value == case.answers, expected=..., got=seen.value, look=...)
    return exam.close()

A part that is not there (its cell raised or is empty) fails everything without a single scene; so does one that cannot
be sent to another process.
"""

from __future__ import annotations

import contextlib
import difflib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ftlab.errors import ConfigError, NotPicklable
from ftlab.grading.card import Card
from ftlab.grading.stage import Answer, Outcome, Play, current_stage, pack

SECONDS = 60.0  # for one scene; generous, since machines are busy: only what never ends reaches it


class Exam:
    """Puts parts into scenes and notes how that went."""

    def __init__(self, task: str, points: float, *parts: Any, only: str = "", needs: Sequence[str] = (),
                 names: Sequence[str] = ()) -> None:
        """`needs` names modules of ours that scenes import and that take long: the stage imports them once. `names` are
        those of the parts in the notebook, where a part does not know its own."""
        self.task, self.only, self._names = task, only, tuple(names)
        self.known: list[str] = []  # the scenarios that were asked for
        self.card, self.seconds = Card(task, points), 0.0
        self._parts = tuple(_packed(part) for part in parts)
        absent = [f"{part.name}: {part.absent}" for part in self._parts if part.absent]
        self.absent = "; ".join(absent)
        if needs and not self.absent:
            current_stage().need(*needs)

    def wants(self, scenario: str) -> bool:
        """Whether a scenario is to be played: all are, unless the student asked for some only."""
        self.known.append(scenario)
        return not self.absent and self.only in scenario

    def see(self, scenario: str, scene: Callable[..., Any], *, seconds: float = SECONDS, weight: float = 1.0,
            gives: type[Any] = object, expected: str = "", look: str = "", **args: Any) -> Outcome | None:
        """What came of a scene with the student's parts; None if it did not come to its end or is not what the scene
        `gives` (it was in the student's hands), which is then noted."""
        current_stage().need(scene.__module__)  # ours: imported once, and not anew by every child
        outcome = current_stage().run(Play.of(scene, *self._parts, **args), seconds)
        self.seconds += outcome.seconds
        if not self.returned(scenario, outcome, seconds, weight=weight, expected=expected, look=look):
            return None
        if not isinstance(outcome.value, gives):
            self.expect(scenario, False, weight=weight, expected=expected or f"a {gives.__name__}",
                        got=repr(outcome.value)[:200], look=look)
            return None
        return outcome

    @contextlib.contextmanager
    def answering(self, scene: Callable[..., Any], *, seconds: float = SECONDS, **args: Any
                  ) -> Iterator[Callable[[Any], Outcome]]:
        """A scene that answers one question after the other."""
        current_stage().need(scene.__module__)
        begin = time.monotonic()
        with current_stage().answering(Play.of(scene, *self._parts, **args), seconds) as ask:
            yield ask
        self.seconds += time.monotonic() - begin

    def returned(self, scenario: str, outcome: Outcome, limit_s: float, *, weight: float = 1.0, expected: str = "",
                 look: str = "") -> bool:
        """Whether a play came to its end; if not, the scenario has failed, and is noted."""
        return self.card.returned(scenario, outcome, limit_s, weight=weight, expected=expected, look=look,
                                  repeat=self._repeat(scenario))

    def expect(self, scenario: str, passed: bool, *, weight: float = 1.0, expected: str = "", got: object = "",
               look: str = "") -> bool:
        """Note how a scenario went; the line that repeats it is added."""
        return self.card.expect(scenario, passed, weight=weight, expected=expected, got=got, look=look,
                                repeat=self._repeat(scenario))

    def close(self, **cost: object) -> float:
        """Print the card; the points."""
        if self.absent:
            self.card.expect("the part is there", False, expected="the cell above runs and defines it",
                             got=self.absent, look="run that cell; nothing can be checked before")
        elif self.only and not self.card.findings and not self.card.remarks:
            close = difflib.get_close_matches(self.only, self.known, 3, 0.0)
            raise ConfigError(f"{self.task} has no scenario {self.only!r}",
                              hint=f"only={' or '.join(map(repr, close))}" if close else "leave out only=")
        return self.card.close(seconds=round(self.seconds, 2), **cost)

    def _repeat(self, scenario: str) -> str:
        names = ", ".join(self._names or [part.name for part in self._parts])
        return f"check.{self.task}({names}, only={scenario!r})"


def _packed(part: Any) -> Answer:
    try:
        return pack(part)
    except NotPicklable as error:
        return Answer(getattr(part, "__name__", type(part).__name__), absent=str(error))
