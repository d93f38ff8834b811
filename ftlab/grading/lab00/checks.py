"""The checks of lab 00. What is right is read from the recorded logs, here as there."""

from __future__ import annotations

from typing import Any

from ftlab.grading.exam import Exam
from ftlab.grading.lab00 import scenes
from ftlab.grading.lab00.logs import report_of
from ftlab.report.report import Report

_LOOK = {"detection_s": "report.detection_s, or report.facts['detection_s']",
         "steps_lost": "report.steps_lost", "source": "report.source",
         "slowest_phase": "report.phases is a dict: the name with the largest value"}


def task1(read_report: Any, *, points: float = 2.0, log: str = "kill", only: str = "") -> float:
    """Whether four figures are read rightly from the report of a recorded job."""
    exam, right = Exam("lab00_task1", points, read_report, only=only), _figures(report_of(log))
    names = [name for name in right if exam.wants(_scenario(name, log))]
    seen = exam.see(f"the report of the {log} is read", scenes.read, gives=dict, log=log,
                    look="return a dict; the report is the argument") if names else None
    for name in names if seen else ():
        got = seen.value.get(name, "nothing") if seen else None
        exam.expect(_scenario(name, log), got == right[name] and type(got) is type(right[name]),
                    expected=f"{right[name]!r}", got=repr(got), look=_LOOK[name])
    return exam.close()


def task2(my_guess: Any, *, points: float = 1.0, only: str = "") -> float:
    """Whether it was foreseen which faults cost committed steps; all or nothing, as there are only two answers."""
    exam, scenario = Exam("lab00_task2", points, my_guess, only=only), "your guess against what was recorded"
    lost = {name: report_of(name).steps_lost for name in ("kill", "hang", "blackout")}
    seen = exam.see(scenario, scenes.tell, gives=dict) if exam.wants(scenario) else None
    if seen:
        wrong = [f"{name}: {seen.value.get(name)!r}" for name, steps in lost.items()
                 if seen.value.get(name) is not (steps > 0)]
        exam.expect(scenario, not wrong, expected="whether each of the recorded runs had to do steps again",
                    got="not so: " + ", ".join(wrong), look="who still holds the newest state when this happens?")
    return exam.close()


def _scenario(figure: str, log: str) -> str:
    return f"{figure} of the {log}"


def _figures(report: Report) -> dict[str, Any]:
    phases: dict[str, float] = report.phases
    return {"detection_s": report.detection_s, "steps_lost": report.steps_lost, "source": report.source,
            "slowest_phase": max(phases, key=lambda name: phases[name])}
