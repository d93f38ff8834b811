"""How long a load takes, each way in a process of its own, as in a run that resumes.

In one process they would not be measured apart: what one way leaves behind in the heap (memory that the kernel has
already given, or in huge pages) makes the next one several times faster.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ftlab.bench.checkpoint_methods import DcpSave, Method, Ours, TorchSave, Workload
from ftlab.checkpoint.manager import CheckpointManager
from ftlab.errors import FtlabError

Seconds = dict[str, list[float]]  # by figure
_WARM = 2  # loads that do not count: fresh memory is slow at first on a virtual machine
_COUNTED = 5


def time_loads(method: Method, size_mb: float, path: Path, folder: Path) -> Seconds:
    """What loading takes in a new process; `path` is what the method saved, `folder` where ftlab's checkpoints are."""
    if isinstance(method, Ours):
        return {"load_s": _in_a_process("ftlab", size_mb, folder)}
    if isinstance(method, TorchSave):
        return {"load_s": _in_a_process("torch", size_mb, path),
                "load_live_s": _in_a_process("torch, live", size_mb, path)}
    return {"load_s": _in_a_process("dcp", size_mb, path)}


def _in_a_process(way: str, size_mb: float, path: Path) -> list[float]:
    done = subprocess.run([sys.executable, "-m", __name__, way, str(size_mb), str(path)], capture_output=True,
                          text=True, timeout=600)
    if done.returncode != 0:
        raise FtlabError(f"loading ({way}) failed", seen=done.stderr[-2000:])
    return list(json.loads(done.stdout))


def main() -> None:
    """The new process: a state of that size, and what was saved loaded a few times."""
    way, load, path = sys.argv[1], Workload.of(float(sys.argv[2])), Path(sys.argv[3])
    ways: dict[str, Callable[[], object]] = {
        "ftlab": lambda: CheckpointManager(str(path)).load_latest(load.parts()),
        "torch": lambda: TorchSave(load, fsync=True).load(path),
        "torch, live": lambda: TorchSave(load, fsync=True).load_into_live(path),
        "dcp": lambda: DcpSave(load).load(path)}
    found = []
    for _ in range(_WARM + _COUNTED):
        begin = time.perf_counter()
        ways[way]()
        found.append(time.perf_counter() - begin)
    sys.stdout.write(json.dumps(found[_WARM:]))


if __name__ == "__main__":
    main()
