"""`ftlab labs`: release the labs, look whether they are in order, run and render them."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from ftlab.cluster.temporary import TemporaryFolder
from ftlab.errors import ConfigError, FtlabError
from ftlab.grading.course import cells, points
from ftlab.grading.course.audit import audit
from ftlab.grading.course.bundle import FOLDER
from ftlab.grading.course.bundle import pack as pack_bundle
from ftlab.grading.course.course import Course
from ftlab.grading.course.release import generated
from ftlab.grading.course.release import release as release_labs
from ftlab.grading.course.rendering import render as render_page
from ftlab.grading.course.rendering import write as write_page
from ftlab.grading.course.running import Ran
from ftlab.grading.course.running import run as run_notebook

_PAGES = "build/labs"
_BUNDLE = "build/ftlab-labs.zip"


def release(arguments: argparse.Namespace) -> int:
    """Generate `labs/` from `solutions/`, and the page with the points."""
    course = Course.find()
    labs = course.labs(arguments.lab)
    changed = release_labs(course, labs, arguments.force)
    page = points.write_page(course)
    lines = [f"{lab}: {'released' if lab in changed else 'as before'}" for lab in labs]
    _answer(arguments, {"released": changed, "labs": labs, "points": str(page)},
            "\n".join([*lines, f"points: {page.relative_to(course.root)}"]))
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Look for everything that can be wrong without running anything; 0 if nothing is."""
    course = Course.find()
    labs = course.labs(arguments.lab)
    found = audit(course, labs)
    text = "\n".join(map(str, found)) + f"\n{len(found)} problems" if found else f"{', '.join(labs)}: all in order"
    _answer(arguments, {"ok": not found, "labs": labs, "problems": [vars(each) for each in found]}, text)
    return 1 if found else 0


def run(arguments: argparse.Namespace) -> int:
    """Execute the solutions from fresh kernels; 0 if every cell ran and every check gave its full points."""
    course = Course.find()
    facts = {}
    for lab in course.labs(arguments.lab):
        _, done, seconds = _execute(course, lab, arguments.cell_timeout)
        facts[lab] = {"seconds": round(seconds, 1), "cells": [vars(ran) for ran in done], "ok": _all_well(done),
                      "earned": sum(ran.earned for ran in done), "points": sum(ran.points for ran in done)}
        say(f"{lab}: {'all well' if _all_well(done) else 'FAILED'}, {facts[lab]['earned']:g} of "
             f"{facts[lab]['points']:g} points in {seconds:.0f} s")
    well = all(each["ok"] for each in facts.values())
    if arguments.json:
        sys.stdout.write(json.dumps({"ok": well, "labs": facts}) + "\n")
    return 0 if well else 1


def show_points(arguments: argparse.Namespace) -> int:
    """Write the page with the points, and print the sums."""
    course = Course.find()
    page = points.write_page(course)
    rows = points.all_rows(course)
    _answer(arguments, {"page": str(page), "cells": [vars(row) for row in rows]},
            "\n".join([*(f"{row.lab}  {row.cell:<24} {row.how:<8} {row.points:g}" for row in rows), f"page: {page}"]))
    return 0


def render(arguments: argparse.Namespace) -> int:
    """Execute the solutions, and write the students' view of them as HTML pages."""
    course = Course.find()
    folder = Path(arguments.to or course.root / _PAGES)
    labs = course.labs(arguments.lab)
    pages = []
    with generated(course, labs) as fresh:
        for lab in labs:
            executed, done, _ = _execute(course, lab, arguments.cell_timeout)
            if not _all_well(done):
                raise FtlabError(f"{lab} does not run through, so it is not rendered", hint=f"ftlab labs run {lab}")
            released = cells.read(fresh / lab / course.notebook(lab).name)
            pages.append(write_page(render_page(released, executed, lab), folder, lab))
            say(f"{lab}: {pages[-1]}")
    if arguments.json:
        sys.stdout.write(json.dumps({"pages": [str(each) for each in pages]}) + "\n")
    return 0


def pack(arguments: argparse.Namespace) -> int:
    """Write the bundle that is handed out to students."""
    course = Course.find()
    labs = course.labs(arguments.lab)
    to = Path(arguments.to) if arguments.to else course.root / _BUNDLE
    if arguments.to and not to.parent.is_dir():
        raise ConfigError(f"there is no folder {to.parent}", hint="--to FILE.zip, in a folder that is there")
    say(f"generating {', '.join(labs)}, and looking for what must not get out ...")
    names = pack_bundle(course, labs, to)
    digest = hashlib.sha256(to.read_bytes()).hexdigest()
    _answer(arguments, {"bundle": str(to), "labs": labs, "files": names, "sha256": digest},
            f"{to}: {len(names)} files, {to.stat().st_size >> 10} kB, sha256 {digest[:16]}...\n"
            f"students: unzip {to.name} && cd {FOLDER} && make lab")
    return 0


def _execute(course: Course, lab: str, cell_s: float) -> tuple[Any, list[Ran], float]:
    """A lab's source, executed in a copy of its folder."""
    begin = time.monotonic()
    source = course.notebook(lab)
    notebook = cells.read(source)
    with TemporaryFolder(lab) as place:
        folder = Path(shutil.copytree(source.parent, place / lab))
        done = run_notebook(notebook, folder, lambda ran, count: say(progress(lab, ran, count)), cell_s=cell_s)
    return notebook, done, time.monotonic() - begin


def progress(lab: str, ran: Ran, count: int) -> str:
    """One line on one cell."""
    marks = f"  {ran.earned:g} of {ran.points:g} points" if ran.points else ""
    trouble = f"  {ran.error}" if ran.error else ""
    return f"[{lab} {ran.number}/{count}] {ran.cell:<24} {ran.seconds:6.1f} s{marks}{trouble}"


def _all_well(done: list[Ran]) -> bool:
    return not any(ran.error or ran.earned < ran.points for ran in done)


def say(text: str) -> None:
    """Progress, for people: stdout is for the answer."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _answer(arguments: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    sys.stdout.write((json.dumps(data) if arguments.json else text) + "\n")
