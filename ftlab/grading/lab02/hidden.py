"""Cases of lab 02 that students have not seen, made from a seed. Only grading has this file: `ftlab labs pack` leaves
it out."""

from __future__ import annotations

import random
from typing import Any

from ftlab.grading.lab02.cases import (
    LATEST,
    Case,
    Pace,
    Replay,
    looked_at_again,
    memory_case,
    recorded,
    replay_args,
)


def settings(task: str, draw: random.Random) -> dict[str, Any]:
    """A seed, drawn anew for every submission."""
    return {"seed": draw.getrandbits(31)}


def unseen_losses(seed: int) -> list[Case]:
    """Losses of task 1."""
    draw = random.Random(seed)
    look = "NaN, Inf and -Inf, as numbers and as tensors; loss.item() takes the number out of a tensor"
    return [_losses(draw, "NaN among losses of all kinds", ["nan"], look),
            _losses(draw, "Inf and -Inf among losses of all kinds", ["inf", "-inf"], look)]


def _losses(draw: random.Random, name: str, bad: list[str], look: str) -> Case:
    """Of each kind a bad loss and a good one, in any order."""
    kinds = ["float", "bfloat16", "float64", "one element", "with gradient"]
    asked = [([kind, bad[number % len(bad)]], True) for number, kind in enumerate(kinds)]
    asked += [([kind, f"{draw.uniform(-10, 10):.3f}"], False) for kind in kinds]
    draw.shuffle(asked)
    return Case(name=name, args={"losses": [loss for loss, _ in asked]}, answers=[answer for _, answer in asked],
                look=look)


def unseen_progress(seed: int) -> list[Case]:
    """Steps and looks of task 2."""
    draw = random.Random(seed)
    fine, usual = draw.uniform(0.01, 0.06), draw.uniform(1.0, 9.0)
    drift = [["step", fine, 200], ["step", usual, 60], ["look", 4 * usual], ["look", 10 * usual]]
    return looked_at_again([
        Case(name="training that has become slower is not accused", answers=[True, False],
             args={"timeout_seconds": 900.0, "script": drift},
             told=f"200 steps of {fine:.3f} s, 60 of {usual:.2f} s, then looks after 4 and 14 of the slow ones",
             look="only the last 50 steps say what is typical"),
        Case(name="stalls at an unseen speed are found", answers=[True, True, False, False],
             args={"timeout_seconds": 900.0, "script": [["step", usual, 25], ["look", 3 * usual, 2],
                                                        ["look", 4 * usual, 2]]},
             told=f"25 steps of {usual:.2f} s, then looks after 3, 6, 10 and 14 of them",
             look="the limit is eight typical steps, and at least one second"),
    ])


def unseen_memory(seed: int) -> list[Case]:
    """Readings of task 3."""
    draw = random.Random(seed)
    begin, leak = draw.uniform(0.28, 0.32), draw.uniform(0.009, 0.011)
    return [
        memory_case("a fast leak is found by looks in quick succession", [0.6 + leak * look for look in range(5)],
                [False, True, True, True, True], "a pace is per second: divide by the time between the looks",
                every_s=0.1),
        memory_case("a slow leak is no trouble, however rarely one looks",
                [*(begin + 0.1 * look for look in range(4)), 0.95], [False] * 4 + [True],
                "a pace is per second: divide by the time between the looks", every_s=10.0),
    ]


def unseen_replays(seed: int) -> list[Replay]:
    """Heartbeats of task 4."""
    draw = random.Random(seed)
    scales = [draw.uniform(0.7, 1.2), draw.uniform(9.0, 11.0)]  # no limit in seconds suits both
    pace = round(draw.uniform(1.2, 1.4), 2)  # slower than any limit in seconds that suits the others; twice that is
    # still below the three seconds of patience before anything was learned
    jitter = [_jittery(draw, pace) for _ in range(2)]
    return [
        Replay(name="heartbeats at an unseen pace: no false alarm, deaths noticed",
               look="one setting must fit all paces",
               paces=tuple(Pace(args=replay_args([[each * at for at in beats] for beats in recorded("loaded")],
                                                 scale=each), worst_s=0.1 * LATEST * each) for each in scales)),
        Replay(name="heartbeats with jitter: no false alarm, deaths noticed",
               look="an interval of twice the usual happens",
               paces=(Pace(args=replay_args(jitter, scale=pace / 0.1), worst_s=pace * LATEST),)),
    ]


def _jittery(draw: random.Random, interval_s: float) -> list[float]:
    now, beats = 50.0, []
    for _ in range(400):
        now += interval_s * (2.0 if draw.random() < 0.05 else draw.uniform(0.8, 1.2))
        beats.append(round(now, 4))
    return beats
