"""Which failure detector, and how strict? Each of them, at many thresholds, on the same recorded heartbeats.

The traces that come with ftlab are replayed, or new ones are recorded on this machine first. What is measured are the
detectors, not the cluster: the heartbeats come from stand-ins (see `heartbeats`), the watcher looks every 50 ms, and a
death is noticed by silence alone. A few minutes of traces cannot show rare alarms: 0 means fewer than one in the time
that was watched, which the table gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ftlab.bench.heartbeats import record_traces
from ftlab.errors import ConfigError
from ftlab.health.detector import Detector
from ftlab.health.simulation import LOOK_S, PAUSE_S, PHIS, TIMEOUTS_S, Row, simulate, sweep
from ftlab.health.traces import Trace, load_traces
from ftlab.report.detectors import Mark, Panel, detectors_svg
from ftlab.report.frame import WIDE
from ftlab.report.sheet import sheet
from ftlab.validation import check_seconds

NAMES = {"timeout": "fixed timeout", "phi": "phi accrual", "phi_pause": f"phi accrual + {PAUSE_S:g} s"}
TITLE = "Failure detectors: how soon against how often wrongly"


def bench_detectors(record: bool = False, seconds: float = 60.0, say: Callable[[str], None] = lambda text: None,
                    timeouts: Sequence[float] = TIMEOUTS_S, phis: Sequence[float] = PHIS) -> dict[str, Any]:
    """False alarms and detection latency of every setting under every condition; `seconds` is for new recordings."""
    if check_seconds("seconds", seconds) == 0:
        raise ConfigError("seconds must be positive: a recording takes time")
    traces = record_traces(seconds, say=say) if record else load_traces()
    say(f"replaying {len(traces)} traces to {len(timeouts) + 2 * len(phis)} detectors")
    rows = [row.to_dict() for row in sweep(traces, timeouts, phis)]
    return {"bench": "detectors", "recorded": record, "look_s": LOOK_S, "traces": _conditions(traces), "rows": rows}


def trade_off(make: Callable[[float], Detector], thresholds: Sequence[float], words: str = "my detector",
              timeouts: Sequence[float] = TIMEOUTS_S[1::2], phis: Sequence[float] = PHIS[1::2]) -> dict[str, Any]:
    """The same with somebody's own detector at some thresholds beside ours; one node of each condition, for speed."""
    traces = [trace for trace in load_traces() if trace.node == "node-0"]
    rows = [row for row in sweep(traces, timeouts, phis) if row.detector != "phi_pause"]
    rows += [Row(trace=trace.name, detector="own", threshold=threshold,
                 outcome=simulate(partial(make, threshold), trace))
             for trace in traces for threshold in thresholds]
    names = {"timeout": NAMES["timeout"], "phi": NAMES["phi"], "own": words}
    return {"bench": "detectors", "recorded": False, "look_s": LOOK_S, "traces": _conditions(traces), "names": names,
            "rows": [row.to_dict() for row in rows]}


def detectors_table(result: dict[str, Any]) -> str:
    """The bench for a terminal."""
    head = _cells(None)
    lines = [head, *(_cells(row) for row in result["rows"])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    shown = ["   ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*shown, "", *_conclusions(result)])


def detectors_page(result: dict[str, Any]) -> str:
    """The bench as one self-contained HTML file with its picture."""
    rows = [_cells(None), *(_cells(row) for row in result["rows"])]
    return sheet(TITLE, partial(detectors_picture, result), rows, _conclusions(result))


def detectors_picture(result: dict[str, Any], width: int = WIDE) -> str:
    """The bench as SVG, one panel per condition; settings that missed a death are left out."""
    return detectors_svg([Panel(title=trace["name"], curves={
        words: [_mark(row) for row in _rows(result, trace["name"], kind) if row["worst_s"] is not None]
        for kind, words in result.get("names", NAMES).items()}) for trace in result["traces"]], TITLE, width=width)


def quickest_quiet(result: dict[str, Any], trace: str, detector: str) -> dict[str, Any] | None:
    """The row of the setting that notices deaths soonest (at worst) among those without a false alarm, if any."""
    quiet = [row for row in _rows(result, trace, detector) if not row["false_alarms"] and row["worst_s"] is not None]
    return min(quiet, key=lambda row: float(row["worst_s"]), default=None)


def _conditions(traces: Iterable[Trace]) -> list[dict[str, Any]]:
    """What was recorded, condition by condition."""
    together: dict[str, list[Trace]] = {}
    for trace in traces:
        together.setdefault(trace.name, []).append(trace)
    return [{"name": name, "nodes": len(same), "interval_s": same[0].interval_s,
             "heartbeats": sum(len(trace.arrivals) for trace in same),
             "watched_s": round(sum(trace.arrivals[-1] - trace.arrivals[0] for trace in same if trace.arrivals), 1),
             "pauses": sum(len(trace.pauses) for trace in same),
             "longest_gap_s": round(max(trace.longest_gap() for trace in same), 4), "recorded": same[0].recorded}
            for name, same in together.items()]


def _rows(result: dict[str, Any], trace: str, detector: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if (row["trace"], row["detector"]) == (trace, detector)]


def _mark(row: Mapping[str, Any]) -> Mark:
    return Mark(median_s=row["median_s"], worst_s=row["worst_s"], alarms=row["alarms_per_hour"], label=_setting(row))


def _setting(row: Mapping[str, Any]) -> str:
    mark = {"timeout": f"{row['threshold']:g} s", "own": f"{row['threshold']:g}"}
    return mark.get(row["detector"], f"φ {row['threshold']:g}")


def _cells(row: Mapping[str, Any] | None) -> list[str]:
    """One line of the table, or its head."""
    if row is None:
        return ["condition", "detector", "dead from", "false alarms", "per hour", "noticed after", "at worst", "missed"]
    return [row["trace"], NAMES[row["detector"]], _setting(row), str(row["false_alarms"]),
            f"{row['alarms_per_hour']:.0f}", _seconds(row["median_s"]), _seconds(row["worst_s"]), str(row["missed"])]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _conclusions(result: dict[str, Any]) -> list[str]:
    lines = []
    for trace in result["traces"]:
        found = [f"{NAMES[kind]} {_choice(quickest_quiet(result, trace['name'], kind))}" for kind in NAMES]
        lines.append(f"{trace['name']}: quickest without a false alarm: {'; '.join(found)}")
    lines += [f"{trace['name']}: {trace['heartbeats']} heartbeats of {trace['nodes']} nodes in {trace['watched_s']:g} "
              f"node-seconds, {trace['pauses']} pauses, longest gap {trace['longest_gap_s']:.3f} s; one alarm is "
              f"{3600 / trace['watched_s']:.0f} per hour ({trace['recorded']})"
              for trace in result["traces"] if trace["watched_s"]]
    return [*lines, f"the watcher looks every {result['look_s'] * 1000:.0f} ms; a death comes right after a heartbeat, "
                    "and is measured after each of them"]


def _choice(row: Mapping[str, Any] | None) -> str:
    return "none" if row is None else f"{_setting(row)} (at worst {_seconds(row['worst_s'])})"
