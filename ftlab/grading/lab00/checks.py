"""The checks of lab 00. What is right is read from the recorded logs, here as there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ftlab.grading.exam import Exam
from ftlab.grading.lab00 import scenes
from ftlab.grading.lab00.logs import events_of, report_of
from ftlab.report.report import Report

_LOOK = {"detection_s": "report.detection_s, or report.facts['detection_s']",
         "steps_lost": "report.steps_lost", "source": "report.source",
         "slowest_phase": "report.phases is a dict: the name with the largest value"}


def task1(read_report: Any, *, points: float = 2.0, logs: Sequence[str] = ("kill", "blackout"),
          stretch: float = 1.0, only: str = "") -> float:
    """Whether four figures are read rightly from the reports of recorded jobs: each counts if it is right in all."""
    exam = Exam("lab00_task1", points, read_report, only=only)
    rights = [_figures(report_of(log, stretch)) for log in logs]
    names = [name for name in _LOOK if exam.wants(_scenario(name, logs))]
    seen = exam.see(f"the reports of {' and '.join(logs)} are read", scenes.read, gives=list,
                    logs=[[json.loads(event.to_json()) for event in events_of(log, stretch)] for log in logs],
                    look="return a dict; the report is the argument") if names else None
    for name in names if seen else ():
        got = [each.get(name, "nothing") if isinstance(each, dict) else each for each in (seen.value if seen else ())]
        right = [each[name] for each in rights]
        same = len(got) == len(right) and all(a == b and type(a) is type(b) for a, b in zip(got, right, strict=True))
        exam.expect(_scenario(name, logs), same, expected=" and ".join(map(repr, right)),
                    got=" and ".join(map(repr, got)), look=_LOOK[name])
    return exam.close()


def task2(my_guess: Any, *, points: float = 1.0, only: str = "") -> float:
    """Whether it was foreseen which faults cost committed steps; all or nothing, as there are only two answers."""
    exam = Exam("lab00_task2", points, my_guess, only=only, names=["my_guess"])
    scenario = "your guess against what was recorded"
    lost = {name: report_of(name).steps_lost for name in ("kill", "hang", "blackout")}
    seen = exam.see(scenario, scenes.tell, gives=dict, look="my_guess is a dict of three truth values"
                    ) if exam.wants(scenario) else None
    if seen:
        wrong = [f"{name}: {seen.value.get(name)!r}" for name, steps in lost.items()
                 if seen.value.get(name) is not (steps > 0)]
        exam.expect(scenario, not wrong, expected="whether each of the recorded runs had to do steps again",
                    got="not so: " + ", ".join(wrong), look="who still holds the newest state when this happens?")
    return exam.close()


def _scenario(figure: str, logs: Sequence[str]) -> str:
    return f"{figure} of the {' and of the '.join(logs)}"


def _figures(report: Report) -> dict[str, Any]:
    phases: dict[str, float] = report.phases
    return {"detection_s": report.detection_s, "steps_lost": report.steps_lost, "source": report.source,
            "slowest_phase": max(phases, key=lambda name: phases[name])}
