"""`ftlab grade`: submissions of a lab, sandboxed and in parallel, into nbgrader's gradebook."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict

from ftlab.cli.terminal import printable
from ftlab.cluster.sandbox import Limits
from ftlab.grading.course.course import Course
from ftlab.grading.marking.grading import Graded, Settings, export
from ftlab.grading.marking.grading import grade as grade_lab
from ftlab.grading.marking.similarity import similar_submissions

_EVERY_S = 5.0  # between two progress lines where there is no terminal


def grade(arguments: argparse.Namespace) -> int:
    """Grade; 0 if every submission could be graded and no check failed by itself."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # told to end, it ends as by Ctrl-C: nothing is left
    course, begin = Course.find(), time.monotonic()
    if arguments.similar:
        return _similar(course, arguments)
    settings = Settings(jobs=arguments.jobs, students=tuple(arguments.student), again=arguments.again,
                        sandbox=arguments.sandbox, limits=Limits(memory_mb=arguments.memory_mb))
    line = _Line()
    rows = grade_lab(course, arguments.lab, settings, line.show, line.say)
    line.end()
    if arguments.csv:
        export(course, arguments.lab, arguments.csv)
    bad = [row for row in rows if row.problem or row.failed or row.troubles]
    if arguments.json:
        sys.stdout.write(json.dumps({"lab": arguments.lab, "graded": [asdict(row) for row in rows], "ok": not bad,
                                     "seconds": round(time.monotonic() - begin, 2), "csv": arguments.csv}) + "\n")
    else:
        sys.stdout.write("\n".join(_table(rows, arguments.lab, time.monotonic() - begin)) + "\n")
    return 1 if bad else 0


def _similar(course: Course, arguments: argparse.Namespace) -> int:
    pairs = similar_submissions(course, arguments.lab, arguments.student)
    if arguments.json:
        found = [asdict(pair) for pair in pairs]
        sys.stdout.write(json.dumps({"lab": arguments.lab, "similar": found, "ok": True}) + "\n")
    else:
        lines = [printable(str(pair)) for pair in pairs] or ["no two submissions are alike beyond the given cells"]
        sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _table(rows: list[Graded], lab: str, seconds: float) -> list[str]:
    names = {row.student: printable(row.student) for row in rows}
    width = max([len("student"), *map(len, names.values())])
    lines = [f"{'student':<{width}}  {'score':>12}  {'seconds':>7}"]
    for row in rows:
        score = f"{row.score:g} of {row.points:g}"
        spent = "before" if row.unchanged else f"{row.seconds:.1f}" if row.seconds else "-"
        left = f"  {_late(row)}" if row.late_s else ""
        left += "  manual grading left" if row.manual else ""
        lines.append(f"{names[row.student]:<{width}}  {score:>12}  {spent:>7}{left}")
        label = f"NOT GRADED, and {row.counts} counts" if row.counts else "NOT GRADED, counts 0"
        told = [(label, row.problem)] if row.problem else []
        told += [("NOT GRADED, try again", row.failed)] if row.failed else []
        told += [("LOOK", each) for each in row.troubles] + [("note", each) for each in row.notes]
        lines += [f"{'':<{width}}  {kind}: {printable(text)}" for kind, text in told]
    done = sum(not row.problem and not row.failed for row in rows)
    return [*lines, f"{lab}: {done} of {len(rows)} submissions graded in {seconds:.1f} s"]


def _late(row: Graded) -> str:
    return f"{row.late_s / 3600:.1f} h late" + (f", {row.penalty:g} taken off" if row.penalty else "")


class _Line:
    """Progress on stderr: one line that changes in a terminal, else a new line now and then."""

    def __init__(self) -> None:
        self._last, self._open = 0.0, False

    def show(self, what: str, done: int, total: int) -> None:
        """Tell how far it is."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{what}: {done} of {total}")
            self._open = True
        elif done == total or time.monotonic() - self._last > _EVERY_S:
            sys.stderr.write(f"{what}: {done} of {total}\n")
            self._last = time.monotonic()
        sys.stderr.flush()

    def say(self, text: str) -> None:
        """Something that has to be read."""
        self.end()
        sys.stderr.write(text + "\n")

    def end(self) -> None:
        """The cursor on a new line."""
        if self._open:
            sys.stderr.write("\n")
            self._open = False
