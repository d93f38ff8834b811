"""What a cluster could leave behind, seen from outside: processes, shared memory, run folders, threads."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ftlab.config import CLUSTER_LABEL, runs_dir
from tests.limits import SOON_S

SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Traces:
    """Everything of ours that is there at one moment, each with the words to describe it."""

    processes: dict[tuple[int, float], tuple[str, str]]  # (pid, start) -> (cluster, description)
    segments: frozenset[str]
    folders: frozenset[str]
    threads: frozenset[threading.Thread]

    def since(self, before: Traces) -> list[str]:
        """What is here now and was not before; clusters that were already running may start processes."""
        running = {cluster for cluster, _ in before.processes.values()}
        return [
            *(f"process {words}" for key, (cluster, words) in self.processes.items()
              if key not in before.processes and cluster not in running),
            *(f"shared memory /dev/shm/{name}" for name in sorted(self.segments - before.segments)),
            *(f"run folder {name}" for name in sorted(self.folders - before.folders)),
            *(f"thread {each.name}" for each in self.threads - before.threads),
        ]


def look() -> Traces:
    """The traces at this moment."""
    return Traces(
        processes=dict(_labelled_processes()),
        segments=frozenset(each.name for each in _inside(SHM) if "ftlab" in each.name),
        folders=frozenset(str(each) for each in _inside(runs_dir())),
        threads=frozenset(each for each in threading.enumerate() if each.name.startswith("ftlab")),
    )


def fail_if_left(before: Traces) -> None:
    """Fail the test when something that was not there before stays."""
    left = wait_until_gone(before)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


def wait_until_gone(before: Traces, seconds: float = SOON_S) -> list[str]:
    """Poll until nothing new is left or the time is over; what is left then."""
    deadline = time.monotonic() + seconds
    while True:
        left = look().since(before)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _labelled_processes() -> list[tuple[tuple[int, float], tuple[str, str]]]:
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ() if process.pid != os.getpid() else {}
            cluster = environment.get(CLUSTER_LABEL)
            if cluster and environment.get("FTLAB_RUNS") == os.environ.get("FTLAB_RUNS"):  # of this test session
                words = f"{process.pid} of cluster {cluster}: {' '.join(process.cmdline())[:160]}"
                found.append(((process.pid, process.create_time()), (cluster, words)))
        except (psutil.Error, OSError):  # gone meanwhile, a zombie, or somebody else's
            continue
    return found


@contextlib.contextmanager
def ended(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """A process that a test has started, and that does not outlive it whatever comes."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
