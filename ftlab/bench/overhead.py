"""What does protection cost when nothing breaks? The same work in bare and in protected steps, in turn in one run, one
worker per core; and the processor time that the agent of a node takes beside it, and the controller for all."""

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
    """Seconds that `ctx.steps` and `ctx.step` add to a step, and the share of a core that heartbeats take."""
    with Cluster(nodes, spares, echo=None) as cluster:
        say(f"{steps} steps of {step_s * 1000:g} ms on {nodes} nodes")
        job = cluster.submit(overhead_loop.compare_steps, steps, step_s)
        job.wait_for_step(steps // 10)
        begin, before = time.monotonic(), _control_seconds(cluster)
        job.wait_for_step(steps - 5)
        after, took = _control_seconds(cluster), time.monotonic() - begin
        agents, control = ((now - then) / took for now, then in zip(after, before, strict=True))
        cost = _median(job.result(timeout=300))
    with Cluster(1, 0, echo=None) as alone:  # waiting for other ranks would hide it
        say(f"{steps} steps with and without a look at loss and gradients")
        watching = _median(alone.submit(overhead_loop.compare_monitoring, steps, step_s).result(timeout=300))
    return {"bench": "overhead", "nodes": nodes, "spares": spares, "steps": steps, "step_s": step_s,
            "step_cost_s": round(cost, 7), "step_cost_share": round(cost / step_s, 5),
            "heartbeat_cost_s": round(agents * step_s, 7), "heartbeat_cost_share": round(agents, 5),
            "monitor_cost_s": round(watching, 7), "monitor_cost_share": round(watching / step_s, 5),
            "controller_cores": round(control, 5)}


def overhead_table(result: dict[str, Any]) -> str:
    """The bench for a terminal."""
    return (f"ftlab adds {result['step_cost_s'] * 1e6:.0f} µs to a step of {result['step_s'] * 1000:g} ms: "
            f"{result['step_cost_share']:.2%}\n"
            f"meanwhile the agent of a node takes {result['heartbeat_cost_s'] * 1e6:.0f} µs of a core: "
            f"{result['heartbeat_cost_share']:.2%}\n"
            f"looking at loss and gradients adds {result['monitor_cost_s'] * 1e6:.0f} µs: "
            f"{result['monitor_cost_share']:.2%}\n"
            f"the controller of {result['nodes']} + {result['spares']} nodes takes "
            f"{result['controller_cores']:.2%} of a core")


def _median(report: Report) -> float:
    return float(statistics.median(each for found in report.values.values() for each in found))


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
