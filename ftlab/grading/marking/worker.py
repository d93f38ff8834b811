"""The process behind `pool.Worker`: sheets as JSON lines on stdin, records as JSON lines on stdout, until the end.

It is trusted: the graded cells run here, the student's parts in its sandbox. What a check prints by accident must not
get between the replies, so stdout is put aside first.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
from typing import Any

from ftlab.cluster.sandbox import Limits, choose
from ftlab.errors import FtlabError
from ftlab.grading.marking.marking import mark
from ftlab.grading.marking.sheet import Sheet

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Mark one sheet after the other; ends with stdin, or when it is told to."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    settings = json.loads(sys.argv[2])
    tempfile.tempdir = settings["folder"]  # the pool's: it goes with the pool, whatever becomes of this process
    sandbox = choose(settings["sandbox"], Limits(**settings["limits"]))
    for line in sys.stdin:
        try:
            reply = mark(Sheet.from_json(line), sandbox).to_json()
        except FtlabError as error:
            reply = json.dumps({"error": error.to_dict()})
        except Exception as error:
            reply = json.dumps({"error": FtlabError(f"{type(error).__name__}: {error}").to_dict()})
        replies.write(reply + "\n")
        replies.flush()


def _end(*_: Any) -> None:
    """Whatever it is in the middle of: stages close, sandboxes go."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)
