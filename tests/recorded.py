"""Event logs of real drills, recorded once: `python -m tests.recorded kill hang` records these again.

Each was run as `ftlab drill NAME --nodes 4 --spares 1 --steps 60` (`straggler` with 150 steps, `random` and `faults`
with three faults in 90 steps). What pictures do not show, such as sample ids, is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ftlab.events import Event, read_events
from ftlab.report.report import Report

FOLDER = Path(__file__).parent / "logs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jsonl"))
_RANDOM = {"random": 3, "faults": 1}  # the seeds of those with three faults
_LEFT_OUT = ("samples", "path", "config")


def load(name: str) -> list[Event]:
    """The events of a recorded drill, in the order of the log."""
    return list(read_events(FOLDER / f"{name}.jsonl"))


def report_of(name: str, **more: Any) -> Report:
    """Its report, as if the run had been compared and had ended well."""
    facts = {"seed": 0, "verdict": "identical", "samples_lost": 0, "samples_repeated": 0, "leaked": 0,
             "failed_expectations": [], "repeat": f"ftlab drill {name} --seed 0 --nodes 4 --spares 1 --steps 60"}
    config = {"backend": "process", "nodes": 4, "spares": 1}
    return Report.of(name, load(name), config=config, **{**facts, **more})


def record(name: str) -> None:
    """Run a drill and keep its log."""
    from ftlab.drill.drill import run_drill, run_random

    if name in _RANDOM:
        events = run_random(faults=3, steps=90, seed=_RANDOM[name]).events
    else:
        events = run_drill(name, steps=150 if name == "straggler" else 60).events
    lines = []
    for event in sorted(events, key=lambda each: each.seq):
        data = {key: value for key, value in event.data.items() if key not in _LEFT_OUT}
        lines.append(Event(**{**vars(event), "data": data}).to_json())
    (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        record(each)
