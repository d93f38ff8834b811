"""Requests to a stage's server and their replies, matched by number.

A reply that was not waited for (the student pressed the stop button, the time was up, something raised) would else be
read as the answer to the next request. So a connection on which anything got between a request and its reply is not
used again: whoever holds it closes it, and the server ends with all that it has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftlab.cluster.sandbox import Server
from ftlab.errors import FtlabError, JobError, WaitTimeout, from_dict

_SLACK_S = 90.0  # for the server around a task that has its own limit
_END_S = 5.0  # for the server to end its children and itself
_LOG_BYTES = 2000


Heard = Callable[[dict[str, Any]], None]


class Connection:
    """One server that was started, and the two pipes to it."""

    def __init__(self, server: Server, log: Path) -> None:
        self.server = server
        self._log_file, self._raw = log, b""
        self._requests, self._pending = 0, False  # pending: a request went out, and its reply is not here yet

    @property
    def usable(self) -> bool:
        """Whether the next reply would be the one to the next request: nothing is pending, and the server lives."""
        if self._pending:
            return False
        try:
            self.server.wait(0.0)
        except subprocess.TimeoutExpired:
            return True
        return False

    @property
    def pending(self) -> bool:
        """Whether a request has had no reply: from then on the connection is of no use."""
        return self._pending

    def ask(self, task: str, patience_s: float, heard: Heard | None = None, **request: Any) -> dict[str, Any]:
        """The reply to a request; what is told before it is `heard` at once. Raises what the task raised; JobError or
        WaitTimeout when no reply came, or none that belongs to this request."""
        if self._pending:
            raise FtlabError("the stage's server owes a reply: another check runs, or was stopped",
                             hint="run the cell again")
        self._pending = True
        self._requests += 1
        self._send(task, {"id": self._requests, "task": task, **request})
        deadline = time.monotonic() + patience_s + _SLACK_S
        while "told" in (reply := self._parse(task, self._read_line(task, deadline))):
            if heard is not None:
                heard(reply["told"])
        self._pending = False
        if "error" in reply:
            raise from_dict(reply["error"])
        return dict(reply["value"])

    def close(self) -> None:
        """Ask the server to end, by closing the pipes; kill it with all its children when it does not."""
        for pipe in (self.server.stdin, self.server.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self.server.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait(_SLACK_S)

    def _send(self, task: str, request: dict[str, Any]) -> None:
        assert self.server.stdin is not None
        try:
            self.server.stdin.write((json.dumps(request) + "\n").encode())
            self.server.stdin.flush()
        except OSError as error:
            raise JobError(f"the stage's server is gone before {task!r}", seen=str(error),
                           hint="run the cell again") from None

    def _read_line(self, task: str, deadline: float) -> bytes:
        assert self.server.stdout is not None
        pipe = self.server.stdout.fileno()
        chunks, self._raw = [self._raw], b""
        while b"\n" not in chunks[-1]:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                raise WaitTimeout(f"the stage's server did not answer to {task!r}", seen=self._log())
            got = os.read(pipe, 1 << 16)
            if not got:
                raise JobError(f"the stage's server ended during {task!r}", seen=self._log(),
                               hint="run the cell again; is memory short?")
            chunks.append(got)
        line, _, self._raw = b"".join(chunks).partition(b"\n")
        return line

    def _parse(self, task: str, line: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(line)
            if reply["id"] == self._requests and ("error" in reply or isinstance(reply.get("told", reply.get("value")),
                                                                                 dict)):
                return dict(reply)
            seen = f"a reply to request {reply['id']}, and this is {self._requests}"
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            seen = repr(error)
        raise JobError(f"the stage's server spoke nonsense after {task!r}", seen=seen, hint="run the cell again")

    def _log(self) -> str:
        return self._log_file.read_text(errors="replace").strip()[-_LOG_BYTES:]
