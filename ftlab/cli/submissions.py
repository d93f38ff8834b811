"""`ftlab submit` for students, `ftlab collect` for instructors."""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from dataclasses import asdict
from pathlib import Path

from ftlab.cli.labs import progress, say
from ftlab.cli.terminal import printable
from ftlab.errors import ConfigError
from ftlab.grading.course.collecting import Rules, Taken, choose
from ftlab.grading.course.collecting import collect as collect_from
from ftlab.grading.course.course import Course
from ftlab.grading.course.parcel import STUDENT
from ftlab.grading.course.received import FOLDER
from ftlab.grading.course.running import Ran
from ftlab.grading.course.submitting import Submission, find_work
from ftlab.grading.course.submitting import submit as submit_work


def submit(arguments: argparse.Namespace) -> int:
    """Repair, run and pack a notebook; 0 if all of its visible checks gave their full points."""
    student = arguments.student or getpass.getuser()
    if not STUDENT.fullmatch(student):
        raise ConfigError(f"{student!r} cannot be a student's name: letters, digits and ._@- only",
                          hint="--student NAME")
    folder = Path(arguments.to or ".")
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    work = find_work(arguments.what)
    lab = work.record.lab
    say(f"{lab}: running {work.notebook} from a fresh kernel, in a copy; your file stays as it is")
    done = submit_work(work, student, lambda ran, count: say(progress(lab, ran, count)), quick=arguments.quick,
                       cell_s=arguments.cell_timeout)
    file = folder / f"{lab}-{student}.zip"
    done.parcel.write(file)
    if arguments.json:
        facts = {"file": str(file), "manifest": asdict(done.parcel.manifest), "hidden": done.hidden,
                 "written": done.written, "unanswered": done.unanswered, "cells": [vars(each) for each in done.ran]}
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        sys.stdout.write(summary(done, file, guessed=not arguments.student) + "\n")
    return 1 if done.failed else 0


def collect(arguments: argparse.Namespace) -> int:
    """Take submissions in, or choose the one that counts; 0 if none was refused."""
    course = Course.find()
    if bool(arguments.choose) == bool(arguments.place):
        raise ConfigError("name a folder or an archive to collect, or --choose a hand-in that is kept",
                          hint="ftlab collect inbox/; ftlab collect --choose lab01/alice/20261118T080000Z-0a1b2c3d")
    results = [choose(course, arguments.choose)] if arguments.choose else collect_from(
        course, Path(arguments.place), Rules(pattern=arguments.pattern, download=arguments.download))
    refused = sum(each.outcome == "refused" for each in results)
    if arguments.json:
        sys.stdout.write(json.dumps({"ok": not refused, "files": [asdict(each) for each in results]}) + "\n")
    else:
        taken = sum(each.outcome == "taken" for each in results)
        lines = [*map(_line, results), f"{taken} taken, {refused} refused, {len(results) - taken - refused} left"]
        sys.stdout.write("\n".join(lines) + f"; what counts is in {course.submitted}, all of it in {FOLDER}/\n")
    if not results:
        raise ConfigError(f"{arguments.place} holds nothing that was handed in",
                          hint="files of ftlab submit (lab01-NAME.zip), notebooks, or archives of them")
    return 1 if refused else 0


def summary(done: Submission, file: Path, guessed: bool) -> str:
    """What a student should know before handing it in."""
    manifest = done.parcel.manifest
    lines = [*(f"repaired: {note}" for note in done.repairs), *(_failure(ran) for ran in done.failed)]
    lines.append(f"visible checks: {manifest.earned:g} of {manifest.points:g} points")
    if done.hidden:
        lines.append(f"hidden checks: {done.hidden:g} points, judged when it is graded")
    if done.written:
        left = f"; still unanswered: {', '.join(done.unanswered)}" if done.unanswered else ""
        lines.append(f"written answers: {done.written:g} points, read by a person{left}")
    who = f"{manifest.student} (your login name; --student changes it)" if guessed else manifest.student
    return "\n".join([*lines, f"packed for {who}: hand in {file}"])


def _failure(ran: Ran) -> str:
    lost = f"{ran.earned:g} of {ran.points:g} points" if ran.points else ""
    return f"not well: {ran.cell}: {'; '.join(part for part in (lost, ran.error) if part)}"


def _line(each: Taken) -> str:
    who = f"{each.lab} {each.student}: " if each.student else ""
    why = f" ({'; '.join(part for part in (each.why, *each.notes) if part)})" if each.why or each.notes else ""
    return printable(f"{each.outcome:<10} {who}{each.file}{why}")
