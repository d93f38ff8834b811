"""The sheet that one check fills in and prints: what was expected, what happened, where to look, what it cost.

    card = Card("lab01_task2", points=4)
    card.expect("the process dies between write and rename", found == old, expected="the old state", got=found,
                look="write to a temporary name first", repeat="check.lab01_task2(MyManager, only='rename')")
    return card.close(seconds=1.2)
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace

from ftlab.errors import ConfigError
from ftlab.grading.stage.outcome import Outcome

_WIDTH = 110
MARK = "|"  # before each line that is not ours, but what student's code said or made


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One scenario and how it went."""

    scenario: str  # a sentence that says the diagnosis
    passed: bool
    weight: float = 1.0  # its share of the task's points, against the others'
    expected: str = ""
    got: str = ""
    look: str = ""  # where to look
    repeat: str = ""  # the one line that runs only this again

    def lines(self) -> list[str]:
        """For a reader: one line if it went well, what to do if not."""
        if self.passed:
            return [f"  ok    {self.scenario}"]
        told = [("expected", self.expected), ("got", quoted(self.got)), ("look", self.look), ("again", self.repeat)]
        advice = [f"          {name + ':':<10}{_indent(text)}" for name, text in told if text]
        return [f"  FAIL  {self.scenario}", *advice]


class Card:
    """Collects findings; `close` prints them and gives the points as a plain float, which nbgrader takes as marks."""

    def __init__(self, task: str, points: float) -> None:
        if points <= 0:
            raise ConfigError(f"points must be positive: {task} would not count (got {points})")
        self.task, self.points = task, points
        self.findings: list[Finding] = []
        self.remarks: list[str] = []

    def expect(self, scenario: str, passed: bool, *, weight: float = 1.0, expected: str = "", got: object = "",
               look: str = "", repeat: str = "") -> bool:
        """Note how a scenario went; returns `passed`."""
        self.findings.append(Finding(scenario=scenario, passed=bool(passed), weight=weight, expected=expected,
                                     got=str(got), look=look, repeat=repeat))
        return bool(passed)

    def remark(self, text: str) -> None:
        """Say something that is no scenario: what could not be tried on this machine."""
        self.remarks.append(text)

    def returned(self, scenario: str, outcome: Outcome, limit_s: float, *, weight: float = 1.0, expected: str = "",
                 look: str = "", repeat: str = "") -> bool:
        """Whether a play came to its end; if not, the scenario has failed and is noted, with the traceback."""
        if outcome.ok:
            return True
        got = "\n".join([outcome.trouble(limit_s), *own_frames(outcome.traceback)])
        self.expect(scenario, False, weight=weight, expected=expected or "it returns", got=got, look=look,
                    repeat=repeat)
        return False

    def _folded(self) -> list[Finding]:
        """The findings; a long error that was told before is not told again."""
        told, found = set[str](), list[Finding]()
        for each in self.findings:
            again = not each.passed and each.got.count("\n") > 1 and each.got in told
            told.add(each.got)
            found.append(replace(each, got=f"{each.got.splitlines()[0]} (as above)") if again else each)
        return found

    @property
    def score(self) -> float:
        """The points that were earned; none as long as nothing was looked at."""
        total = sum(each.weight for each in self.findings)
        earned = sum(each.weight for each in self.findings if each.passed)
        return round(self.points * earned / total, 2) if total else 0.0

    def close(self, **cost: object) -> float:
        """Print the sheet with its cost line (seconds=, steps_redone=, bytes=, restarts=) and give the points."""
        print(self.text(**cost))
        return float(self.score)

    def text(self, **cost: object) -> str:
        """The sheet."""
        passed = sum(each.passed for each in self.findings)
        head = f"{self.task}: {passed} of {len(self.findings)} scenarios, {self.score:g} of {self.points:g} points"
        spent = ", ".join(f"{name.replace('_', ' ')} {_amount(value)}" for name, value in cost.items())
        lines = [head, *(f"  note  {each}" for each in self.remarks)]
        lines += [line for each in self._folded() for line in each.lines()]
        if len(lines) > 1 and not all(each.passed for each in self.findings):
            lines.append(f"  note  lines that begin with {MARK} are what the student's code gave or said")
        return "\n".join([*lines, f"  cost  {spent}"] if spent else lines)


def own_frames(trace: str) -> list[str]:
    """The lines of a traceback that are about the student's code: the frames above it are ours and teach nothing."""
    kept, ours = list[str](), False
    for line in trace.splitlines()[1:-1]:
        if line.startswith("  File "):
            ours = "/ftlab/grading/" in line
        if not ours:
            kept.append(line)
    return kept


def quoted(text: str) -> str:
    """What student's code said, each line marked as such and without anything that steers a terminal."""
    lines = ["".join(each if each.isprintable() else " " for each in line) for line in text.splitlines()]
    parts = [part for line in lines for part in textwrap.wrap(line, _WIDTH - 2, drop_whitespace=False) or [""]]
    return "\n".join(f"{MARK} {part}" for part in parts)


def _indent(text: str) -> str:
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, _WIDTH, replace_whitespace=False,
                                                                          subsequent_indent="  ") or [""]]
    return ("\n" + " " * 20).join(lines)


def _amount(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else f"{value}"
