"""`ftlab drill`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ftlab.cli.report_file import check_folder
from ftlab.cluster.cluster import choose_backend
from ftlab.drill.drill import DRILLS, run_drill, run_random, unavailable
from ftlab.errors import FaultUnavailable, FtlabError
from ftlab.report.page import report_page
from ftlab.report.report import Report, report_table


def drill(arguments: argparse.Namespace) -> int:
    """Run the drills that were asked for; 0 if every expectation held."""
    check_folder(arguments.report)
    skipped = _impossible(arguments) if arguments.name == "all" else {}
    for name, reason in skipped.items():
        _say(f"[{name}] left out: {reason}")
    names = [name for name in DRILLS if name not in skipped] if arguments.name == "all" else [arguments.name]
    reports: list[Report] = []
    twin: Report | None = None
    broken: dict[str, str] = {}  # drills that came to no verdict, and why
    for name in names:
        try:
            report = _run_one(name, twin, arguments)
        except FtlabError as error:
            if arguments.name != "all":
                raise
            if isinstance(error, FaultUnavailable):
                skipped[name] = error.message
                _say(f"[{name}] left out: {error.message}")
                continue
            broken[name] = error.message  # the others can still be run
            _say(f"[{name}] no verdict: {error}")
            continue
        twin = report.twin
        reports.append(report)
        if not arguments.json:
            sys.stdout.write(f"{report_table(report.facts)}\n\n")
            sys.stdout.flush()
    failed = [report.facts["repeat"] for report in reports if not report.facts["held"]]
    held = not failed and not broken
    if arguments.report:
        Path(arguments.report).write_text(report_page([(report.facts, report.events) for report in reports]),
                                          encoding="utf-8")
    if arguments.json:
        facts = [report.facts for report in reports]
        every = {"drills": facts, "held": held, "left_out": skipped, "broken": broken}
        body = every if arguments.name == "all" else facts[0]
        sys.stdout.write(json.dumps(body) + "\n")
    else:
        if skipped:
            _say(f"left out, as this machine cannot do it: {', '.join(skipped)}; `ftlab doctor` says what would help")
        _say(f"every expectation held{_repeat(reports)}" if held else
             f"NOT everything held; repeat: {(failed or [f'ftlab drill {next(iter(broken))}'])[0]}")
        if arguments.report:
            _say(f"report: {arguments.report}")
    return 0 if held else 1


def _repeat(reports: list[Report]) -> str:
    return f"; repeat: {reports[-1].facts['repeat']}" if reports else ""


def _impossible(arguments: argparse.Namespace) -> dict[str, str]:
    """The drills that this machine cannot run, and why; found out before anything is started."""
    reasons = {name: unavailable(name, **_plan(name, arguments)) for name in DRILLS}
    return {name: reason for name, reason in reasons.items() if reason}


def _run_one(name: str, twin: Report | None, arguments: argparse.Namespace) -> Report:
    plan = _plan(name, arguments)
    if name == "random":
        return run_random(faults=arguments.faults, twin=twin, **plan)
    return run_drill(name, twin=twin, **plan)


def _plan(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "nodes": arguments.nodes, "spares": arguments.spares, "procs_per_node": arguments.procs_per_node,
        "steps": arguments.steps, "step_s": arguments.step_ms / 1000, "seed": arguments.seed,
        "exact": arguments.exact, "way": arguments.way,
        "settings": {"backend": choose_backend(arguments.backend), "network": arguments.network},
        "say": lambda text: _say(f"[{name}] {text}")}


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
