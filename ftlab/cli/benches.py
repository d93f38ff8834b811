"""`ftlab bench`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ftlab.bench.overhead import bench_overhead, overhead_table
from ftlab.bench.recovery import KINDS, bench_recovery, recovery_table
from ftlab.cli.report_file import check_folder
from ftlab.cluster.cluster import choose_backend
from ftlab.errors import ConfigError, UnknownFault


def bench(arguments: argparse.Namespace) -> int:
    """Run a bench and print its figures."""
    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    if arguments.what == "overhead":
        result = bench_overhead(arguments.nodes or 2, arguments.spares, say=say)
        table = overhead_table(result)
    elif arguments.what == "checkpoint":
        from ftlab.bench.checkpoint import bench_checkpoint, checkpoint_table  # torch's own checkpoints load slowly

        result = bench_checkpoint(_sizes(arguments.size_mb), arguments.repeats, arguments.blocks, arguments.dir, say)
        table = checkpoint_table(result)
    elif arguments.what == "detectors":
        from ftlab.bench.detectors import bench_detectors, detectors_page, detectors_table

        check_folder(arguments.report)
        result = bench_detectors(arguments.record, arguments.seconds, say)
        table = detectors_table(result)
        if arguments.report:
            Path(arguments.report).write_text(detectors_page(result), encoding="utf-8")
            say(f"report: {arguments.report}")
    elif arguments.what == "interval":
        from ftlab.bench.interval import bench_interval, interval_page, interval_table

        check_folder(arguments.report)
        result = bench_interval(_intervals(arguments.every), arguments.steps, arguments.kills, arguments.seed,
                                arguments.nodes or 2, arguments.spares, say)
        table = interval_table(result)
        if arguments.report:
            Path(arguments.report).write_text(interval_page(result), encoding="utf-8")
            say(f"report: {arguments.report}")
    else:
        kinds = [name for name in arguments.faults.split(",") if name] or list(KINDS)
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown:
            raise UnknownFault(f"cannot bench {', '.join(unknown)}", hint=f"faults are {', '.join(KINDS)}")
        result = bench_recovery(kinds, arguments.runs, arguments.seed, say=say, nodes=arguments.nodes or 4,
                                spares=arguments.spares, procs_per_node=arguments.procs_per_node,
                                backend=choose_backend(arguments.backend))
        table = recovery_table(result)
    sys.stdout.write((json.dumps(result) if arguments.json else table) + "\n")
    return 0


def _sizes(text: str) -> list[float]:
    try:
        sizes = [float(each) for each in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size < 1e6 for size in sizes):
        raise ConfigError(f"--size-mb must be sizes in MB, separated by commas (got {text!r})")
    return sizes


def _intervals(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--every must be numbers of steps, separated by commas (got {text!r})") from None
