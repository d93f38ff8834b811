"""`ftlab demo`: a tour of about two minutes over the real thing, which leaves a report to look at.

What this machine cannot do is named and left out; that is no failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ftlab.cluster.cluster import Cluster
from ftlab.cluster.temporary import TemporaryFolder
from ftlab.drill.drill import DrillPlan, submit_example
from ftlab.errors import ConfigError, FaultError, FaultUnavailable
from ftlab.faults import KINDS, Fault, Pending, make
from ftlab.report.page import report_page
from ftlab.report.report import Report
from ftlab.report.verdict import judged

_STOPS = {
    "kill": "Its node is gone for good: the spare takes its rank, with the state of a living replica.",
    "crash": "Only the worker died: a new one is forked on the same node, in milliseconds.",
    "hang": "Nobody hears from the node. Its peers would wait for ever; the controller cuts their sockets.",
    "partition": "The node lives but its packets are dropped. When they pass again, it may only come back as new.",
    "stall": "Heartbeats go on, training does not: the worker that holds the others up is replaced.",
    "controller": "Nobody decides any more, and nobody needs to: training goes on until it is back.",
    "blackout": "Every node is gone, and every copy of the state with it: it comes back from the newest checkpoint.",
    "corrupt": "The same, and one bit of the newest checkpoint is flipped: its digest tells, the one before is used.",
}
_FROM_STORAGE = ("blackout", "corrupt")
_PLAN = DrillPlan(steps=120)
_PAGE = "ftlab-demo.html"
_LIMIT_S = 300.0  # for one job, on a machine that is busy with other things


def demo(arguments: argparse.Namespace) -> int:
    """Break a cluster in several ways and print what was measured; 1 if a run did not end as it should."""
    begin = time.monotonic()
    _check_place(arguments.report)
    _say("ftlab: a cluster of 4 nodes and 1 spare on this machine, training a small network.\n"
         "Each node is a group of real processes with its own address. Starting it (import torch, once) ...")
    with TemporaryFolder("demo") as folder, Cluster(nodes=4, spares=1, echo=None) as cluster:
        _say(f"up after {time.monotonic() - begin:.1f} s: {cluster!r}\n\nFirst the undisturbed run, to compare with.")
        twin = submit_example(cluster, _PLAN).result(timeout=_LIMIT_S)
        _say(f"  {twin.steps} steps, final state {twin.digest[:16]}...")
        reports, left_out = _tour(cluster, list(_STOPS)[:1 if arguments.quick else None], twin, Path(folder))
    page = _write(report_page([(report.facts, report.events) for report in reports]), arguments.report)
    _say(f"\nAll processes are gone again. The tour took {time.monotonic() - begin:.0f} s.")
    return _close(reports, left_out, page)


def _tour(cluster: Cluster, kinds: Sequence[str], twin: Report, folder: Path) -> tuple[list[Report], list[str]]:
    """The reports of what could be done here, and the names of what could not."""
    reports, left_out = [], []
    for kind in kinds:
        _say(f"\n{kind}: {KINDS[kind]}\n  {_STOPS[kind]}")
        try:
            reports.append(_break(cluster, _fault(kind), twin, folder))
        except FaultUnavailable as error:
            left_out.append(kind)
            _say(f"  Left out: {error.message}")
    return reports, left_out


def _fault(kind: str) -> Fault:
    return make(kind, "rank-0" if kind == "kill" else "rank-2", at_step=40,  # no rank is special
                heal_after=1.0 if kind in ("hang", "partition") else None, way="flip" if kind == "corrupt" else "")


def _break(cluster: Cluster, fault: Fault, twin: Report, folder: Path) -> Report:
    """One job with one fault; raises FaultUnavailable if this machine turns out not to be able to do it."""
    if reason := cluster.missing(fault.needs):
        raise FaultUnavailable(reason)
    job = submit_example(cluster, _PLAN, str(folder / fault.kind) if fault.kind in _FROM_STORAGE else "")
    pending = cluster.inject(fault)
    report = judged(job.result(timeout=_LIMIT_S), twin)
    assert isinstance(pending, Pending)
    problems = []
    try:
        pending.wait(10)
    except FaultUnavailable:
        raise
    except (TimeoutError, FaultError) as error:
        problems.append(f"the fault did not happen: {error}")
    report.facts.update(drill=fault.kind, failed_expectations=[*problems, *_wrong(report)])
    _say(f"  {_summary(report)}")
    return report


def _wrong(report: Report) -> list[str]:
    return [] if report.verdict == "identical" else [f"the end state is {report.verdict}, not identical to the twin's"]


def _summary(report: Report) -> str:
    detected = "" if report.detection_s is None else f"noticed after {report.detection_s * 1000:.0f} ms, "
    back = "no stop at all" if report.drill == "controller" else \
        f"training again after {(report.stall_s or 0) * 1000:.0f} ms"
    same = "identical, bit by bit" if report.verdict == "identical" else "DIFFERENT"
    return f"{detected}{back}, {report.steps_lost} steps lost, end state {same}"


def _close(reports: Sequence[Report], left_out: Sequence[str], page: Path) -> int:
    broken = [f"{report.drill} ({'; '.join(report.failed_expectations)})" for report in reports
              if report.failed_expectations]
    if broken:
        _say(f"These did not end as they should: {', '.join(broken)}.\nPlease report it with `ftlab doctor`'s output.")
    if left_out:
        _say(f"Left out, as this machine cannot do it: {', '.join(left_out)}; `{_program()} doctor` says what would "
             f"help.")
    _say(f"""
What to do next
  look    open {page.resolve()}
          in a browser: a timeline of each fault, and where the time of its recovery went
  learn   `make lab` in ftlab's folder: the labs, in JupyterLab
  try     `{_program()} drill kill`: one of these again, measured; `{_program()} --help` lists the rest
  read    README.md, and docs/recovery.md: what happens in those milliseconds""")
    return 1 if broken else 0


def _program() -> str:
    """How to call ftlab from the shell that this was started in."""
    if shutil.which("ftlab"):
        return "ftlab"
    program = Path(sys.executable).parent / "ftlab"
    here = Path.cwd()
    return str(program.relative_to(here) if program.parent.parent.parent == here else program)  # .venv/bin/ftlab


def _check_place(wanted: str) -> None:
    """Two minutes later would be late to find out."""
    folder = Path(wanted).resolve().parent
    if wanted and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"the report cannot be written to {folder}: it is no folder that you may write to")


def _write(text: str, wanted: str) -> Path:
    """Write the report where it was asked for, else into this folder, else into the temporary one."""
    path = Path(wanted or _PAGE)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError:
        if wanted:
            raise
        number, name = tempfile.mkstemp(prefix="ftlab-demo-", suffix=".html")
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        return Path(name)
    return path


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
