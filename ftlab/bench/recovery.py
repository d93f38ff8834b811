"""How fast is a recovery? Each fault several times on one cluster, reported as medians with their range."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from ftlab.cluster.cluster import Cluster
from ftlab.cluster.job import Job
from ftlab.config import DEFAULT_BUDGETS
from ftlab.faults import Fault, make
from ftlab.train.example import TIGHT, train_network
from ftlab.validation import check_least

KINDS = ("kill", "crash", "hang", "partition", "stall", "controller", "nan", "oom", "oom-kill")
_MEMORY = {"oom": TIGHT["allocation"], "oom-kill": TIGHT["kernel"]}
_HEAL_S = 1.0
_STEPS, _STEP_S = 60, 0.02
_RETURN_S = 30.0  # for a new node in the place of one that was lost


def bench_recovery(kinds: Sequence[str] = KINDS, runs: int = 5, seed: int = 0, nodes: int = 4, spares: int = 1,
                   procs_per_node: int = 1, backend: str = "process",
                   say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Medians of detection and stall per fault; every run is compared with the undisturbed one."""
    check_least("runs", runs, 1)
    draw = random.Random(seed)
    began = time.monotonic()
    with Cluster(nodes, spares, procs_per_node, backend=backend, echo=None) as cluster:
        begin = time.monotonic()
        job = _submit(cluster)
        job.wait_for_step(1)
        first_step_s, from_nothing_s = time.monotonic() - begin, time.monotonic() - began
        wanted = job.result(timeout=120).digest
        rows = {kind: _bench_kind(kind, runs, draw, cluster, wanted, say) for kind in kinds
                if _possible(kind, cluster, say)}
    return {"bench": "recovery", "backend": backend, "nodes": nodes, "spares": spares, "step_s": _STEP_S,
            "runs": runs, "seed": seed, "first_step_s": round(first_step_s, 3),
            "from_nothing_s": round(from_nothing_s, 3), "faults": rows}


def _possible(kind: str, cluster: Cluster, say: Callable[[str], None]) -> bool:
    reason = cluster.missing(_fault(kind, "rank-0", random.Random(0)).needs)
    if reason:
        say(f"{kind} is left out: {reason}")
    return not reason


def _submit(cluster: Cluster, kind: str = "") -> Job:
    more: dict[str, Any] = {"sample_mb": _MEMORY[kind]["sample_mb"]} if kind in _MEMORY else {}
    return cluster.submit(train_network, steps=_STEPS, step_s=_STEP_S, budgets=dict.fromkeys(DEFAULT_BUDGETS, 100),
                          **more)


def _fault(kind: str, target: str, draw: random.Random) -> Fault:
    way = {"nan": "once", "oom": "allocation", "oom-kill": "kernel"}.get(kind, "")
    more = {"room_mb": int(_MEMORY[kind]["room_mb"])} if kind in _MEMORY else {}
    return make(kind.removesuffix("-kill"), target, at_step=_STEPS // 3, after=draw.uniform(0, 2 * _STEP_S), way=way,
                heal_after=_HEAL_S if kind in ("hang", "partition") else 3.0 if kind in _MEMORY else None, **more)


def _bench_kind(kind: str, runs: int, draw: random.Random, cluster: Cluster, wanted: str,
                say: Callable[[str], None]) -> dict[str, Any]:
    detections, stalls, mends, identical = [], [], [], 0
    for run in range(runs):
        say(f"{kind} {run + 1}/{runs}")
        _await_all(cluster, say)
        job = _submit(cluster, kind)
        pending = cluster.inject(_fault(kind, f"rank-{draw.randrange(cluster.config.nodes)}", draw))
        report = job.result(timeout=120)
        pending.wait(10)
        identical += report.digest == wanted
        detections.append(report.detection_s)
        stalls.append(report.stall_s)
        mends.append(report.facts["mend_s"])
    return {"detection_s": summary(detections), "stall_s": summary(stalls), "mend_s": summary(mends),
            "identical": None if kind in _MEMORY else identical, "runs": runs}  # in pieces: another order of additions


def _await_all(cluster: Cluster, say: Callable[[str], None]) -> None:
    """Wait until all nodes and spares are there, or the run before decides how long this one takes; tell if not."""
    wanted, deadline = cluster.config.nodes + cluster.config.spares, time.monotonic() + _RETURN_S
    while time.monotonic() < deadline:
        if sum(node["joined"] and node["verdict"] == "ALIVE" for node in cluster.status()["nodes"]) >= wanted:
            return
        time.sleep(0.1)
    say(f"not all {wanted} nodes are there after {_RETURN_S:g} s: this run may find no warm spare")


def summary(values: Sequence[float | None]) -> dict[str, float | None]:
    """Median and range."""
    known = [value for value in values if value is not None]
    if not known:
        return {"median": None, "low": None, "high": None}
    return {"median": round(statistics.median(known), 4), "low": min(known), "high": max(known)}


def recovery_table(result: dict[str, Any]) -> str:
    """The bench for a terminal."""
    head = (f"{'fault':<12}{'detection s, median [range]':<30}{'stall s, median [range]':<30}"
            f"{'seen to mended s':<30}identical")
    lines = [f"{name:<12}{_cell(row['detection_s']):<30}{_cell(row['stall_s']):<30}{_cell(row['mend_s']):<30}"
             f"{'-' if row['identical'] is None else row['identical']}/{row['runs']}"
             for name, row in result["faults"].items()]
    return "\n".join([head, *lines])


def _cell(values: dict[str, float | None]) -> str:
    if values["median"] is None:
        return "-"
    return f"{values['median']:.3f} [{values['low']:.3f}-{values['high']:.3f}]"
