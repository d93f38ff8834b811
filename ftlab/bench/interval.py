"""How often to checkpoint: what the cost model predicts against what real runs lose.

The same job trains once undisturbed and then once per interval. In each of these runs all nodes are killed at the same
steps, so that its state comes from storage and everything since the newest checkpoint is done again. Lost is what a
run took longer, from its first step to its last, than the same number of typical undisturbed steps.

The model is fitted to the events of these runs together: the bench shows how well its form fits, it forecasts nothing.
It predicts the mean of many schedules, and each interval was measured on one. Load on the machine shows up as loss.
The kills come per step, the model's failures per second: a run much longer than the others is predicted too high.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from typing import Any

from ftlab.checkpoint.interval import CostModel, fit
from ftlab.cluster.cluster import Cluster
from ftlab.cluster.temporary import TemporaryFolder
from ftlab.config import DEFAULT_BUDGETS, CheckpointConfig
from ftlab.errors import ConfigError
from ftlab.events import Event
from ftlab.faults import blackout
from ftlab.report.frame import WIDE
from ftlab.report.interval import interval_svg
from ftlab.report.measure import measure
from ftlab.report.sheet import sheet
from ftlab.train.example import train_network
from ftlab.validation import check_least

EVERY = (2, 5, 10, 20, 50)
_STEP_S = 0.02
_MARGIN = 10  # steps: the first checkpoint is durable before the first kill, and the last kill strikes before the end
_APART = 10  # steps per kill, at least
_RECOVERY_LIMIT_S = 60.0


def bench_interval(every: Sequence[int] = EVERY, steps: int = 0, kills: int = 4, seed: int = 0, nodes: int = 2,
                   spares: int = 1, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Predicted and measured loss of each interval, the fitted model and its best intervals; 0 steps: enough."""
    check_least("kills", kills, 0)
    check_least("steps", steps, 0)
    if not every or min(every) < 1:
        raise ConfigError(f"every must be numbers of steps, 1 or more (got {list(every)})")
    every = sorted(set(every))
    steps = steps or every[-1] + 2 * _MARGIN + kills * max(every[-1], _APART)
    deaths = kill_steps(steps, kills, every[-1], seed)
    with TemporaryFolder("interval") as folder, Cluster(nodes, spares, echo=None) as cluster:
        say(f"{steps} steps undisturbed, without checkpoints")
        calm = _train(cluster, steps, None, ())
        runs: dict[int, list[Event]] = {}
        for interval in every:
            say(f"a checkpoint every {interval} steps; all nodes are killed at steps {', '.join(map(str, deaths))}")
            saving = CheckpointConfig(directory=f"{folder}/every-{interval}", every=interval)
            runs[interval] = _train(cluster, steps, saving, deaths)
    return {"bench": "interval", "nodes": nodes, "spares": spares, "steps": steps, "kills": kills, "seed": seed,
            "kill_steps": deaths, **compare(calm, runs)}


def kill_steps(steps: int, kills: int, longest: int, seed: int) -> list[int]:
    """One kill in each of `kills` equal parts of the run that follow its first checkpoint.

    Their places within the parts are drawn, but spread evenly: so a few kills find an interval at all its ages.
    """
    least = longest + 2 * _MARGIN + _APART * kills
    if kills < 1:
        raise ConfigError(f"kills must be at least 1: without failures the best interval is none (got {kills})")
    if steps < least:
        raise ConfigError(f"steps must be at least {least}: {kills} kills need room after the first checkpoint, which "
                          f"comes at step {longest} (got {steps})")
    draw = random.Random(seed)
    first, part = longest + _MARGIN, (steps - longest - 2 * _MARGIN) / kills
    places = draw.sample(range(kills), kills)
    return [first + int(part * (number + (place + draw.random()) / kills)) for number, place in enumerate(places)]


def compare(calm: Sequence[Event], runs: Mapping[int, Sequence[Event]]) -> dict[str, Any]:
    """What the events say: the typical step, the model, and a row per interval. `calm` is the undisturbed run."""
    step_s = statistics.median(later.at - sooner.at for sooner, later in pairwise(_steps(calm)))
    rows = [{"every": interval, "interval_s": round(interval * step_s, 4), **_losses(events, step_s)}
            for interval, events in runs.items()]
    failures = sum(event.kind == "fault.injected" for events in runs.values() for event in events)
    fitted = fit(event for events in runs.values() for event in events)
    model = replace(fitted, step_s=step_s, mtbf=sum(row["run_s"] for row in rows) / failures)
    for row in rows:
        row["predicted"] = round(model.overhead(row["every"] * step_s), 4)
    best = {"young_s": round(model.best(), 4), "young_steps": model.best_steps(),
            "daly_s": round(model.best_daly(), 4), "daly_steps": model.best_steps_daly()}
    return {"step_s": round(step_s, 5), "calm_lost": _losses(calm, step_s)["measured"], "intervals": rows,
            "best": best, "model": {name: round(value, 6) for name, value in asdict(model).items()}}


def interval_table(result: dict[str, Any]) -> str:
    """The bench for a terminal."""
    names = _cells(None)
    lines = ["".join(f"{cell:>{len(name) + 3}}" for cell, name in zip(_cells(row), names, strict=True))
             for row in result["intervals"]]
    return "\n".join(["".join(f"{name:>{len(name) + 3}}" for name in names), *lines, "", *_conclusions(result)])


def interval_page(result: dict[str, Any]) -> str:
    """The bench as one self-contained HTML file with its picture."""
    title = "Checkpoint interval: predicted against measured"
    rows = [_cells(None), *(_cells(row) for row in result["intervals"])]
    return sheet(title, partial(_picture, result, title), rows, _conclusions(result))


def _train(cluster: Cluster, steps: int, saving: CheckpointConfig | None, deaths: Sequence[int]) -> list[Event]:
    """One run; its events. A kill is armed when there is a checkpoint to go on from and the last kill is overcome."""
    job = cluster.submit(train_network, steps=steps, step_s=_STEP_S, checkpoint=saving,
                         budgets=dict.fromkeys(DEFAULT_BUDGETS, 100))
    limit_s = _RECOVERY_LIMIT_S + 10 * steps * _STEP_S
    for number, step in enumerate(deaths, 1):
        job.wait_for("checkpoint.committed", timeout=limit_s)
        cluster.inject(blackout(at_step=step))
        job.wait_for("recovery.finished", number, timeout=limit_s)
    job.result(timeout=limit_s)
    return job.events


def _losses(events: Sequence[Event], step_s: float) -> dict[str, Any]:
    """What a run lost, as shares of its time from the first step to the last, and in steps.

    `slowed` is what neither a recovery nor redone steps explain: the waits for checkpoints, and steps that took longer.
    """
    steps, figures = _steps(events), measure(events)
    run_s = steps[-1].at - steps[0].at
    stops = [later.at - sooner.at - step_s for sooner, later in pairwise(steps)
             if sooner.generation != later.generation]
    measured = 1 - (figures["steps"] - 1) * step_s / run_s
    recovering, redoing = sum(stops) / run_s, figures["steps_lost"] * step_s / run_s
    return {"run_s": round(run_s, 3), "checkpoints": figures["checkpoints"], "redone_steps": figures["steps_lost"],
            "measured": round(measured, 4), "recovering": round(recovering, 4), "redoing": round(redoing, 4),
            "slowed": round(measured - recovering - redoing, 4)}


def _steps(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.kind == "step.committed"]


def _cells(row: Mapping[str, Any] | None) -> list[str]:
    """One line of the table, or its head."""
    if row is None:
        return ["steps", "interval", "predicted", "measured", "= recovering", "+ redoing", "+ slowed", "redone steps",
                "checkpoints"]
    shares = [f"{row[name]:.1%}" for name in ("predicted", "measured", "recovering", "redoing", "slowed")]
    return [str(row["every"]), f"{row['interval_s']:.3f} s", *shares, str(row["redone_steps"]), str(row["checkpoints"])]


def _conclusions(result: dict[str, Any]) -> list[str]:
    model, best = result["model"], result["best"]
    return [
        f"best interval: {best['young_s']:.3f} s = {best['young_steps']} steps (Young), "
        f"{best['daly_s']:.3f} s = {best['daly_steps']} steps (Daly)",
        f"a checkpoint stops the loop for {model['k0'] * 1000:.1f} ms and is durable {model['k1'] * 1000:.0f} ms "
        f"later; a failure every {model['mtbf']:.2f} s takes {model['s0']:.2f} s to recover from",
        f"{result['steps']} steps of {result['step_s'] * 1000:.1f} ms, {result['kills']} kills per run (seed "
        f"{result['seed']}); by the same measure the undisturbed run lost {result['calm_lost']:.1%}",
        "slowed: waits for checkpoints, and steps that took longer than a typical undisturbed one",
    ]


def _picture(result: dict[str, Any], title: str, width: int = WIDE) -> str:
    model = CostModel(**result["model"])
    measured = [(row["interval_s"], row["measured"]) for row in result["intervals"]]
    low, high = measured[0][0] / 2, measured[-1][0] * 2
    curve = [(at, model.overhead(at)) for at in (low * (high / low) ** (part / 100) for part in range(101))]
    return interval_svg(curve, measured, model.best(), title, width=width)
