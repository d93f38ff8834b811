"""The verdict on a run: is its end state the undisturbed twin's, bit by bit, and did it see the same samples?"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ftlab.report.report import Report

EQUIVALENT = 1e-3  # the largest difference that a changed order of additions may explain


def compare(run: Report, twin: Report) -> dict[str, Any]:
    """`identical`, `equivalent` (with the largest difference) or `diverged`; samples lost and repeated."""
    if not run.facts["recovered"]:
        return {"verdict": None, "largest_difference": None, "samples_lost": None, "samples_repeated": None}
    largest = _largest_difference(run, twin)
    if run.facts["digest"] is not None and run.facts["digest"] == twin.facts["digest"]:
        verdict = "identical"
    elif largest is not None and largest <= EQUIVALENT and _reordered(run):
        verdict = "equivalent"
    else:
        verdict = "diverged"
    lost, repeated = _samples(run, twin)
    return {"verdict": verdict, "largest_difference": 0.0 if verdict == "identical" else largest,
            "samples_lost": lost, "samples_repeated": repeated}


def judged(run: Report, twin: Report) -> Report:
    """The same report with its verdict against an undisturbed twin, to be shown."""
    return Report({**run.facts, **compare(run, twin)}, run.events, run.values, twin)


def _samples(run: Report, twin: Report) -> tuple[int | None, int | None]:
    """How many samples the run lost and repeated; unknown where one of the two did not record them."""
    mine, theirs = run.samples(), twin.samples()
    if mine is None or theirs is None:
        return None, None
    seen, wanted = Counter(mine), Counter(theirs)
    return sum((wanted - seen).values()), sum((seen - wanted).values())


def _reordered(run: Report) -> bool:
    """Whether the order of additions had to change: the world did, batches were cut into smaller pieces, or a kernel
    takes another order each time, as the rehearsal saw."""
    loose = any(event.kind == "rehearsal.finished" and event.data["verdict"] == "equivalent" for event in run.events)
    split = any(row["action"] == "Split" for row in run.facts["spoiled"])
    killed = any(event.kind == "worker.failed" and event.data.get("cause") == "oom" for event in run.events)
    return len(set(run.facts["worlds"])) > 1 or split or killed or loose


def _largest_difference(run: Report, twin: Report) -> float | None:
    if not all(isinstance(each.value, dict) and "probe" in each.value for each in (run, twin)):
        return None
    pairs = zip(run.value["probe"], twin.value["probe"], strict=True)
    return max((abs(mine - theirs) for mine, theirs in pairs), default=None)
