"""What runs in a child with the student's policy or loop.

`ask_*` put recorded and made snapshots to a policy. `drive` runs a loop whose epochs go wrong as planned. `run_cluster`
runs a whole cluster on loopback, below this very child.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from ftlab.cluster.cluster import Cluster
from ftlab.config import DEFAULT_BUDGETS
from ftlab.errors import FtlabError
from ftlab.faults import kill, nan
from ftlab.policy import Action, Failure, Snapshot, Wait
from ftlab.train.example import train_network

PATIENT: dict[str, Any] = {"start_timeout_s": 300.0, "suspect_s": 5.0, "dead_s": 10.0, "lease_s": 60.0,
                           "stall_floor_s": 60.0}  # a busy machine must not cost marks; a killed node is seen at once


def ask_with_budgets(policy: Callable[..., Any], asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a function of snapshot and budgets answers, as data."""
    return [_answer(lambda snapshot, budgets: policy(snapshot, budgets), each) for each in asked]


def ask(policy: Callable[..., Any], asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a function of the snapshot alone answers, as data."""
    return [_answer(lambda snapshot, budgets: policy(snapshot), each) for each in asked]


def _answer(policy: Callable[[Snapshot, dict[str, int]], Any], question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        action = policy(*read(question))
        known = action is None or isinstance(action, Action)
        return plain(action) if known else {"action": f"{type(action).__name__}: {action!r}"[:200]}
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"[:300]}


def plain(action: Action | None) -> dict[str, Any]:
    """An action as data that can be compared: its name and what it would do, without its reasons."""
    if action is None:
        return {"action": "None"}
    said = {name: value for name, value in vars(action).items() if name != "reason"}
    if "restart" in said and not said["restart"]:  # nobody, as a tuple or a list
        del said["restart"]
    return {"action": type(action).__name__, **json.loads(json.dumps(said))}


def read(data: Mapping[str, Any]) -> tuple[Snapshot, dict[str, int]]:
    """A snapshot and budgets from JSON."""
    fields = dict(data["snapshot"])
    fields["failures"] = tuple(Failure(**each) for each in fields["failures"])
    for name in ("members", "spares"):
        fields[name] = tuple(fields[name])
    return Snapshot(**fields), dict(data["budgets"])


def run_cluster(policy: Callable[..., Any], steps: int, kill_at: int, nan_at: int, seconds_s: float) -> dict[str, Any]:
    """A job under this policy, with a node that is killed and a gradient that turns into NaN: its event log."""
    with Cluster(2, 1, echo=None, **PATIENT) as cluster:
        job = cluster.submit(train_network, policy=policy, **_plan(steps))
        cluster.inject(kill("rank-1", at_step=kill_at))
        cluster.inject(nan("rank-0", at_step=nan_at))
        error = ""
        try:
            job.result(timeout=seconds_s)
        except FtlabError as raised:
            error = str(raised)[:500]
            with contextlib.suppress(FtlabError):
                job.cancel()
        return {"error": error, "events": [json.loads(event.to_json()) for event in job.events]}


def run_twin(steps: int, seconds_s: float) -> str:
    """The digest of the same job without any fault, and without any of the student's code."""
    with Cluster(2, 0, echo=None, **PATIENT) as cluster:
        twin = cluster.submit(train_network, policy=_wait, **_plan(steps)).result(timeout=seconds_s)
        return str(twin.facts["digest"])


def _plan(steps: int) -> dict[str, Any]:
    return {"steps": steps, "step_s": 0.02, "record_samples": True, "budgets": dict.fromkeys(DEFAULT_BUDGETS, 20)}


def _wait(snapshot: Snapshot, budgets: Mapping[str, int]) -> Action:
    """A policy that does nothing: the reference is not there while this lab is graded."""
    return Wait(reason="nothing is wrong")
