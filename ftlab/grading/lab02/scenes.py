"""What runs in a child with the student's parts: a monitor on a clock that is moved by hand, a detector that hears
recorded heartbeats. No scene sleeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftlab.health.simulation import simulate
from ftlab.health.traces import Trace
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


def hear(make: Callable[..., Any], beats: list[float], looks: list[float]) -> list[Any]:
    """The verdicts at some moments after some heartbeats."""
    detector = make()
    for at in beats:
        detector.heard(at)
    return [_plain(detector.judge(now)) for now in looks]


def hear_silence(make: Callable[..., Any], beats: list[float], grow_s: float) -> list[Any]:
    """The different verdicts on a silence that grows up to so many seconds, in their order."""
    detector = make()
    for at in beats:
        detector.heard(at)
    seen: list[Any] = []
    for tick in range(int(grow_s * 100)):
        verdict = _plain(detector.judge(beats[-1] + tick / 100))
        if not seen or seen[-1] != verdict:
            seen.append(verdict)
    return seen[:20]


def replay(make: Callable[..., Any], arrivals: list[list[float]], look_s: float, settle: int, limit_s: float,
           threshold: float | None = None) -> dict[str, Any]:
    """False alarms on recorded heartbeats of several nodes, and how long deaths went unnoticed at worst; the first
    heartbeats of each node, from which a detector learns, are not held against it."""
    alarms, missed, worst = 0, 0, 0.0
    for beats in arrivals:
        trace = Trace(name="", node="", interval_s=1.0, arrivals=tuple(beats))
        seen = simulate(lambda: _Asked(make() if threshold is None else make(threshold)), trace, look_s, limit_s)
        alarms += seen.false_alarms
        missed += seen.missed
        worst = max([worst, *seen.latencies[settle:]])
    return {"false_alarms": alarms, "missed": missed, "worst_s": round(worst, 3)}


def replay_at(make: Callable[..., Any], threshold: Any, **args: Any) -> dict[str, Any]:
    """The same at a threshold that the student has chosen."""
    return replay(make, threshold=float(threshold), **args)


class _Asked:
    """A student's detector; what it says may be a Verdict or its name."""

    def __init__(self, detector: Any) -> None:
        self.detector = detector

    def heard(self, at: float) -> None:
        self.detector.heard(at)

    def suspicion(self, now: float) -> float:
        return 0.0

    def judge(self, now: float) -> Verdict:
        return Verdict(self.detector.judge(now))


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
