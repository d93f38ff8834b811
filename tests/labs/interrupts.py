"""Checks that are stopped, as with JupyterLab's stop button: `python -m tests.labs.interrupts --times 30 lab01 lab02`.

A real kernel runs a lab's cells. Each of its checks is then interrupted at random moments, now and then twice or thrice
in a row; right after it the same check must give full marks to the reference, and to a wrong solution just what it gave
before, in the same words. What a stopped check has started must be gone, its folders too. Ends with a line per check.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

from tests.labs import quick
from tests.limits import BATCH_S, SOON_S, START_S

LABS = ("lab00", "lab01", "lab02", "lab03")
WRONG_LAB00 = {"task1-stub": 'def read_report(report): return {"detection_s": 0.1, "steps_lost": 0, "source": "live"}',
               "task2-stub": 'my_guess = {"kill": True, "hang": False, "blackout": True}'}


@dataclass
class Cell:
    """What a cell showed."""

    error: str = ""  # the kind of the exception that ended it
    shown: list[str] = field(default_factory=list)  # the lines of that exception
    printed: str = ""
    value: str = ""  # of its last line
    seconds: float = 0.0

    @property
    def marks(self) -> float | None:
        return float(self.value) if self.value else None

    @property
    def verdict(self) -> tuple[float | None, tuple[str, ...]]:
        """The marks and which scenarios went how; without times and texts that depend on them."""
        return self.marks, tuple(re.findall(r"^  (?:ok|FAIL)  .*", self.printed, re.MULTILINE))


class Notebook:
    """A kernel with a folder of its own for all that it leaves behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tmp").mkdir()
        self._manager = KernelManager()
        self._manager.start_kernel(cwd=str(folder), env={
            **os.environ, "TMPDIR": str(folder / "tmp"), "FTLAB_RUNS": str(folder / "runs"),
            "PYTHONPATH": os.pathsep.join([str(quick.ROOT), os.environ.get("PYTHONPATH", "")])})
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=START_S)
        self.pid = self._manager.provisioner.pid

    def run(self, source: str) -> Cell:
        """A cell, to its end."""
        return self.wait(self.start(source))

    def start(self, source: str) -> tuple[str, float]:
        return self._client.execute(source, allow_stdin=False), time.monotonic()

    def wait(self, asked: tuple[str, float]) -> Cell:
        """Until the cell has ended."""
        cell, (number, begin) = Cell(), asked
        while True:
            try:
                message = self._client.get_iopub_msg(timeout=BATCH_S)
            except queue.Empty:
                raise AssertionError(f"no end within {BATCH_S:g} s: {cell}") from None
            if message["parent_header"].get("msg_id") != number:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                cell.seconds = time.monotonic() - begin
                return cell
            if kind == "stream":
                cell.printed += content["text"]
            elif kind == "execute_result":
                cell.value = content["data"]["text/plain"]
            elif kind == "error":
                cell.error, cell.shown = content["ename"], "\n".join(content["traceback"]).splitlines()

    def stop(self) -> None:
        """The stop button."""
        self._manager.interrupt_kernel()

    def stop_when_busy(self, *, kill: bool = False) -> list[psutil.Process]:
        """Stop the check, or kill the kernel, as soon as a child runs the part below the server; who was there."""
        deadline = time.monotonic() + BATCH_S
        while len(below := _below(self.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if kill:
            self.kill()
        else:
            self.stop()
        return below

    def left(self, seconds: float = SOON_S) -> list[str]:
        """What is still there of a check after so long: processes below the kernel, and temporary folders. Those of
        the notebook's own cells and torch's cache may stay."""
        deadline = time.monotonic() + seconds
        while True:
            found = [f"process {each.pid}" for each in _below(self.pid)] + [
                str(each) for name in ("tmp", "runs") if (self.folder / name).is_dir()
                for each in (self.folder / name).iterdir() if not each.name.startswith(("lab", "torchinductor_"))]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.02)

    def kill(self) -> None:
        """As `shutdown_kernel(now=True)`, nbval and a machine that is short of memory do."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._client.stop_channels()
        if self._manager.is_alive():
            self._manager.shutdown_kernel()
        self._manager.cleanup_resources()


@contextmanager
def notebook() -> Iterator[Notebook]:
    with tempfile.TemporaryDirectory(prefix="ftlab-test-") as folder:
        made = Notebook(Path(folder))
        try:
            yield made
        finally:
            made.close()


def _below(pid: int) -> list[psutil.Process]:
    try:
        return [each for each in psutil.Process(pid).children(recursive=True)
                if each.status() != psutil.STATUS_ZOMBIE]
    except psutil.Error:
        return []


@dataclass(frozen=True)
class Check:
    """A graded cell, and a wrong solution that loses marks in it."""

    lab: str
    cell: str
    source: str
    points: float
    right: str = ""  # the source of the stub
    wrong: str = ""  # what stands there in place of it; empty: none is known


def checks_of(lab: str) -> list[Check]:
    """All graded cells of a lab."""
    cells = {cell.id: cell for cell in quick.cells_of(lab)}
    known = import_module(f"tests.labs.wrong.{lab}").WRONG.values() if lab != "lab00" else []
    found = []
    for name, points in quick.full_marks(lab).items():
        stub = f"{name.split('-')[0]}-stub"
        wrong = [each.cells[stub] for each in known if set(each.cells) == {stub} and name in each.points]
        wrong += [WRONG_LAB00[stub]] if lab == "lab00" else [""]
        right = cells[stub].source if stub in cells else ""
        found.append(Check(lab, name, cells[name].source, points, right, wrong[0]))
    return found


def begin(made: Notebook, lab: str) -> None:
    """Run what stands before the checks."""
    for cell in quick.cells_of(lab):
        if cell.id not in quick.full_marks(lab):
            done = made.run(cell.source)
            assert not done.error, (cell.id, done.shown)


@dataclass
class Figures:
    """What came of stopping one check."""

    stopped: int = 0
    late: int = 0  # the check had ended before
    elsewhere: int = 0  # it struck around our code: in IPython's own
    returns: list[float] = field(default_factory=list)  # seconds from the button to the end of the cell
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        times = sorted(self.returns) or [0.0]
        return (f"{self.stopped} stopped, {self.late} too late, {self.elsewhere} in IPython; returned after "
                f"{times[len(times) // 2]:.2f} s (median), {times[-1]:.2f} s at most; {len(self.problems)} problems")


def stop_once(made: Notebook, check: Check, moment: float, figures: Figures, again: float | None = None) -> None:
    """Start a check, press the button after so long, and once more after `again`; see what it says and leaves."""
    asked = made.start(check.source)
    time.sleep(moment)
    pressed = time.monotonic()
    made.stop()
    if again is not None:
        time.sleep(again)
        made.stop()
    cell = made.wait(asked)
    where = f"{check.lab} {check.cell} after {moment:.3f} s" + (f" and {again:.3f} s" if again is not None else "")
    if cell.error == "Stopped":
        figures.stopped += 1
        figures.returns.append(max(0.0, asked[1] + cell.seconds - pressed))
        if len(cell.shown) > 2 or "nothing was marked" not in cell.shown[0]:
            figures.problems.append(f"{where}: {cell.shown}")
    elif cell.error == "KeyboardInterrupt":
        figures.elsewhere += 1
    elif cell.error:
        figures.problems.append(f"{where}: {cell.error} {cell.shown}")
    else:
        figures.late += 1
        if cell.marks != check.points:
            figures.problems.append(f"{where}: {cell.marks} of {check.points}\n{cell.printed}")
    if cell.error == "Stopped" and (left := made.left()):
        figures.problems.append(f"{where}: left {left}")


def try_check(made: Notebook, check: Check, times: int, draw: random.Random) -> Figures:
    """Stop a check so many times, and after each look whether the next one is right."""
    figures = Figures()
    made.run("from ftlab.grading.stage.current import throw_away; throw_away()")
    first, warm = made.run(check.source), made.run(check.source)  # the first one starts the server
    assert first.marks == check.points, first
    wrong = None
    if check.wrong:
        made.run(check.wrong)
        wrong = made.run(check.source).verdict
        made.run(check.right)
        assert wrong[0] is not None and wrong[0] < check.points, check
    for turn in range(times):
        for number in range(draw.choice((1, 1, 2, 3))):
            moment = draw.uniform(0.0, (first if number and figures.returns else warm).seconds)
            stop_once(made, check, moment, figures, draw.uniform(0.0, 0.3) if draw.random() < 0.25 else None)
        if wrong is not None and turn % 2:
            made.run(check.wrong)
            found, expected = made.run(check.source), wrong
            made.run(check.right)
        else:
            found, expected = made.run(check.source), first.verdict
        if found.verdict != expected:
            figures.problems.append(f"{check.lab} {check.cell}: {found.verdict}, not {expected}; {found.error} "
                                    f"{found.shown}\n{found.printed}")
    return figures


def main(times: int, labs: list[str], only: str, seed: int) -> int:
    """Stop every check; how many problems there were."""
    problems = 0
    for lab in labs:
        draw = random.Random(f"{seed} {lab}")
        with notebook() as made:
            begin(made, lab)
            for check in checks_of(lab):
                if only not in check.cell:
                    continue
                figures: Any = try_check(made, check, times, draw)
                problems += len(figures.problems)
                print(f"{lab} {check.cell}: {figures}", *figures.problems, sep="\n  ", flush=True)
            made.close()
            if left := made.left():
                problems += 1
                print(f"{lab}: after the kernel's end there was left {left}")
    print(f"{problems} problems; seed {seed}")
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("labs", nargs="*", default=LABS)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--only", default="", help="a part of a check cell's name")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(min(1, main(given.times, list(given.labs), given.only, given.seed)))
