"""One notebook from its sheet to its record: one sandbox, the cells in it, then the graded cells against it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Self

from ftlab.cluster.sandbox import Sandbox
from ftlab.errors import FtlabError
from ftlab.grading.draws import drawing
from ftlab.grading.marking.judging import judge
from ftlab.grading.marking.playing import play_notebook
from ftlab.grading.marking.record import Record
from ftlab.grading.marking.sheet import Sheet
from ftlab.grading.marking.suspicion import suspicious
from ftlab.grading.stage import Stage

_STARTS = 6  # of sandboxes for one notebook


class Sitting:
    """The sandboxed stage of one submission; a new one takes the place of one that has broken down."""

    def __init__(self, sandbox: Sandbox, sheet: Sheet, folder: Path | None = None) -> None:
        self._sandbox, self._sheet, self._folder = sandbox, sheet, folder
        self._stage: Stage | None = None
        self.starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.close()

    def stage(self) -> Stage:
        """The stage; raises FtlabError when it broke down too often."""
        if self._stage is None or not self._stage.open:
            if self.starts >= _STARTS:
                raise FtlabError(f"the sandbox of this submission broke down {_STARTS} times")
            self.starts += 1
            self._close()
            self._stage = Stage(self._folder, self._sheet.modules, self._sandbox.opener, self._sheet.labs).__enter__()
        return self._stage


def mark(sheet: Sheet, sandbox: Sandbox, folder: Path | None = None) -> Record:
    """Run and judge one notebook, with its stages in `folder`. Raises FtlabError when no sandbox can be started.

    Visible cells are judged first, then the hidden ones in a room that was emptied: what a part learns of a hidden test
    cannot reach the output of a visible one.
    """
    begin = time.monotonic()
    with Sitting(sandbox, sheet, folder) as sitting, drawing(sheet.draws):
        played = play_notebook(sitting.stage, sheet)
        outputs, points, troubles = dict(played.outputs), dict[str, float](), list[str]()
        for step in sorted((step for step in sheet.steps if step.graded), key=lambda step: step.hidden):
            if step.hidden:
                sitting.stage().clear_room()
            judged = judge(step, played.answers[step.index], sitting.stage)
            outputs[step.index], points[step.id] = judged.outputs, judged.points
            troubles += [judged.trouble] if judged.trouble else []
    return Record(outputs={str(index): list(found) for index, found in outputs.items()}, points=points,
                  notes=[*played.notes, *suspicious(sheet)], troubles=troubles,
                  seconds=round(time.monotonic() - begin, 2))
