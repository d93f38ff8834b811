"""One notebook from its sheet to its record: one sandbox, the cells in it, then the graded cells against it."""

from __future__ import annotations

import time
from typing import Self

from ftlab.cluster.sandbox import Sandbox
from ftlab.errors import FtlabError
from ftlab.grading.marking.judging import judge
from ftlab.grading.marking.playing import play_notebook
from ftlab.grading.marking.record import Record
from ftlab.grading.marking.sheet import Sheet
from ftlab.grading.stage import Stage

_STARTS = 6  # of sandboxes for one notebook


class Sitting:
    """The sandboxed stage of one submission; a new one takes the place of one that has broken down."""

    def __init__(self, sandbox: Sandbox, modules: list[str]) -> None:
        self._sandbox, self._modules = sandbox, modules
        self._stage: Stage | None = None
        self.starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._stage is not None:
            self._stage.close()

    def stage(self) -> Stage:
        """The stage; raises FtlabError when it broke down too often."""
        if self._stage is None or not self._stage.open:
            if self.starts >= _STARTS:
                raise FtlabError(f"the sandbox of this submission broke down {_STARTS} times")
            self.starts += 1
            self._stage = Stage(preload=self._modules, opener=self._sandbox.opener).__enter__()
        return self._stage


def mark(sheet: Sheet, sandbox: Sandbox) -> Record:
    """Run and judge one notebook. Raises FtlabError only when no sandbox can be started."""
    begin = time.monotonic()
    with Sitting(sandbox, sheet.modules) as sitting:
        played = play_notebook(sitting.stage, sheet)
        outputs, points, troubles = dict(played.outputs), dict[str, float](), list[str]()
        for step in sheet.steps:
            if step.graded:
                judged = judge(step, played.answers[step.index], sitting.stage)
                outputs[step.index], points[step.id] = judged.outputs, judged.points
                troubles += [judged.trouble] if judged.trouble else []
    return Record(outputs={str(index): list(found) for index, found in outputs.items()}, points=points,
                  notes=played.notes, troubles=troubles, seconds=round(time.monotonic() - begin, 2))
