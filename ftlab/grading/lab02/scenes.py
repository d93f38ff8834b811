"""What runs in a child with the student's parts: a monitor on a clock that is moved by hand, a detector that hears
recorded heartbeats. No scene sleeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftlab.membership import Verdict


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def see_losses(make: Callable[..., Any], losses: list[list[str]]) -> list[Any]:
    """What `detect_nan_inf` says about each loss."""
    monitor = make()
    return [_plain(monitor.detect_nan_inf(_loss(kind, value))) for kind, value in losses]


def watch_steps(make: Callable[..., Any], timeout_seconds: float, script: list[list[Any]]) -> list[Any]:
    """What `check_progress` says at each look. The script: ["step", s] a step that took so long, ["look", s] a look
    so many seconds later, each repeated as often as a third item says."""
    clock = Clock()
    monitor = make(timeout_seconds=timeout_seconds, clock=clock)
    monitor.start()
    seen = []
    for what, seconds, *often in script:
        for _ in range(often[0] if often else 1):
            clock.now += seconds
            if what == "step":
                monitor.step_done()
            else:
                seen.append(_plain(monitor.check_progress()))
    return seen


def watch_memory(make: Callable[..., Any], readings: list[float], every_s: float) -> list[Any]:
    """What `detect_oom` says at each look; the readings are shares of a limit of 10 GB."""
    clock, limit, used = Clock(), 10_000_000_000, [0]
    monitor = make(clock=clock, memory=lambda: (used[0], limit))
    seen = []
    for share in readings:
        clock.now += every_s
        used[0] = int(share * limit)
        seen.append(_plain(monitor.detect_oom()))
    return seen


def hear(make: Callable[..., Any], nodes: list[list[list[float]]]) -> list[list[Any]]:
    """The verdicts on some nodes, each [heartbeats, moments to look at], with a detector of its own."""
    seen = []
    for beats, looks in nodes:
        detector = make()
        for at in beats:
            detector.heard(at)
        seen.append([_plain(detector.judge(now)) for now in looks])
    return seen


def hear_silence(make: Callable[..., Any], nodes: list[list[Any]]) -> list[list[Any]]:
    """The different verdicts on silences that grow, in their order: nodes are [heartbeats, seconds between two looks,
    seconds in which the verdict must not have changed]. A change within those is told as "too early"."""
    seen = []
    for beats, look_s, calm_s in nodes:
        detector, said = make(), list[Any]()
        for at in beats:
            detector.heard(at)
        for tick in range(3000):
            verdict = _plain(detector.judge(beats[-1] + tick * look_s))
            if not said or said[-1] != verdict:
                said += ["too early"] if said and tick * look_s <= calm_s else []
                said.append(verdict)
        seen.append(said[:20])
    return seen


def hear_one_by_one(make: Callable[..., Any], look_s: float, threshold: Any = None) -> Callable[[Any], Any]:
    """Hears one heartbeat after the other, and says its raw verdicts on the silence that might follow: which heartbeats
    come, and whether there is another, is not known here. A question is [] for a new node, or [at, first, count]: a
    heartbeat, and the numbers of the looks at it; the answer is [[verdict, how often], ...] up to DEAD."""
    detector: Any = None

    def answer(question: list[Any]) -> list[list[Any]]:
        nonlocal detector
        if not question:
            detector = make() if threshold is None else make(float(threshold))
            return []
        at, first, count = question
        detector.heard(at)
        said: list[list[Any]] = []
        for number in range(first, first + count):
            verdict = _plain(detector.judge(number * look_s))
            if said and said[-1][0] == verdict:
                said[-1][1] += 1
            else:
                said.append([verdict, 1])
            if verdict == Verdict.DEAD:
                break
        return said

    return answer


def hear_at(make: Callable[..., Any], threshold: Any, look_s: float) -> Callable[[Any], Any]:
    """The same at a threshold that the student has chosen."""
    return hear_one_by_one(make, look_s, threshold)


def _loss(kind: str, value: str) -> Any:
    number = float(value)
    if kind == "float":
        return number
    import torch

    if kind == "with gradient":
        return torch.tensor(number, requires_grad=True) * 1.0
    if kind == "one element":
        return torch.tensor([number])
    return torch.tensor(number, dtype=getattr(torch, kind))


def _plain(answer: Any) -> Any:
    """An answer as JSON; what is neither a truth value nor a verdict is shown as it prints."""
    if isinstance(answer, bool) or (isinstance(answer, str) and not isinstance(answer, Verdict)):
        return answer
    return str(answer) if isinstance(answer, Verdict) else f"{type(answer).__name__}: {answer!r}"[:200]
