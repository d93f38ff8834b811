"""Random schedules over the zoo: `python -m tests.zoo.schedules --times 300 --seed 0`.

Each time one of the loops that must survive is trained under one to three faults at random steps and ranks, and its end
compared bit by bit with an undisturbed run. Prints what differs at once, and a table of loop × fault × runs × verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from collections import Counter

import ftlab
from ftlab import faults
from ftlab.errors import FaultError, FtlabError
from tests.limits import JOB_S
from tests.zoo.loops import RIGHT

KINDS = {"kill": faults.kill, "crash": faults.crash, "hang": faults.hang}
BUDGETS = {"node": 50, "crash": 50, "stall": 50, "link": 50}


def run(cluster: ftlab.Cluster, name: str, draw: random.Random, digest: str) -> tuple[list[str], str]:
    """One schedule: the faults that fired, and how it ended."""
    job, planned = cluster.submit(RIGHT[name], budgets=BUDGETS), []
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(sorted(KINDS))
        fault = KINDS[kind](f"rank-{draw.randint(0, 2)}", at_step=draw.randint(1, 11))
        with contextlib.suppress(FaultError):  # that step is over already
            planned.append((kind, cluster.inject(fault)))
    try:
        report = job.result(timeout=JOB_S)
    except FtlabError as error:
        return [kind for kind, _ in planned], f"{type(error).__name__}: {str(error)[:300]}"
    return [kind for kind, _ in planned][:report.injected], "identical" if report.digest == digest else "DIVERGED"


def main(times: int, seed: int) -> int:
    """How many schedules did not end identical."""
    table: Counter[tuple[str, str, str]] = Counter()
    wrong = 0
    with ftlab.Cluster(nodes=3, spares=2, echo=None) as cluster:
        twins = {name: cluster.submit(loop).result(timeout=JOB_S).digest for name, loop in RIGHT.items()}
        for number in range(times):
            draw = random.Random(f"{seed} {number}")
            name = draw.choice(sorted(RIGHT))
            fired, verdict = run(cluster, name, draw, str(twins[name]))
            table[name, "+".join(sorted(fired)), verdict.split(":")[0]] += 1
            if verdict != "identical":
                wrong += 1
                print(f"{name}, {fired}, number {number} of seed {seed}: {verdict}", flush=True)
    for (name, fired, verdict), count in sorted(table.items()):
        print(f"{name:45} {fired:25} {count:4} {verdict}")
    print(f"{times - wrong} of {times} identical; seed {seed}")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(min(1, main(given.times, given.seed)))
