"""The checks of lab 02. A seed stands for cases that students have not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ftlab.grading.exam import Exam
from ftlab.grading.lab02 import cases, scenes
from ftlab.grading.lab02.cases import Case, Replay
from ftlab.grading.lab02.replay import Unanswered, replay

_REPLAY_S = 120.0  # for all heartbeats of one replay


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
    for each in cases.replays(seed):
        _replay(exam, each)
    return exam.close()


def task5(detector: Any, my_threshold: Any, *, points: float = 1.0, only: str = "") -> float:
    """The threshold that was read off the trade-off plot, on the recorded heartbeats of nodes that pause."""
    exam = Exam("lab02_task5", points, detector, my_threshold, only=only, names=["MyDetector", "my_threshold"])
    name = "at this threshold nodes that pause for 1.5 s are not accused, and deaths are noticed within 4 s"
    _replay(exam, Replay(name=name, paces=cases.paused(),
                         look="the row `paused` of the plot: the leftmost dot of your curve without a false alarm"),
            scenes.hear_at)
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
            plain = isinstance(case.answers[0], bool)
            other = next((each for each in seen.value if plain and isinstance(each, str)), "")
            exam.expect(case.name, _same(seen.value, case.answers), expected=expected, got=seen.value,
                        look=f"answer with a plain True or False, not with {other}" if other else case.look)


def _same(got: list[Any], right: list[Any]) -> bool:
    """The same values of the same types: 1 is not True."""
    return len(got) == len(right) and all(type(a) is type(b) and a == b for a, b in zip(got, right, strict=True))


def _replay(exam: Exam, case: Replay, scene: Callable[..., Any] = scenes.hear_one_by_one) -> None:
    """One scenario: all is well at every pace, or the first pace at which it is not is told."""
    if not exam.wants(case.name):
        return
    for pace in case.paces:
        with exam.answering(scene, seconds=_REPLAY_S, look_s=pace.args["look_s"]) as ask:
            try:
                seen = replay(ask, **pace.args)
            except Unanswered as error:
                exam.returned(case.name, error.outcome, _REPLAY_S, look=case.look)
                return
        if seen.false_alarms or seen.missed or not 0 < seen.worst_s <= pace.worst_s:
            break
    early = seen.missed > 0 and seen.missed == seen.unlearned
    look = "until a few intervals are known, be patient: 3 s, not for ever" if early else case.look
    missed = f"{seen.missed} deaths missed" + (", all while nothing was learned yet" if early else "")
    exam.expect(case.name, not seen.false_alarms and not seen.missed and 0 < seen.worst_s <= pace.worst_s, look=look,
                expected=f"no false alarm, no death missed, each noticed within {pace.worst_s:g} s",
                got=f"{seen.false_alarms} false alarms, {missed}, noticed after {seen.worst_s:g} s at worst")
