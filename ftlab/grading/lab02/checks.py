"""The checks of lab 02. A seed stands for cases that students have not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ftlab.grading.exam import Exam
from ftlab.grading.lab02 import cases, scenes
from ftlab.grading.lab02.cases import Case, Replay


def task1(monitor: Any, *, points: float = 2.0, seed: int | None = None, only: str = "") -> float:
    """`detect_nan_inf(loss)`."""
    return _ask(Exam("lab02_task1", points, monitor, only=only), scenes.see_losses, cases.loss_cases(seed))


def task2(monitor: Any, *, points: float = 3.0, seed: int | None = None, only: str = "") -> float:
    """`check_progress()`, on a clock that the check moves."""
    return _ask(Exam("lab02_task2", points, monitor, only=only), scenes.watch_steps, cases.progress_cases(seed))


def task3(monitor: Any, *, points: float = 2.0, seed: int | None = None, only: str = "") -> float:
    """`detect_oom()`, with readings that the check gives."""
    return _ask(Exam("lab02_task3", points, monitor, only=only), scenes.watch_memory, cases.memory_cases(seed))


def task4(detector: Any, *, points: float = 4.0, seed: int | None = None, only: str = "") -> float:
    """`heard(at)` and `judge(now)`, on recorded heartbeats."""
    exam = Exam("lab02_task4", points, detector, only=only)
    if seed is None:
        _note(exam, scenes.hear, cases.detector_cases())
        _note(exam, scenes.hear_silence, [cases.silence_case()])
    for replay in cases.replays(seed):
        _replay(exam, replay)
    return exam.close()


def task5(detector: Any, my_threshold: Any, *, points: float = 1.0, only: str = "") -> float:
    """The threshold that was read off the trade-off plot, on the recorded heartbeats of nodes that pause."""
    exam = Exam("lab02_task5", points, detector, my_threshold, only=only)
    name = "at this threshold nodes that pause for 1.5 s are not accused, and deaths are noticed within 4 s"
    seen = exam.see(name, scenes.replay_at, gives=dict, **cases.paused()) if exam.wants(name) else None
    if seen:
        _judge(exam, Replay(name=name, args={}, worst_s=4.0, look="the row `paused` of the plot: the leftmost dot of "
                                                                  "your curve without a false alarm"), seen.value)
    return exam.close()


def _ask(exam: Exam, scene: Callable[..., Any], asked: Iterable[Case]) -> float:
    _note(exam, scene, asked)
    return exam.close()


def _note(exam: Exam, scene: Callable[..., Any], asked: Iterable[Case]) -> None:
    for case in asked:
        expected = f"{case.answers}" + (f" for {case.told}" if case.told else f" for {case.args}")
        seen = exam.see(case.name, scene, gives=list, expected=expected, look=case.look,
                        **case.args) if exam.wants(case.name) else None
        if seen:
            exam.expect(case.name, _same(seen.value, case.answers), expected=expected, got=seen.value, look=case.look)


def _same(got: list[Any], right: list[Any]) -> bool:
    """The same values of the same types: 1 is not True."""
    return len(got) == len(right) and all(type(a) is type(b) and a == b for a, b in zip(got, right, strict=True))


def _replay(exam: Exam, replay: Replay) -> None:
    seen = exam.see(replay.name, scenes.replay, gives=dict, look=replay.look,
                    **replay.args) if exam.wants(replay.name) else None
    if seen:
        _judge(exam, replay, seen.value)


def _judge(exam: Exam, replay: Replay, seen: dict[str, Any]) -> None:
    alarms, missed, worst = seen.get("false_alarms"), seen.get("missed"), seen.get("worst_s")
    well = alarms == 0 and missed == 0 and isinstance(worst, float | int) and 0 < worst <= replay.worst_s
    exam.expect(replay.name, well, look=replay.look,
                expected=f"no false alarm, no death missed, each noticed within {replay.worst_s:g} s",
                got=f"{alarms} false alarms, {missed} deaths missed, noticed after {worst} s at worst")
