"""How fast is a recovery? Each fault several times on one cluster, reported as medians with their range."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ftlab.cluster.cluster import Cluster
from ftlab.drill.drill import DrillPlan, submit_workload
from ftlab.faults import make

KINDS = ("kill", "crash", "hang", "partition", "stall", "controller")
_HEAL_S = 1.0


def bench_recovery(kinds: Sequence[str] = KINDS, runs: int = 5, seed: int = 0, steps: int = 60,
                   say: Callable[[str], None] = lambda text: None, **plan: Any) -> dict[str, Any]:
    """Medians of detection and stall per fault; every run is compared with the undisturbed one."""
    details = DrillPlan(steps=steps, seed=seed, **plan)
    draw = random.Random(seed)
    rows: dict[str, Any] = {}
    with Cluster(details.nodes, details.spares, details.procs_per_node, echo=None, **details.settings) as cluster:
        wanted = submit_workload(cluster, details).result(timeout=120).digest
        for kind in kinds:
            rows[kind] = _bench_kind(kind, runs, draw, cluster, details, wanted, say)
    return {"bench": "recovery", "nodes": details.nodes, "spares": details.spares, "step_s": details.step_s,
            "runs": runs, "seed": seed, "faults": rows}


def _bench_kind(kind: str, runs: int, draw: random.Random, cluster: Cluster, plan: DrillPlan, wanted: str,
                say: Callable[[str], None]) -> dict[str, Any]:
    detections, stalls, identical = [], [], 0
    for run in range(runs):
        say(f"{kind} {run + 1}/{runs}")
        job = submit_workload(cluster, plan)
        heal = _HEAL_S if kind in ("hang", "partition") else None
        pending = cluster.inject(make(kind, f"rank-{draw.randrange(plan.nodes)}", at_step=plan.steps // 3,
                                      after=draw.uniform(0, 2 * plan.step_s), heal_after=heal))
        report = job.result(timeout=120)
        pending.wait(10)
        identical += report.digest == wanted
        detections.append(report.detection_s)
        stalls.append(report.stall_s)
    return {"detection_s": summary(detections), "stall_s": summary(stalls), "identical": identical, "runs": runs}


def summary(values: Sequence[float | None]) -> dict[str, float | None]:
    """Median and range."""
    known = [value for value in values if value is not None]
    if not known:
        return {"median": None, "low": None, "high": None}
    return {"median": round(statistics.median(known), 4), "low": min(known), "high": max(known)}


def recovery_table(result: dict[str, Any]) -> str:
    """The bench for a terminal."""
    head = f"{'fault':<12}{'detection s, median [range]':<32}{'stall s, median [range]':<32}identical"
    lines = [f"{name:<12}{_cell(row['detection_s']):<32}{_cell(row['stall_s']):<32}{row['identical']}/{row['runs']}"
             for name, row in result["faults"].items()]
    return "\n".join([head, *lines])


def _cell(values: dict[str, float | None]) -> str:
    if values["median"] is None:
        return "-"
    return f"{values['median']:.3f} [{values['low']:.3f}-{values['high']:.3f}]"
