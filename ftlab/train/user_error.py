"""An exception of the train function's own code in the middle of a recovery, told as its author needs it."""

from __future__ import annotations

import traceback

from ftlab.checkpoint.parts import raised_in_part
from ftlab.errors import TrainingFailed


def own_error(error: Exception, rank: int, node: str) -> TrainingFailed:
    """The error that ends the job: the author's own, with its traceback and the part, rank and node it came from."""
    trace = "".join(traceback.format_exception(error))
    part = raised_in_part(error)
    hint = "a recovery calls state_dict and load_state_dict of every protected part: mend it there" if part else ""
    return TrainingFailed(f"{type(error).__name__}: {error}\n\n{trace}", traceback=trace, hint=hint,
                          seen=f"{part or 'raised'} on rank {rank} ({node}), while the state was brought back")
