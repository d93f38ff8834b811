"""The check of lab 03 that students have not seen. Only grading has this file: `ftlab labs pack` leaves it out."""

from __future__ import annotations

import random
from typing import Any

from ftlab.grading.exam import Exam
from ftlab.grading.lab03 import loops
from ftlab.grading.lab03.checks import LOOP_S, drive, fate, new_exam, new_folder, undisturbed


def settings(task: str, draw: random.Random) -> dict[str, Any]:
    """A seed, drawn anew for every submission."""
    return {"seed": draw.getrandbits(31)}


def task5b(recover: Any, *, points: float = 2.0, seed: int = 1, only: str = "") -> float:
    """The loop under rarer troubles, and in a group of two ranks."""
    exam, right, draw = new_exam("lab03_task5b", points, recover, only), undisturbed(), random.Random(seed)
    first, second, third, fourth = sorted(draw.sample(range(1, 8), 4))
    survives = drive(exam, "three failures are survived, if three are allowed", right,
          {str(first): "raise", str(second): "nan", str(third): "raise"},
           look="a failure is counted when it happens; the fourth goes up")
    drive(exam, "the fourth failure goes up", right,
          {str(first): "raise", str(second): "raise", str(third): "raise", str(fourth): "bug"},
           raises="ZeroDivisionError", look="max_failures=3", after=survives or bool(exam.only))
    drive(exam, "Ctrl-C is no failure to recover from", right, {str(first): "interrupt"}, raises="KeyboardInterrupt",
          after=survives or bool(exam.only), look="except Exception, not except BaseException and not a bare except")
    _group(exam, right, draw.randrange(1, 6))
    return exam.close()


def _group(exam: Exam, right: str, call: int) -> None:
    name = "the loss is NaN on rank 1 only: both ranks go back"
    look = "all ranks must agree on whether somebody failed: somebody_failed(...) after every epoch, on every rank"
    seen = exam.see(name, loops.drive_group, seconds=LOOP_S, gives=list, look=look, folder=new_folder(),
                    trouble={str(call): "nan loss"}) if exam.wants(name) else None
    if seen:
        ranks = [each if isinstance(each, dict) else {} for each in seen.value]
        well = len(ranks) == 2 and all(each.get("digest") == right and not each.get("raised") and
                                       each.get("calls") == loops.EPOCHS + 1 and each.get("returned") == 1
                                       for each in ranks)
        exam.expect(name, well, expected="the same bits on both, after one epoch more", look=look,
                    got="; ".join(f"rank {rank}: {fate(each, right)}" for rank, each in enumerate(ranks)))
