"""How long does training wait on each way into a new generation, on a busy machine?

    python -m tests.generations --times 20 --busy 3
    python -m tests.generations --paths rewind controller --times 200

Each path (a kill, a crash, a rewind to an older checkpoint, growing, a slow rank, a cut link, a controller that comes
back) is run so many times beside busy processes, and told is how often training stood still for longer than 10 s. Such
a wait is shown with the last events and, where py-spy is installed, the stacks of all workers. A measurement for
whoever changes how generations begin or end; too long for a test that must pass.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import ftlab
from ftlab import faults
from ftlab.cluster.job import Job
from ftlab.config import CheckpointConfig, HealthConfig
from ftlab.errors import FtlabError
from tests import trains
from tests.limits import SOON_S

LONG_S = 10.0
GIVE_UP_S = 180.0
Way = Callable[[ftlab.Cluster, random.Random], Job]  # a way into a new generation: starts a job that goes it
_MOVES = ("step.committed", "job.finished", "job.submitted")
_SAVED = Path(tempfile.gettempdir()) / f"ftlab-generations-{os.getpid()}"


def main() -> int:
    """Run the paths and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--busy", type=int, default=3, help="processes that compute beside it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paths", nargs="*", choices=list(PATHS), default=list(PATHS))
    arguments = parser.parse_args()
    _SAVED.mkdir()
    os.nice(10)  # the load and what is measured alike: others can work
    busy = [multiprocessing.Process(target=_spin, args=(os.getpid(),), daemon=True) for _ in range(arguments.busy)]
    for process in busy:
        process.start()
    try:
        long = [_measure(path, arguments.times, random.Random(f"{arguments.seed} {path}")) for path in arguments.paths]
    finally:
        for process in busy:
            process.kill()
        shutil.rmtree(_SAVED, ignore_errors=True)
    return 1 if any(long) else 0


def _spin(parent: int) -> None:
    while os.getppid() == parent:  # also where that one is killed
        sum(range(10000))


def _measure(path: str, times: int, lots: random.Random) -> int:
    """One path so many times; how many waits were too long."""
    waits, failed = [], 0
    with ftlab.Cluster(nodes=3, spares=1, echo=None) as cluster:
        for number in range(times):
            try:
                waits.append(_longest_wait(PATHS[path](cluster, lots), f"{path} {number}"))
            except FtlabError as error:
                failed += 1
                print(f"{path} {number}: {type(error).__name__}: {error}", flush=True)
                if cluster.running and (job := cluster.status()["job"]):
                    cluster.api.post(f"/api/jobs/{job['job']}/cancel")
    long = sum(wait > LONG_S for wait in waits)
    print(f"{path}: {times} runs, {failed} failed, {long} waits over {LONG_S:g} s, longest "
          f"{max(waits, default=0):.2f} s", flush=True)
    return long + failed


def _longest_wait(job: Job, name: str) -> float:
    """Until the job has ended: the longest time without a step, told of as soon as it is too long."""
    told, begin = False, time.monotonic()
    while not job.done:
        time.sleep(0.02)
        moves = [event.at for event in job.events if event.kind in _MOVES]
        if not told and time.monotonic() - max([begin, *moves[-1:]]) > LONG_S:
            told = True
            _tell(job, name)
        if time.monotonic() - begin > GIVE_UP_S:
            job.cancel()
    job.result(timeout=SOON_S)
    at = [event.at for event in job.events if event.kind in _MOVES]
    return max((later - earlier for earlier, later in pairwise(at)), default=0.0)


def _tell(job: Job, name: str) -> None:
    print(f"---- {name}: no step for {LONG_S:g} s; the last events, then stacks", flush=True)
    for event in job.events[-25:]:
        print("   ", event.to_json()[:300])
    for node in job.cluster.status()["nodes"]:
        print(node["name"], node["ranks"], node["workers"])
        for worker in node["workers"].values():
            if shutil.which("py-spy", path=os.path.dirname(sys.executable)) and worker["pid"]:
                subprocess.run([os.path.join(os.path.dirname(sys.executable), "py-spy"), "dump", "--native", "--pid",
                                str(worker["pid"])], check=False)


# ---- the paths ---------------------------------------------------------------------------------------------


def _hit(kind: str, **how: object) -> Way:
    """A fault in the middle of training, at another moment each time; ordered before the job, so never too late."""
    def run(cluster: ftlab.Cluster, lots: random.Random) -> Job:
        target = "" if kind == "controller" else f"rank-{lots.randrange(3)}"
        cluster.inject(faults.make(kind, target, at_step=10, after=lots.uniform(0.0, 0.02), **how))
        return cluster.submit(trains.network, 30, ddp=lots.random() < 0.5, **_HEALTH.get(kind, {}))

    return run


def _rewind(cluster: ftlab.Cluster, lots: random.Random) -> Job:
    """Go back to an older checkpoint in the first step, as the newest one is bad."""
    first = _SAVED / "first"
    if not first.exists():
        saving = CheckpointConfig(directory=str(first), every=10, keep_last_n=10)
        cluster.submit(trains.network, 30, checkpoint=saving).result(timeout=GIVE_UP_S)
        trains.poison_newest(str(first))
    folder = tempfile.mkdtemp(dir=_SAVED)
    shutil.copytree(first, folder, dirs_exist_ok=True)
    return cluster.submit(trains.network, 35, checkpoint=CheckpointConfig(directory=folder, every=10, keep_last_n=10))


def _killed_again(cluster: ftlab.Cluster, lots: random.Random) -> Job:
    """The next node, or the controller, is killed while the first kill is being recovered from."""
    kind = lots.choice(["kill", "controller", "crash"])
    target = "" if kind == "controller" else f"rank-{lots.randrange(3)}"
    cluster.inject(faults.make(kind, target, at_step=10, after=lots.uniform(0.02, 0.4)))
    return _hit("kill")(cluster, lots)


def _grow(cluster: ftlab.Cluster, lots: random.Random) -> Job:
    """All nodes but one are gone at once: training goes on with what is there, and grows as nodes come back."""
    for rank in (1, 2):
        cluster.inject(faults.make("kill", f"rank-{rank}", at_step=10, after=lots.uniform(0.0, 0.02)))
    return cluster.submit(trains.network, 60, min_nodes=1)


_HEALTH = {"straggler": {"health": HealthConfig(replace_stragglers=True, straggler_steps=5)}}
PATHS: dict[str, Way] = {
    "rewind": _rewind, "kill": _hit("kill"), "crash": _hit("crash"), "kill-again": _killed_again, "grow": _grow,
    "straggler": _hit("straggler", heal_after=2.0), "link": _hit("partition", heal_after=1.0),
    "controller": _hit("controller"),
}

if __name__ == "__main__":
    sys.exit(main())
