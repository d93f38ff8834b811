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
from ftlab.grading.lab03.situations import plain, read
from ftlab.policy import Action, Snapshot
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


def run_cluster(policy: Callable[..., Any], steps: int, kill_at: int, nan_at: int, seconds_s: float) -> dict[str, Any]:
    """A job under this policy, with a node that is killed and a gradient that turns into NaN: its event log, and the
    digest of an undisturbed twin under the reference policy."""
    with Cluster(2, 1, echo=None, **PATIENT) as cluster:
        plan: dict[str, Any] = {"steps": steps, "step_s": 0.02, "record_samples": True,
                                "budgets": dict.fromkeys(DEFAULT_BUDGETS, 20)}
        twin = cluster.submit(train_network, **plan).result(timeout=seconds_s)
        job = cluster.submit(train_network, policy=policy, **plan)
        cluster.inject(kill("rank-1", at_step=kill_at))
        cluster.inject(nan("rank-0", at_step=nan_at))
        error = ""
        try:
            job.result(timeout=seconds_s)
        except FtlabError as raised:
            error = str(raised)[:500]
            with contextlib.suppress(FtlabError):
                job.cancel()
        return {"twin": twin.facts["digest"], "error": error,
                "events": [json.loads(event.to_json()) for event in job.events]}
