"""`ftlab demo`: a tour of about two minutes over the real thing."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from ftlab.cluster.cluster import Cluster
from ftlab.drill.drill import DrillPlan, submit_example
from ftlab.faults import KINDS, Pending, make
from ftlab.report.report import Report

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
_PLAN = DrillPlan(steps=120)


def demo(arguments: argparse.Namespace) -> int:
    """Start a cluster, break it in several ways, print what was measured, say where the labs are."""
    begin = time.monotonic()
    _say("ftlab: a cluster of 4 nodes and 1 spare on this machine, training a small network.\n"
         "Each node is a group of real processes with its own address. Starting it (import torch, once) ...")
    with Cluster(nodes=4, spares=1, echo=None) as cluster:
        _say(f"up after {time.monotonic() - begin:.1f} s: {cluster!r}\n\nFirst the undisturbed run, to compare with.")
        twin = submit_example(cluster, _PLAN).result(timeout=120)
        _say(f"  {twin.steps} steps, final state {twin.digest[:16]}...")
        broken = [kind for kind in list(_STOPS)[:1 if arguments.quick else None]
                  if not _break(cluster, kind, twin)]
    _say(f"\nAll processes are gone again. The tour took {time.monotonic() - begin:.0f} s.\n"
         "Next: `ftlab drill kill --report kill.html` draws one of these as a timeline;\n"
         f"      `make lab` opens the labs in {Path('labs').resolve()}.")
    if broken:
        _say(f"These did not end as they should: {', '.join(broken)}. Please report it with `ftlab doctor`'s output.")
    return 1 if broken else 0


def _break(cluster: Cluster, kind: str, twin: Report) -> bool:
    rank = 0 if kind == "kill" else 2  # no rank is special
    _say(f"\n{kind}: {KINDS[kind]}\n  {_STOPS[kind]}")
    with TemporaryDirectory(prefix="ftlab-demo-") as folder:
        job = submit_example(cluster, _PLAN, folder if kind in ("blackout", "corrupt") else "")
        heal = 1.0 if kind in ("hang", "partition") else None
        way = "flip" if kind == "corrupt" else ""
        pending = cluster.inject(make(kind, f"rank-{rank}", at_step=40, heal_after=heal, way=way))
        report = job.result(timeout=120)
        assert isinstance(pending, Pending)
        pending.wait(10)
    same = report.digest == twin.digest
    detected = "" if report.detection_s is None else f"noticed after {report.detection_s * 1000:.0f} ms, "
    back = "no stop at all" if kind == "controller" else f"training again after {(report.stall_s or 0) * 1000:.0f} ms"
    _say(f"  {detected}{back}, {report.steps_lost} steps lost, "
         f"end state {'identical, bit by bit' if same else 'DIFFERENT'}")
    return bool(same)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
