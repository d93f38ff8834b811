"""What came of one play."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

_MAX_TEXT = 4000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a child said and how it ended. It was in the student's hands: a judge checks types before using `value`."""

    value: Any = None  # what the function returned, as JSON gives it back
    raised: str = ""  # "ValueError: ..." if it raised instead
    traceback: str = ""  # the last lines of it
    ended: str = ""  # how the child ended without an answer: "signal 9", "exit status 3"
    late: bool = False  # it was killed because its time was up
    output: str = ""  # what it printed; the middle is left out if it was long
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return not (self.raised or self.ended or self.late)

    def trouble(self, limit_s: float | None = None) -> str:
        """In words why there is no value; empty if there is one."""
        if self.late:
            return "it did not end" + (f" within {limit_s:g} s" if limit_s else " in time") + ": a deadlock, or a loop?"
        return self.raised or (f"it ended its own process ({self.ended})" if self.ended else "")

    @classmethod
    def from_reply(cls, reply: dict[str, Any]) -> Outcome:
        """From the server's JSON, of which a child may have said any part: only `value` can be of any type."""
        kinds = {"value": lambda value: value, "late": bool, "seconds": float}
        return cls(**{each.name: kinds.get(each.name, _text)(reply[each.name]) for each in fields(cls)
                      if each.name in reply})


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)[:_MAX_TEXT]
