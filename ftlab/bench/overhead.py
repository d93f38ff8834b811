"""What does protection cost when nothing breaks? The time between the work of two steps, one worker per core; and the
processor time that heartbeats take beside it (of a worker's link and of its node's agent), and the controller for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import psutil

from ftlab.bench import overhead_loop
from ftlab.cluster.cluster import Cluster
from ftlab.health import kernel
from ftlab.report.report import Report

cloudpickle.register_pickle_by_value(overhead_loop)


def bench_overhead(nodes: int = 2, spares: int = 1, steps: int = 1000, step_s: float = 0.01,
                   say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Seconds that `ctx.steps`, `ctx.step` and heartbeats cost a step, and the share of a core the controller takes."""
    with Cluster(nodes, spares, echo=None) as cluster:
        say(f"{steps} steps of {step_s * 1000:g} ms on {nodes} nodes")
        job = cluster.submit(overhead_loop.time_steps, steps, step_s)
        job.wait_for_step(steps // 10)
        begin, before = time.monotonic(), _control_seconds(cluster)
        job.wait_for_step(steps - 5)
        after, took = _control_seconds(cluster), time.monotonic() - begin
        agents, control = ((now - then) / took for now, then in zip(after, before, strict=True))
        timed = job.result(timeout=300)
    with Cluster(1, 0, echo=None) as alone:  # waiting for other ranks would hide it
        say(f"{steps} steps with and without a look at loss and gradients")
        watched = alone.submit(overhead_loop.compare_monitoring, steps, step_s).result(timeout=300)
    cold, warm, bare, link = (_median(timed, kind) for kind in ("cold", "warm", "bare", "link"))
    costs = {"step": cold - bare, "heartbeat": (agents + link) * step_s, "monitor": _median(watched, "more")}
    return {"bench": "overhead", "nodes": nodes, "spares": spares, "steps": steps, "step_s": step_s,
            **{f"{name}_cost_s": round(cost, 7) for name, cost in costs.items()},
            **{f"{name}_cost_share": round(cost / step_s, 5) for name, cost in costs.items()},
            "warm_step_cost_s": round(warm - bare, 7),
            "cost_share": round((costs["step"] + costs["heartbeat"]) / step_s, 5),
            "controller_cores": round(control, 5)}


def overhead_table(result: dict[str, Any]) -> str:
    """The bench for a terminal."""
    micro = {name: f"{result[f'{name}_cost_s'] * 1e6:.0f} µs" for name in ("step", "warm_step", "heartbeat", "monitor")}
    return (f"ftlab adds {micro['step']} to a step of {result['step_s'] * 1000:g} ms ({micro['warm_step']} while its "
            f"code is in the caches): {result['step_cost_share']:.2%}\n"
            f"heartbeats take {micro['heartbeat']} of a core beside it: {result['heartbeat_cost_share']:.2%}; "
            f"together {result['cost_share']:.2%}\n"
            f"looking at loss and gradients adds {micro['monitor']}: {result['monitor_cost_share']:.2%}\n"
            f"the controller of {result['nodes']} + {result['spares']} nodes takes "
            f"{result['controller_cores']:.2%} of a core")


def _median(report: Report, kind: str) -> float:
    """Of what all ranks found."""
    return float(statistics.median(each for found in report.values.values() for each in found[kind]))


def _control_seconds(cluster: Cluster) -> tuple[float, float]:
    """Processor time so far: of the agent of a node that trains, on average, and of the controller."""
    started = [event.data["pid"] for event in cluster.events if event.kind == "controller.started"]
    agents = [node["pid"] for node in cluster.status()["nodes"] if node["ranks"]]
    return sum(map(_seconds, agents)) / len(agents), _seconds(started[-1])


def _seconds(pid: int) -> float:
    """Of the main thread, which does the work; the kernel counts it in nanoseconds, whole processes only in 10 ms."""
    exact = kernel.read(f"{kernel.folder(pid)}/schedstat").split()
    if exact:
        return int(exact[0]) / 1e9
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
