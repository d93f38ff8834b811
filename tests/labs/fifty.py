"""Every graded check on the reference, many times, beside busy processes: `python -m tests.labs.fifty 50 lab01 lab02`.

A check that takes a mark from a right solution once in fifty times takes it from six of 300 students. Says after each
round how it went, prints what a check said when it was wrong, and ends with a line per check.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

from ftlab.grading.stage import Stage, using
from tests.labs import quick

LABS = ("lab00", "lab01", "lab02", "lab03")


@contextlib.contextmanager
def load(busy: int) -> Iterator[None]:
    """So many processes that never rest."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main(times: int, labs: list[str], busy: int) -> int:
    """Run the checks; how many gave less than full marks."""
    runs, misses = Counter[str](), Counter[str]()
    with load(busy):
        for turn in range(times):
            for lab in labs:
                begin, said = time.monotonic(), io.StringIO()
                quick._seen.clear()  # each turn for itself
                with contextlib.redirect_stdout(said), Stage() as stage, using(stage):
                    found = quick.marks(lab)
                wrong = [cell for cell, points in quick.full_marks(lab).items() if found[cell] != points]
                runs.update(f"{lab} {cell}" for cell in found)
                misses.update(f"{lab} {cell}" for cell in wrong)
                print(f"{turn + 1}/{times} {lab}: {len(found)} checks in {time.monotonic() - begin:.0f} s, load "
                      f"{os.getloadavg()[0]:.1f}{', WRONG: ' + ', '.join(wrong) if wrong else ''}", flush=True)
                if wrong:
                    print(said.getvalue(), flush=True)
    for check, count in sorted(runs.items()):
        print(f"{check}: full marks in {count - misses[check]} of {count}")
    return misses.total()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", type=int)
    parser.add_argument("labs", nargs="*", default=LABS)
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1, help="processes that never rest beside it")
    given = parser.parse_args()
    sys.exit(min(1, main(given.times, list(given.labs), given.busy)))
