"""The report of a run: figures and events together, shown as a card, as a table, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftlab.events import Event, in_order_of_time
from ftlab.report.canvas import duration
from ftlab.report.measure import measure
from ftlab.report.page import findings, report_fragment, report_page, verdict_badge


@dataclass(frozen=True)
class Report:
    """What was measured; `facts` is the drill's JSON, `events` what it was read from, in the order of time."""

    facts: dict[str, Any]
    events: Sequence[Event] = field(repr=False)
    values: dict[int, Any] = field(default_factory=dict, repr=False)  # what the train function returned, by rank
    twin: Report | None = field(default=None, repr=False)  # the undisturbed run it was compared with

    @staticmethod
    def of(name: str, events: Sequence[Event], *, config: dict[str, Any], values: dict[int, Any] | None = None,
           **more: Any) -> Report:
        """The report of one job."""
        events = in_order_of_time(events)
        facts = {"drill": name, "backend": config.get("backend", "process"), "nodes": config["nodes"],
                 "spares": config["spares"], **measure(events)}
        end = next((event for event in reversed(events) if event.kind == "job.finished"), None)
        facts["recovered"] = bool(end and end.data["status"] == "finished")
        facts["digest"] = end.data.get("digest") if end else None
        facts["verdict"] = None  # until somebody compares
        return Report({**facts, **more}, events, values or {})

    @property
    def value(self) -> Any:
        """What rank 0's train function returned."""
        return self.values.get(0)

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        try:
            return facts[name]
        except KeyError:
            raise AttributeError(f"a report has no {name!r}: it has {', '.join(facts)}") from None

    def losses(self) -> list[float]:
        """The mean loss of each committed step, in order; of a long run only of those that are left in its log."""
        return [event.data["loss"] for event in self.events if event.kind == "step.committed" and "loss" in event.data]

    def samples(self) -> list[int] | None:
        """The sample ids of all steps, as they were committed last; None if the job did not record them, or was so
        long that steps were left out of its log."""
        steps: dict[int | None, list[int] | None] = {
            event.step: [] if event.data.get("skipped") else event.data.get("samples") for event in self.events
            if event.kind == "step.committed"}
        thinned = any(event.stands_for > 1 for event in self.events if event.kind == "step.committed")
        known = bool(steps) and not thinned and None not in steps.values()
        return [one for ids in steps.values() for one in ids or ()] if known else None

    def save(self, path: str | Path) -> Path:
        """Write the report as one self-contained HTML file."""
        Path(path).write_text(report_page([(self.facts, self.events)]), encoding="utf-8")
        return Path(path)

    def _repr_html_(self) -> str:
        return report_fragment(self.facts, self.events)

    def __str__(self) -> str:
        return report_table(self.facts)


def report_table(facts: dict[str, Any]) -> str:
    """The figures of a report for a terminal."""
    _, word, why = verdict_badge(facts)
    rows = [("verdict", word if facts.get("verdict") or not facts.get("recovered") else f"{word}: {why}"),
            ("detection", _seconds(facts.get("detection_s"))), ("stall", _seconds(facts.get("stall_s"))),
            ("steps lost", facts.get("steps_lost")), ("samples lost / repeated", _pair(facts)),
            ("worlds", " → ".join(map(str, facts.get("worlds") or []))), ("state from", facts.get("source")),
            ("goodput", facts.get("goodput")), ("leaked", facts.get("leaked"))]
    head = f"{facts['drill']}: {facts['nodes']} nodes + {facts['spares']} spares, {facts['backend']}"
    lines = [head, *(f"  {name:<24} {value}" for name, value in rows if value not in (None, ""))]
    lines += _injection_lines(facts.get("injections") or ())
    lines += [f"  {line}" for line in findings(facts)]
    phases = facts.get("phases") or {}
    if phases:
        lines.append("  recovery")
        lines += [f"    {name:<22} {_seconds(seconds)}" for name, seconds in phases.items()]
    lines += [f"  failed: {line}" for line in facts.get("failed_expectations", [])]
    return "\n".join(lines)


def _injection_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What each of several faults cost: the figures above are the worst of them."""
    told = []
    for number, row in enumerate(rows, 1):
        name = f"#{number} {row['fault']} {row['target']}"
        told.append(f"  {name:<24} detection {_seconds(row['detection_s']) or 'none':<9} "
                    f"stall {_seconds(row['stall_s']) or 'none'}")
    return told if len(told) > 1 else []


def _seconds(value: float | None) -> str:
    return "" if value is None else duration(value)


def _pair(facts: dict[str, Any]) -> str:
    return "" if facts.get("samples_lost") is None else f"{facts['samples_lost']} / {facts['samples_repeated']}"
