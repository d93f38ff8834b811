"""A drill's report as HTML: a card for a notebook, and one self-contained page for many drills.

No scripts, no fonts, no network: everything is inline. A card brings its own paper, and follows the theme of the page
that it stands on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from ftlab.detection import Fault, Recovery
from ftlab.events import Event
from ftlab.report.canvas import duration
from ftlab.report.frame import framed
from ftlab.report.picture import timeline_svg, waterfall_svg
from ftlab.report.story import Story, read_story
from ftlab.report.style import card_css, page_css


def report_fragment(report: Mapping[str, Any], events: Sequence[Event]) -> str:
    """The card that a notebook shows for one drill: verdict, figures, timeline, waterfalls, receipts."""
    return f'<div class="ftlab"><style>{card_css()}</style>{_card(report, events)}</div>'


def report_page(reports: Sequence[tuple[Mapping[str, Any], Sequence[Event]]]) -> str:
    """One complete HTML document for a file; several drills get an overview table that links to their cards."""
    cards = "".join(_card(report, events, anchor=f"drill-{index}") for index, (report, events) in enumerate(reports))
    title = "ftlab drill: " + ", ".join(str(report.get("drill", "?")) for report, _ in reports)
    return whole_page(title, f"{_overview([report for report, _ in reports]) if len(reports) > 1 else ''}{cards}")


def whole_page(title: str, body: str) -> str:
    """A complete document for a file, from its cards."""
    return ('<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"/>'
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
            f"<title>{escape(title)}</title><style>{page_css()}</style></head>"
            f'<body><main class="ftlab">{body}</main></body></html>')


def verdict_badge(report: Mapping[str, Any]) -> tuple[str, str, str]:
    """(tone, word, explanation) of a report's verdict; a run that never recovered says so first."""
    if not report.get("recovered", True):
        return "bad", "not recovered", "training did not go on after the fault"
    verdict = str(report.get("verdict") or "")
    return _VERDICTS.get(verdict, ("plain", verdict or "not compared", NOT_COMPARED))


NOT_COMPARED = "nobody has looked whether the end state is right: job.result(verify=True) trains an undisturbed twin " \
               "and compares"
_VERDICTS = {
    "identical": ("good", "identical", "the same bits as an undisturbed run"),
    "equivalent": ("fair", "equivalent", "differs from an undisturbed run only by the order of the arithmetic"),
    "diverged": ("bad", "diverged", "differs from an undisturbed run"),
}


def _card(report: Mapping[str, Any], events: Sequence[Event], *, anchor: str = "") -> str:
    story = read_story(events)
    tone, word, why = verdict_badge(report)
    place = f' id="{escape(anchor)}"' if anchor else ""
    return (
        f'<section class="ftlab-card"{place}><header><h2>{escape(str(report.get("drill", "drill")))}</h2>'
        f'<span class="badge {tone}">{escape(word)}</span> <span class="soft">{escape(why)}</span></header>'
        f'<p class="soft">{escape(_setup(report))}</p>{_failures(report)}{_figures(report)}{_findings(report)}'
        f"<h3>Timeline</h3>{framed(partial(_timeline, events))}{_waterfalls(story)}{_injections(story)}"
        f"{_repeat(report)}</section>"
    )


def _timeline(events: Sequence[Event], width: int) -> str:
    return timeline_svg(events, width=width)


def _waterfall(recovery: Recovery, width: int) -> str:
    return waterfall_svg(recovery.spans, width=width)


def _setup(report: Mapping[str, Any]) -> str:
    """The circumstances in one line: `process backend · 4 nodes · 1 spare · seed 0`."""
    parts = [f"{report['backend']} backend"] if report.get("backend") else []
    for key in ("nodes", "spares"):
        if report.get(key) is not None:
            parts.append(f"{report[key]} {key if report[key] != 1 else key[:-1]}")
    parts += [f"seed {report['seed']}"] if report.get("seed") is not None else []
    return " \N{MIDDLE DOT} ".join(parts)


def _findings(report: Mapping[str, Any]) -> str:
    found = findings(report)
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in found)}</ul>" if found else ""


def findings(report: Mapping[str, Any]) -> list[str]:
    """What was found and done, one line each: where a worker was stuck, bad steps, slow ranks, lost batches, failed
    saves, worlds built again, containers made and removed."""
    lines = [str(line) for line in report.get("caught") or ()]
    lines += [f"step {row['step']}: {row['reason']} → {row['action']}" for row in report.get("spoiled") or ()]
    lines += [f"rank {row['rank']} was {row['ratio']:g} times slower than the others"
              + (f": {row['cause']}" if row["cause"] else "") for row in report.get("stragglers") or ()]
    lines += [f"step {row['step']} was not saved: {row['reason']}" for row in report.get("unsaved") or ()]
    for row in report.get("restarts") or ():
        lines.append(f"system restart ({row['cause']}): {row['seconds']:.2f} s from the verdict to the first step of "
                     f"generation {row['generation']}")
        if row["came"] and row["left"]:
            lines.append(f"node replacement: {', '.join(row['came'])} for {', '.join(row['left'])}")
    lines += [f"node replacement: {row['node']} created in {row['create_s']:.2f} s, started in {row['start_s']:.2f} s"
              + (f", imported and joined in {row['join_s']:.2f} s" if row["join_s"] is not None else "")
              for row in report.get("created") or ()]
    lines += [f"containers cleanup: {row['node']} removed {row['after_s']:.2f} s after its end"
              + (f" (exit code {row['exit_code']})" if "exit_code" in row else "")
              for row in report.get("cleaned") or ()]
    skipped = list(report.get("skipped") or ())
    if skipped:
        some = ", ".join(map(str, skipped[:8]))
        lines.append(f"{len(skipped)} samples were passed over on purpose: {some}{', …' if len(skipped) > 8 else ''}")
    return lines


def _failures(report: Mapping[str, Any]) -> str:
    failed = report.get("failed_expectations") or ()
    items = "".join(f"<li>{escape(str(one))}</li>" for one in failed)
    return f'<div class="failed"><b>Expectations that failed</b><ul>{items}</ul></div>' if items else ""


def _figures(report: Mapping[str, Any]) -> str:
    cells = "".join(
        f'<div title="{escape(meaning)}"><dd>{escape(value)}</dd><dt>{escape(name)}</dt></div>'
        for name, value, meaning in figures(report)
    )
    return f"<dl>{cells}</dl>"


def figures(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The key figures as (name, value in human units, meaning); a figure that is missing or null shows a dash."""
    worlds = report.get("worlds")
    goodput = report.get("goodput")
    leaked = report.get("leaked")
    return [
        ("stalled", _seconds(report.get("stall_s")), "from the injection to the first step of the restored world"),
        ("detected after", _seconds(report.get("detection_s")),
         "from the injection, or the last evidence of life, to the verdict"),
        ("goodput", _DASH if goodput is None else f"{goodput:.1%}", "share of the time spent on steps that were kept"),
        ("steps lost", _count(report.get("steps_lost")), "committed steps that had to be done again"),
        ("samples lost", _count(report.get("samples_lost")), "samples that training never saw"),
        ("samples repeated", _count(report.get("samples_repeated")), "samples that counted twice"),
        ("world", " \N{RIGHTWARDS ARROW} ".join(map(str, worlds)) if worlds else _DASH, "ranks in each generation"),
        ("generations", _count(report.get("generations")), "memberships that trained"),
        ("state from", str(report.get("source") or _DASH), "the rung of the ladder that recovery took its state from"),
        ("leaked", "nothing" if leaked in (0, [], ()) else _count(leaked), "processes, threads or files left behind"),
    ]


_DASH = "\N{EN DASH}"


def _seconds(value: float | None) -> str:
    return _DASH if value is None else duration(value)


def _count(value: object) -> str:
    if value is None:
        return _DASH
    if isinstance(value, list | tuple | dict):
        return str(len(value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _waterfalls(story: Story) -> str:
    """One waterfall per recovery that recorded its steps; those after the first are folded."""
    shown = [recovery for recovery in story.recoveries if recovery.spans]
    parts = []
    for index, recovery in enumerate(shown):
        fault = next((fault for fault in story.faults if recovery in fault.recoveries), None)
        drawing = framed(partial(_waterfall, recovery))
        title = escape(_recovery_title(recovery, fault))
        if index == 0:
            parts.append(f"<h3>{title}</h3>{drawing}")
        else:
            parts.append(f"<details><summary>{title}</summary>{drawing}</details>")
    return "".join(parts)


def _recovery_title(recovery: Recovery, fault: Fault | None) -> str:
    title = "Recovery"
    if recovery.generation is not None:
        title += f" into generation {recovery.generation}"
    if fault:
        title += f" after #{fault.number} {fault.name}"
    if recovery.source:
        title += f", state from {recovery.source}"
    return title + (" (abandoned: another failure struck)" if recovery.abandoned else "")


def _injections(story: Story) -> str:
    """What was really done to the cluster: one row per injection, with its receipt."""
    if not story.faults:
        return ""
    rows = "".join(_injection(fault, story) for fault in story.faults)
    return f'<h3>Injections</h3><ol class="injections">{rows}</ol>'


def _injection(fault: Fault, story: Story) -> str:
    """What was hit and when, what came of it, and below the receipt: it may be long."""
    facts = [f"at {fault.at - story.start:.3f} s"]
    facts.append("not detected" if fault.detection_s is None else f"detected after {duration(fault.detection_s)}")
    facts += [] if fault.stall_s is None else [f"stalled {duration(fault.stall_s)}"]
    facts += [] if fault.healed_at is None else [f"healed at {fault.healed_at - story.start:.3f} s"]
    told = "".join(f' <span class="soft">{escape(each)}</span>' for each in facts)
    receipt = fault.event.data.get("receipt") or {}
    pairs = receipt.items() if isinstance(receipt, Mapping) else [("receipt", receipt)]
    notes = " ".join(f"<code>{escape(str(key))}={escape(str(value))}</code>" for key, value in pairs)
    return f"<li><p><b>#{fault.number} {escape(fault.name)}</b>{told}</p><p>{notes}</p></li>"


def _repeat(report: Mapping[str, Any]) -> str:
    command = report.get("repeat")
    return f'<p class="soft">Repeat with <code>{escape(str(command))}</code></p>' if command else ""


def _overview(reports: Sequence[Mapping[str, Any]]) -> str:
    """One row per drill, linked to its card."""
    names = ("drill", "backend", "verdict", "detected after", "stalled", "steps lost", "world", "state from", "goodput")
    rows = []
    for index, report in enumerate(reports):
        tone, word, _ = verdict_badge(report)
        known = {name: value for name, value, _ in figures(report)}
        cells = {"drill": f'<a href="#drill-{index}">{escape(str(report.get("drill", "?")))}</a>',
                 "backend": escape(str(report.get("backend", ""))),
                 "verdict": f'<span class="badge {tone}">{escape(word)}</span>',
                 **{name: escape(known[name]) for name in names[3:]}}
        rows.append("<tr>" + "".join(f'<td data-name="{name}">{cell}</td>' for name, cell in cells.items()) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (f'<section class="ftlab-card"><header><h2>Drills</h2></header><table class="folds"><thead><tr>{head}</tr>'
            f"</thead><tbody>{''.join(rows)}</tbody></table></section>")
