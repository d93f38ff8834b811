"""The undisturbed twin of a job: the same bytes and the same settings once more on the same cluster, without faults.

It saves and loads no checkpoints, so nothing of the first run can reach it. Where no such run can be had, this is an
error and never a verdict: too few nodes are left, something disturbed the twin as well, or the job did not begin at
its first step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftlab.config import JobConfig
from ftlab.errors import ClusterError, JobError
from ftlab.report.report import Report

if TYPE_CHECKING:
    from ftlab.cluster.cluster import Cluster

_NODES_S = 60.0  # for new nodes in the place of those that a fault took
_HINT = "job.result() gives the report without a verdict"


@dataclass(frozen=True)
class Shipment:
    """A job as it was sent to the controller, kept to be sent again."""

    name: str
    code: bytes  # what `ship` made, without a checkpoint manager
    policy: bytes
    config: JobConfig


def run_twin(cluster: Cluster, sent: Shipment, run: Report, timeout: float | None) -> Report:
    """Train the same job undisturbed; its report. Raises ClusterError or JobError where that cannot be done."""
    if resumed := _resumed_from(run):
        raise JobError(f"{sent.name} began at step {resumed}, from a checkpoint: a twin would begin at step 0",
                       hint=f"use an empty folder, or CheckpointConfig(resume=False); {_HINT}")
    _await_nodes(cluster)
    job = cluster.send(replace(sent, config=replace(sent.config, checkpoint=None)))
    try:
        twin = job.result(timeout)
    except BaseException:
        if cluster.running and not job.done:
            job.cancel()
        raise
    if twin.injected or twin.recoveries:
        raise JobError("the twin was disturbed as well, so there is nothing to compare with",
                       seen=f"{twin.injected} faults and {twin.recoveries} recoveries in it",
                       hint="did a fault wait for a step that the job did not reach? " + _HINT)
    return twin


def _resumed_from(run: Report) -> int:
    """The step of the checkpoint that a job began with; 0 if it began at the beginning."""
    for event in run.events:
        if event.kind == "checkpoint.loaded":
            return event.step or 0
        if event.kind in ("step.committed", "recovery.finished", "fault.injected"):
            return 0
    return 0


def _await_nodes(cluster: Cluster) -> None:
    wanted, deadline = cluster.config.nodes, time.monotonic() + _NODES_S
    while (there := _count(cluster)) < wanted:
        if time.monotonic() > deadline:
            raise ClusterError(f"the undisturbed twin needs {wanted} nodes, and {there} are left",
                               hint=f"a cluster that replaces nodes (replace=True), or more spares; {_HINT}")
        time.sleep(0.05)


def _count(cluster: Cluster) -> int:
    return sum(node["joined"] and node["verdict"] == "ALIVE" for node in cluster.status()["nodes"])
