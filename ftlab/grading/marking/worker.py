"""The process behind `pool.Worker`: sheets as JSON lines on stdin, records as JSON lines on stdout, until the end.

It is trusted: the graded cells run here, the student's parts in its sandbox. What a check prints by accident must not
get between the replies, so stdout is put aside first.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from ftlab.cluster.sandbox import Limits, choose
from ftlab.errors import FtlabError
from ftlab.grading.marking.marking import mark
from ftlab.grading.marking.sheet import Sheet

_PR_SET_PDEATHSIG = 1
_MEMORY = 2 << 30  # bytes for this process: what student's parts make a check hold ends in an error here, not there


def main() -> None:
    """Mark one sheet after the other; ends with stdin, or when it is told to."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    _limit_memory()
    settings = json.loads(sys.argv[2])
    folder = Path(settings["folder"])  # the pool's: it goes with the pool, whatever becomes of this process
    tempfile.tempdir = str(folder)
    sandbox = choose(settings["sandbox"], Limits(**settings["limits"]))
    for line in sys.stdin:
        try:
            reply = mark(Sheet.from_json(line), sandbox, folder).to_json()
        except FtlabError as error:
            reply = json.dumps({"error": error.to_dict()})
        except Exception as error:
            reply = json.dumps({"error": FtlabError(f"{type(error).__name__}: {error}").to_dict()})
        replies.write(reply + "\n")
        replies.flush()


def _limit_memory() -> None:
    """The soft limit only: a sandbox that is started from here has its own, which may be higher."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY if hard < 0 else min(_MEMORY, hard), hard))


def _end(*_: Any) -> None:
    """Whatever it is in the middle of: stages close, sandboxes go."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)
