"""The states that a trial has saved, and what one who loads them must answer: drawn and known by the judge alone.

States come from a secret, and reach only the children that save. The salt is drawn when the first answer is wanted, so
after the saves: a manager that did not bring the weights to the child that loads them cannot know the digest.
"""

from __future__ import annotations

import secrets
from functools import cached_property
from typing import Any

from ftlab.errors import FtlabError
from ftlab.grading.lab01 import scenes
from ftlab.grading.stage import Play, current_stage
from ftlab.grading.stage.canonical import digest

_S = 120.0  # for a play of ours
_BITS = 31
_AT_ONCE = 24  # states that are drawn in one play; each is used once
_pool: list[list[str]] = []
_nothing: list[bytes] = []  # the weights of a model into which nothing was loaded


class Truth:
    """States by their epochs."""

    def __init__(self, *epochs: int) -> None:
        drawn = {str(epoch): _draw_state() for epoch in epochs}
        self.states = {epoch: text for epoch, (text, _) in drawn.items()}
        self.losses = {epoch: secrets.randbits(20) / 1024 for epoch in drawn}
        self._weights = {"": _nothing[0], **{epoch: bytes.fromhex(raw) for epoch, (_, raw) in drawn.items()}}

    @cached_property
    def salt(self) -> int:
        """Drawn when it is first needed."""
        return draw()

    def weights(self, epoch: int | str) -> str:
        """What one answers who has loaded this epoch; "" is nothing."""
        return scenes.salted_bytes(self._weights[str(epoch)], self.salt)

    def later(self, epoch: int) -> str:
        """What one answers who has loaded this epoch, and trained on."""
        return str(ours(scenes.trained_on, state=self.states[str(epoch)], salt=self.salt))

    def loaded(self, epoch: int | str, number: int) -> str:
        """The digest of what `load_one` gives for a state that was saved as epoch `number`."""
        return digest([number, self.weights(epoch)])

    def name(self, answer: Any) -> str:
        """Which state somebody's answer speaks of, in words."""
        for epoch in self._weights:
            if self.weights(epoch) == answer:
                return f"the weights of epoch {epoch}" if epoch else "a model into which nothing was loaded"
        return "other weights"


def _draw_state() -> list[str]:
    if not _pool:
        first, *others = ours(scenes.states, secret=draw(), count=_AT_ONCE)
        _nothing[:] = [bytes.fromhex(first[1])]
        _pool.extend(others)
    return _pool.pop()


def ours(scene: Any, **args: Any) -> Any:
    """What a scene gives in which none of the student's code runs."""
    current_stage().need(scene.__module__)
    outcome = current_stage().run(Play.of(scene, **args), _S)
    if not outcome.ok:
        raise FtlabError(f"a scene of ours failed: {outcome.trouble(_S)}", hint="run the check again")
    return outcome.value


def draw() -> int:
    """A number that nobody can know."""
    return secrets.randbits(_BITS)
