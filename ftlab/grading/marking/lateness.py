"""Late penalties, by nbgrader's own preprocessor and plugin, computed last and for everybody each time.

They depend on due dates and extensions in the gradebook, on settings, and on marks that a person gave since: none of
which makes anybody's cells run again, so what is kept of an earlier run says nothing about them.
"""

from __future__ import annotations

import contextlib

from nbformat.v4 import new_notebook
from nbgrader.api import Gradebook, MissingEntry
from nbgrader.preprocessors import AssignLatePenalties
from traitlets.config import Config


def assign_penalty(config: Config, database: str, lab: str, student: str) -> None:
    """Have the gradebook hold the penalty that is due now; raises what the course's own plugin raises."""
    with Gradebook(database) as gradebook:
        try:
            submission = gradebook.find_submission(lab, student)
        except MissingEntry:
            return
        notebooks = [(each.name, each.late_submission_penalty) for each in submission.notebooks]
        late = float(submission.total_seconds_late or 0)
    for notebook, before in notebooks:
        if late > 0 or before:
            marked = {"notebook": notebook, "assignment": lab, "student": student, "db_url": database}
            with contextlib.suppress(MissingEntry):
                AssignLatePenalties(config=config).preprocess(new_notebook(), {"nbgrader": marked})
