"""Where student's code runs: a server that forks one child per task, each with a deadline, and cleans up after it.

The side that judges (a notebook's kernel, or the grader) and the side that plays are two processes. What crosses is
plain data: a `Play` names a function of ours, the student's parts as bytes (`Answer`), and JSON arguments; what comes
back is an `Outcome`, again JSON. Nothing of the student is ever unpickled where marks are given, so a part that hangs,
exits, prints a gigabyte or patches ftlab costs one scenario and changes no judgement. In grading the server runs
inside a sandbox; the judge does not notice the difference. A check that is stopped half way takes its server with it.
"""

from __future__ import annotations

from ftlab.grading.stage.answer import Answer, pack
from ftlab.grading.stage.current import current_stage, given_stage, one_check, using
from ftlab.grading.stage.interrupts import Stopped, held
from ftlab.grading.stage.outcome import Outcome
from ftlab.grading.stage.play import Play
from ftlab.grading.stage.stage import Stage

__all__ = ["Answer", "Outcome", "Play", "Stage", "Stopped", "current_stage", "given_stage", "held", "one_check", "pack",
           "using"]
