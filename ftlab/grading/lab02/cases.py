"""What the checks of lab 02 ask, and what is right: plain data, made from a seed where students must not know it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from ftlab.health.traces import load_traces


@dataclass(frozen=True, kw_only=True)
class Case:
    """One scenario: what the part is given, and what it must answer."""

    name: str  # a sentence that says the diagnosis
    args: dict[str, Any]
    answers: list[Any]
    look: str  # where to look when it fails
    told: str = ""  # what was asked, in words; empty: the arguments


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Recorded heartbeats, and what a good detector does with them."""

    name: str
    args: dict[str, Any]
    worst_s: float  # a death must be noticed within
    look: str = field(default="")


def loss_cases(seed: int | None) -> list[Case]:
    """Losses of task 1."""
    if seed is not None:
        return _unseen_losses(seed)
    good = [["float", "0.0"], ["float", "2.3"], ["float", "-5.0"], ["float", "1e30"]]
    return [
        Case(name="ordinary losses are not accused", args={"losses": good}, answers=[False] * 4,
             look="a large or negative loss is no NaN"),
        Case(name="a loss of NaN is found", args={"losses": [["float", "nan"]]}, answers=[True],
             look="NaN is not equal to anything, itself included: math.isnan, math.isfinite"),
        Case(name="a loss of Inf is found, and of -Inf", args={"losses": [["float", "inf"], ["float", "-inf"]]},
             answers=[True, True], look="the method is called detect_nan_inf: math.isfinite knows both"),
        Case(name="a loss that is a tensor is looked into",
             args={"losses": [["with gradient", "2.3"], ["with gradient", "inf"], ["float32", "0.5"]]},
             answers=[False, True, False], look="loss.item() takes the number out of a tensor; answer with a bool"),
    ]


def _unseen_losses(seed: int) -> list[Case]:
    draw = random.Random(seed)
    kinds = ["float", "bfloat16", "float64", "one element", "with gradient"]
    bad = [[kind, draw.choice(["nan", "inf", "-inf"])] for kind in kinds]
    good = [[kind, f"{draw.uniform(-10, 10):.3f}"] for kind in kinds]
    return [Case(name="bad losses of all kinds are found", args={"losses": bad}, answers=[True] * len(bad),
                 look="NaN, Inf and -Inf, as numbers and as tensors"),
            Case(name="good losses of all kinds are not accused", args={"losses": good}, answers=[False] * len(good),
                 look="loss.item() takes the number out of a tensor")]


def progress_cases(seed: int | None) -> list[Case]:
    """Steps and looks of task 2."""
    if seed is not None:
        return _unseen_progress(seed)
    quick = ["step", 0.02, 30]
    return [
        Case(name="before the step time is known, the given timeout holds", answers=[True, False],
             args={"timeout_seconds": 300.0, "script": [["step", 5.0, 2], ["look", 60.0], ["look", 250.0]]},
             told="2 steps of 5 s, then looks after 60 s and 310 s, timeout_seconds=300",
             look="with fewer than three step times known the limit is timeout_seconds"),
        Case(name="steps of 20 ms: a stall is seen within seconds", answers=[True, False],
             args={"timeout_seconds": 300.0, "script": [quick, ["look", 0.5], ["look", 2.5]]},
             told="30 steps of 20 ms, then looks after 0.5 s and 3 s without a step",
             look="the limit follows the steps: eight typical ones, and at least one second"),
        Case(name="steps of 60 s are not accused, a stall among them is", answers=[True, True, False],
             args={"timeout_seconds": 100.0,
                   "script": [["step", 60.0, 6], ["look", 70.0], ["look", 80.0], ["look", 600.0]]},
             told="6 steps of 60 s, timeout_seconds=100, then looks after 70 s, 150 s and 750 s",
             look="once step times are known they say what is long, not timeout_seconds: eight steps are 480 s"),
        Case(name="looking often does not make a stall go away", answers=[True] * 5 + [False] * 15,
             args={"timeout_seconds": 300.0, "script": [quick, ["look", 0.1, 5], ["look", 1.0, 15]]},
             told="30 steps of 20 ms, then 20 looks and no step",
             look="check_progress only looks: what it measures runs from the last step_done(), not from the last look"),
        Case(name="after a stall the next step makes it well again", answers=[False, True, False],
             args={"timeout_seconds": 300.0,
                   "script": [quick, ["look", 5.0], ["step", 0.1], ["look", 0.1], ["look", 5.0]]},
             told="a look at a stall, a step, a look 0.1 s later, and one 5 s later",
             look="the verdict is on the step in flight: nothing is remembered of the last one"),
        Case(name="one evaluation of 30 s does not make it blind", answers=[True, False],
             args={"timeout_seconds": 300.0,
                   "script": [["step", 0.02, 10], ["step", 30.0], ["step", 0.02, 10], ["look", 0.3], ["look", 4.0]]},
             told="20 steps of 20 ms with one of 30 s among them, then looks after 0.3 s and 4.3 s",
             look="a typical step is the median: one outlier moves a mean, and a maximum for ever"),
    ]


def _unseen_progress(seed: int) -> list[Case]:
    draw = random.Random(seed)
    fine, usual = draw.uniform(0.01, 0.06), draw.uniform(1.0, 9.0)
    drift = [["step", fine, 200], ["step", usual, 60], ["look", 4 * usual], ["look", 10 * usual]]
    return [
        Case(name="training that has become slower is not accused", answers=[True, False],
             args={"timeout_seconds": 120.0, "script": drift},
             told=f"200 steps of {fine:.3f} s, 60 of {usual:.2f} s, then looks after 4 and 14 of the slow ones",
             look="only the last 50 steps say what is typical"),
        Case(name="stalls at an unseen speed are found", answers=[True, True, False, False],
             args={"timeout_seconds": 900.0, "script": [["step", usual, 25], ["look", 3 * usual, 2],
                                                        ["look", 4 * usual, 2]]},
             told=f"25 steps of {usual:.2f} s, then looks after 3, 6, 10 and 14 of them",
             look="the limit is eight typical steps, and at least one second"),
    ]


def memory_cases(seed: int | None) -> list[Case]:
    """Readings of task 3."""
    if seed is not None:
        return _unseen_memory(seed)
    return [
        _memory("memory that is half full is no trouble", [0.5, 0.52, 0.5, 0.51, 0.5], [False] * 5,
                "below 90 %, and not filling up"),
        _memory("memory that is nearly full is found, and forgotten when it is given back",
                [0.5, 0.95, 0.95, 0.4, 0.4], [False, True, True, False, False],
                "above 90 % of the limit it is True, however long that lasts, and not a moment longer"),
        _memory("memory that fills fast is found before it is full", [0.32, 0.42, 0.52, 0.62, 0.72],
                [False, False, True, True, True],
                "at the pace between the last two looks, is the limit reached within 5 s?"),
        _memory("memory that fills slowly is no trouble", [0.3, 0.31, 0.32, 0.33], [False] * 4,
                "at this pace it is full in a minute: that is not soon"),
    ]


def _unseen_memory(seed: int) -> list[Case]:
    draw = random.Random(seed)
    begin, leak = draw.uniform(0.28, 0.32), draw.uniform(0.009, 0.011)
    return [
        _memory("a fast leak is found by looks in quick succession", [0.6 + leak * look for look in range(5)],
                [False, True, True, True, True], "a pace is per second: divide by the time between the looks",
                every_s=0.1),
        _memory("a slow leak is no trouble, however rarely one looks", [begin + 0.1 * look for look in range(4)],
                [False] * 4, "a pace is per second: divide by the time between the looks", every_s=10.0),
    ]


def _memory(name: str, readings: list[float], answers: list[bool], look: str, every_s: float = 1.0) -> Case:
    told = f"looks every {every_s:g} s at {', '.join(f'{each:.0%}' for each in readings)} of the limit"
    return Case(name=name, args={"readings": readings, "every_s": every_s}, answers=answers, look=look, told=told)


def detector_cases() -> list[Case]:
    """The manners of a detector, task 4."""
    regular = [round(100 + 0.1 * beat, 3) for beat in range(40)]
    last = regular[-1]
    return [
        Case(name="a node that beats is alive, a silent one is dead",
             args={"beats": regular, "looks": [last + 0.05, last + 30.0]}, answers=["ALIVE", "DEAD"],
             told="40 heartbeats 0.1 s apart, then looks after 0.05 s and 30 s of silence",
             look="judge compares the silence, now minus the newest heartbeat, with the usual interval"),
        Case(name="a node that was never heard is not judged", args={"beats": [], "looks": [0.0, 1e9]},
             answers=["ALIVE", "ALIVE"], told="no heartbeat at all",
             look="before the first heartbeat there is no silence: it may still be starting"),
        Case(name="looking changes nothing", args={"beats": regular, "looks": [last + 30, last + 0.05, last + 30]},
             answers=["DEAD", "ALIVE", "DEAD"], told="looks at 30 s, 0.05 s, and 30 s again",
             look="judge(now) only looks: it must not store a verdict or a time"),
        Case(name="a heartbeat that comes late and out of order tells nothing",
             args={"beats": [*regular, last - 2.0], "looks": [last + 0.05]}, answers=["ALIVE"],
             told="after the newest one, a heartbeat arrives that is 2 s older",
             look="heard(at) with at older than the newest heartbeat: ignore it, it makes no interval either"),
    ]


def replays(seed: int | None) -> list[Replay]:
    """Heartbeats of task 4."""
    if seed is not None:
        return _unseen_replays(seed)
    return [
        Replay(name="recorded on an idle machine: no false alarm, deaths noticed within 1 s", worst_s=1.0,
               args=_args(_recorded("idle")), look="ten missed heartbeats are a second"),
        Replay(name="recorded on a busy machine: late heartbeats are no death", worst_s=1.0,
               args=_args(_recorded("loaded")), look="the longest gap there is 0.21 s: twice the usual"),
        Replay(name="a node that beats once a second is slow, not dead", worst_s=10.0,
               args=_args([[10 * at for at in beats] for beats in _recorded("loaded")], scale=10.0),
               look="the same heartbeats, ten times as slow: what is long depends on this node's own intervals"),
    ]


def _unseen_replays(seed: int) -> list[Replay]:
    draw = random.Random(seed)
    scale = draw.uniform(2.0, 5.0)
    jitter = [_jittery(draw, 0.3) for _ in range(2)]
    stretched = [[scale * at for at in beats] for beats in _recorded("loaded")]
    return [
        Replay(name="heartbeats at an unseen pace: no false alarm, deaths noticed", worst_s=10 * scale * 0.1,
               args=_args(stretched, scale=scale), look="one setting must fit all paces"),
        Replay(name="heartbeats with jitter: no false alarm, deaths noticed", worst_s=3.0,
               args=_args(jitter, scale=3.0), look="an interval of twice the usual happens"),
    ]


def silence_case() -> Case:
    """The order of verdicts, task 4."""
    return Case(name="a silent node is suspected before it is given up", answers=["ALIVE", "SUSPECT", "DEAD"],
                args={"beats": [round(100 + 0.1 * beat, 3) for beat in range(40)], "grow_s": 30.0},
                told="40 heartbeats 0.1 s apart, and a silence that grows",
                look="SUSPECT from half of the limit on, DEAD from the limit on")


def paused() -> dict[str, Any]:
    """Task 5: nodes that are stopped for up to 1.5 s, now and then."""
    return _args(_recorded("paused"))


def _recorded(condition: str) -> list[list[float]]:
    return [list(trace.arrivals) for trace in load_traces() if trace.name == condition]


def _jittery(draw: random.Random, interval_s: float) -> list[float]:
    now, beats = 50.0, []
    for _ in range(400):
        now += interval_s * (2.2 if draw.random() < 0.05 else draw.uniform(0.8, 1.2))
        beats.append(round(now, 4))
    return beats


def _args(arrivals: list[list[float]], scale: float = 1.0) -> dict[str, Any]:
    return {"arrivals": arrivals, "look_s": 0.05 * scale, "settle": 20, "limit_s": 12.0 * scale}
