"""The figures of a run, read from its event log and from nothing else.

`detection_s` runs from an injection (or, where nobody injected anything, the last evidence of life) to the
controller's verdict, see `ftlab.detection`; `stall_s` from the injection to the first step that every rank of the
restored world committed, `mend_s` to that step from the first sign of the fault. With several failures the figures at
the top are the worst ones, and `phases` are those of the recovery that was slowest to begin.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ftlab.detection import Fault, Recovery, read_failures
from ftlab.events import Event, in_order_of_time


def measure(events: Sequence[Event]) -> dict[str, Any]:
    """All figures of one job's events, by the names of the drill's JSON."""
    events, failures = in_order_of_time(events), read_failures(events)
    injections = [_measure_injection(fault, events) for fault in failures.faults]
    recoveries = _of(events, "recovery.finished")
    tables = _of(events, "membership.changed")
    return {
        "injected": len(injections), "injections": injections,
        "detection_s": _worst(map(_rounded, failures.detections())),
        "stall_s": _worst(row["stall_s"] for row in injections),
        "mend_s": _worst(row["mend_s"] for row in injections),
        "phases": dict(_slowest_to_notice(failures.recoveries)), "recoveries": len(recoveries),
        "causes": [event.data["cause"] for event in recoveries],
        "steps": max((event.step or 0 for event in _of(events, "step.committed")), default=0),
        "steps_lost": _steps_lost(events),
        "worlds": [event.data["world"] for event in tables], "generations": len(tables),
        "source": _source(recoveries),
        "checkpoints": sum(event.stands_for for event in _of(events, "checkpoint.committed")),
        "damaged": len(_of(events, "checkpoint.damaged")),
        "unsaved": [{"step": event.step, "reason": event.data.get("reason", "")}
                    for event in _of(events, "checkpoint.failed")],
        "skipped": [sample for event in _of(events, "step.committed") for sample in event.data.get("passed_over", ())],
        "spoiled": [{"cause": event.data["cause"], "step": event.step, "action": event.data["action"],
                     "reason": event.data["reason"]} for event in _of(events, "step.spoiled")],
        "stragglers": [{"rank": event.rank, "ratio": event.data["ratio"], "cause": event.data["cause"]}
                       for event in _of(events, "straggler.found")],
        "caught": [f"rank {event.data['stuck_rank']} is {event.data['detail']}"
                   for event in _of(events, "worker.caught")],
        "restarts": _restarts(events, failures.recoveries), "created": _created(events), "cleaned": _cleaned(events),
        "goodput": goodput(events),
    }


def _restarts(events: Sequence[Event], recoveries: Sequence[Recovery]) -> list[dict[str, Any]]:
    """Each time the world was built again: why, how long from the verdict to its first step, who left and who came."""
    rows: list[dict[str, Any]] = []
    before: set[str] = set()
    now: set[str] = set()
    for event in events:
        if event.kind == "membership.changed":
            now = {seat["node"] for seat in event.data["table"]["seats"]}
            before = before or now
        elif event.kind == "recovery.finished":
            first_step = max((span["end"] for span in event.data["spans"]), default=event.at)
            verdict = next((one.noticed for one in recoveries if one.end == event.at), event.at)
            rows.append({"generation": event.generation, "cause": event.data["cause"],
                         "seconds": round(max(0.0, first_step - verdict), 4),
                         "left": sorted(before - now), "came": sorted(now - before)})
            before = now
    return rows


def _created(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Containers that were made during the run, and how long each phase took; the last one is import and join."""
    rows = []
    for made in _of(events, "node.created"):
        joined = next((event for event in _of(events, "node.joined")
                       if event.source == made.source and event.at >= made.at), None)
        rows.append({"node": made.source, "create_s": made.data["create_s"], "start_s": made.data["start_s"],
                     "join_s": round(joined.at - made.at, 4) if joined else None})
    return rows


def _cleaned(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Containers that were removed during the run: how long after their end, and what the engine said of it."""
    ends = {event.source: event.at for event in _of(events, "node.died")}
    return [{"node": event.source, "after_s": round(event.at - ends[event.source], 4), **event.data.get("engine", {})}
            for event in _of(events, "node.removed") if event.source in ends]


def goodput(events: Sequence[Event]) -> float | None:
    """The share of the run that typical steps would have taken."""
    steps = _of(events, "step.committed")
    if len(steps) < 3:
        return None
    gaps = [(later.at - sooner.at) / later.stands_for for sooner, later in pairwise(steps) if later.at > sooner.at]
    total, count = steps[-1].at - steps[0].at, sum(event.stands_for for event in steps[1:])
    return round(min(1.0, statistics.median(gaps) * count / total), 4) if total > 0 and gaps else None


def _measure_injection(fault: Fault, events: Sequence[Event]) -> dict[str, Any]:
    until = fault.stalled_until
    seen = _first_sign(events, fault.at) if until else None
    return {"fault": fault.event.data.get("fault"), "target": fault.event.data.get("target"),
            "detection_s": _rounded(fault.detection_s), "stall_s": _rounded(fault.stall_s),
            "mend_s": _rounded(until - seen) if until and seen and seen <= until else None,  # later: another fault's
            "receipt": fault.event.data.get("receipt", {})}


def _slowest_to_notice(recoveries: Sequence[Recovery]) -> Mapping[str, float]:
    """The phases of the recovery whose failure stayed unnoticed longest; of equal ones the first."""
    came_through = [one for one in recoveries if one.phases]
    return max(came_through, key=lambda one: one.detection_s).phases if came_through else {}


def _first_sign(events: Sequence[Event], at: float) -> float | None:
    """When a fault first showed, which may be long after it was injected: memory runs out in a later step."""
    signs = ("memory.failed", "step.spoiled", "worker.failed", "worker.stopped", "node.suspected", "node.died")
    return min((event.at for event in events if event.kind in signs and event.at >= at), default=None)


def _steps_lost(events: Sequence[Event]) -> int:
    """Committed steps that had to be done again: how far each restored world began behind the newest step."""
    lost = newest = 0
    generation: int | None = None
    for event in _of(events, "step.committed"):
        step = event.step or 0
        if event.generation != generation and generation is not None:
            lost += max(0, newest - (step - event.stands_for))
        generation, newest = event.generation, max(newest, step)
    return lost


def _source(recoveries: Sequence[Event]) -> str | None:
    return next((event.data["rung"] for event in recoveries if event.data.get("rung")), None)


def _of(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event.kind == kind]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _worst(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
