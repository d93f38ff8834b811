"""What the checks of lab 02 ask, and what is right: plain data. A seed stands for cases that students have not seen,
which `hidden` makes from it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftlab.grading.hidden import hidden_part
from ftlab.health.traces import load_traces

LATEST = 13  # intervals until a death must have been noticed; the lab's text says ten, the rest is between two looks


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
    """Recorded heartbeats, at one pace or several, and what a good detector does with them all."""

    name: str
    paces: tuple[Pace, ...]
    look: str = ""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The heartbeats of some nodes, and how soon a death among them must be noticed."""

    args: dict[str, Any]
    worst_s: float


def loss_cases(seed: int | None) -> list[Case]:
    """Losses of task 1."""
    if seed is not None:
        return list(hidden_part("lab02").unseen_losses(seed))
    return [
        _losses("ordinary losses are not accused, a NaN among them is", ["0.0", "2.3", "-5.0", "1e30"], ["nan"],
                look="a large or negative loss is no NaN"),
        _losses("a loss of NaN is found", ["1.5"], ["nan", "nan"],
                look="NaN is not equal to anything, itself included: math.isnan, math.isfinite"),
        _losses("a loss of Inf is found, and of -Inf", ["1e30", "-1e30"], ["inf", "-inf"],
                look="the method is called detect_nan_inf: math.isfinite knows both"),
        _losses("a loss that is a tensor is looked into", ["2.3", "0.5"], ["inf", "nan"],
                kinds=("with gradient", "float32"),
                look="loss.item() takes the number out of a tensor; answer with a plain bool, not with a tensor"),
    ]


def _losses(name: str, good: list[str], bad: list[str], look: str, kinds: Sequence[str] = ("float",)) -> Case:
    """Good and bad losses in an order that is drawn: who always says the same is wrong somewhere."""
    asked = [([kinds[number % len(kinds)], value], value in bad) for number, value in enumerate([*good, *bad])]
    random.shuffle(asked)
    return Case(name=name, args={"losses": [loss for loss, _ in asked]}, answers=[answer for _, answer in asked],
                look=look)


def progress_cases(seed: int | None) -> list[Case]:
    """Steps and looks of task 2."""
    if seed is not None:
        return list(hidden_part("lab02").unseen_progress(seed))
    quick = ["step", 0.02, 30]
    return looked_at_again([
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
        Case(name="looking often does not make a stall go away", answers=[True] * 6 + [False] * 14,
             args={"timeout_seconds": 300.0, "script": [quick, ["look", 0.1, 5], ["look", 0.4, 15]]},
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
    ])


def looked_at_again(cases: list[Case]) -> list[Case]:
    """The same cases with some looks repeated at the same moment, drawn anew each time: the answers are no list that
    one could know."""
    found = []
    for case in cases:
        script, answers, given = list[list[Any]](), list[Any](), list(case.answers)
        for what, seconds, *often in case.args["script"]:
            script.append([what, seconds, *often])
            if what == "look":
                again, seen = random.randrange(1, 4), [given.pop(0) for _ in range(often[0] if often else 1)]
                script.append(["look", 0.0, again])
                answers += seen + [seen[-1]] * again
        found.append(replace(case, args={**case.args, "script": script}, answers=answers,
                             told=f"{case.told} (some of them several times)"))
    return found


def memory_cases(seed: int | None) -> list[Case]:
    """Readings of task 3."""
    if seed is not None:
        return list(hidden_part("lab02").unseen_memory(seed))
    return [
        memory_case("memory that is half full is no trouble, until it is nearly full",
                [0.5, 0.52, 0.5, 0.51, 0.5, 0.93], [False] * 5 + [True], "below 90 %, and not filling up"),
        memory_case("memory that is nearly full is found, and forgotten when it is given back",
                [0.5, 0.95, 0.95, 0.4, 0.4], [False, True, True, False, False],
                "above 90 % of the limit it is True, however long that lasts, and not a moment longer"),
        memory_case("memory that fills fast is found before it is full", [0.32, 0.42, 0.52, 0.62, 0.72],
                [False, False, True, True, True],
                "at the pace between the last two looks, is the limit reached within 5 s?"),
        memory_case("memory that fills slowly is no trouble, one that fills fast is", [0.3, 0.31, 0.32, 0.33, 0.53],
                [False] * 4 + [True], "at this pace it is full in a minute: that is not soon"),
    ]


def memory_case(name: str, readings: list[float], answers: list[bool], look: str, every_s: float = 1.0) -> Case:
    """Looks at memory that is so full, and what is to be answered."""
    told = f"looks every {every_s:g} s at {', '.join(f'{each:.0%}' for each in readings)} of the limit"
    return Case(name=name, args={"readings": readings, "every_s": every_s}, answers=answers, look=look, told=told)


def detector_cases() -> list[Case]:
    """The manners of a detector, task 4; each on a node that beats ten times a second and on one that beats once."""
    two = "nodes that beat every 0.1 s and every second"
    return [
        Case(name="a node that beats is alive, a silent one is dead, whatever its pace",
             args={"nodes": [[beats, [beats[-1] + each for each in (pace, 300 * pace)]] for pace, beats in _paces()]},
             answers=[["ALIVE", "DEAD"]] * 2, told=f"{two}, looked at after 1 and 300 intervals of silence",
             look="judge compares the silence, now minus the newest heartbeat, with this node's usual interval"),
        Case(name="a node that was never heard is not judged, one that was is",
             args={"nodes": [[[], [0.0, 1e9]], *([beats, [beats[-1] + pace, beats[-1] + 300 * pace]]
                                                 for pace, beats in _paces())]},
             answers=[["ALIVE", "ALIVE"], ["ALIVE", "DEAD"], ["ALIVE", "DEAD"]],
             told=f"no heartbeat at all; then {two}",
             look="before the first heartbeat there is no silence: it may still be starting"),
        Case(name="looking changes nothing",
             args={"nodes": [[beats, [beats[-1] + each * pace for each in (300, 1, 300)]] for pace, beats in _paces()]},
             answers=[["DEAD", "ALIVE", "DEAD"]] * 2, told=f"{two}, looked at 300, 1, and again 300 intervals later",
             look="judge(now) only looks: it must not store a verdict or a time"),
        Case(name="a heartbeat that comes late and out of order tells nothing",
             args={"nodes": [[[*beats, beats[-1] - 20 * pace], [beats[-1] + pace]] for pace, beats in _paces()]},
             answers=[["ALIVE"]] * 2, told="after the newest one, a heartbeat arrives that is 20 intervals older",
             look="heard(at) with at older than the newest heartbeat: ignore it, it makes no interval either"),
    ]


def _paces() -> list[tuple[float, list[float]]]:
    """(seconds between two heartbeats, 40 of them), for a quick node and a slow one."""
    return [(pace, [round(100 + pace * beat, 3) for beat in range(40)]) for pace in (0.1, 1.0)]


def replays(seed: int | None) -> list[Replay]:
    """Heartbeats of task 4."""
    if seed is not None:
        return list(hidden_part("lab02").unseen_replays(seed))
    slow = "; and when it beats once a second"
    return [
        Replay(name=f"recorded on an idle machine: no false alarm, deaths noticed within {LATEST} intervals{slow}",
               paces=_at_paces(recorded("idle")),
               look=f"{LATEST} missed heartbeats of 0.1 s are {LATEST / 10:g} s; what is long depends on this node's "
                    "own intervals"),
        Replay(name=f"recorded on a busy machine: late heartbeats are no death{slow}",
               paces=_at_paces(recorded("loaded")),
               look="the longest gap there is 0.21 s, twice the usual; slowed down ten times it is 2.1 s"),
    ]


def _at_paces(arrivals: list[list[float]]) -> tuple[Pace, ...]:
    """The same heartbeats as they were, and ten times as slow."""
    return tuple(Pace(args=replay_args([[scale * at for at in beats] for beats in arrivals], scale=scale),
                      worst_s=0.1 * LATEST * scale) for scale in (1.0, 10.0))


def silence_case() -> Case:
    """The order of verdicts, task 4."""
    return Case(name="a silent node is suspected before it is given up, and neither at once",
                answers=[["ALIVE", "SUSPECT", "DEAD"]] * 2,
                args={"nodes": [[beats, pace / 10, pace] for pace, beats in _paces()]},
                told="nodes that beat every 0.1 s and every second, and silences that grow",
                look="ALIVE for an interval at least, SUSPECT from half of the limit on, DEAD from the limit on")


def paused() -> tuple[Pace, ...]:
    """Task 5: nodes that are stopped for up to 1.5 s, now and then."""
    return (Pace(args=replay_args(recorded("paused")), worst_s=4.0),)


def recorded(condition: str) -> list[list[float]]:
    """The heartbeats that were recorded under this condition."""
    return [list(trace.arrivals) for trace in load_traces() if trace.name == condition]


def replay_args(arrivals: list[list[float]], scale: float = 1.0) -> dict[str, Any]:
    """What a scene is told of heartbeats."""
    return {"arrivals": arrivals, "look_s": 0.05 * scale, "settle": 20, "limit_s": 12.0 * scale}
