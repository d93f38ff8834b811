"""The grader's end of the server: starts it, asks it, takes it down, and owns the folder in which all of it happens."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import cloudpickle
import psutil

from ftlab.errors import FtlabError, JobError, NotPicklable, WaitTimeout, from_dict
from ftlab.grading.crash.operations import Recording
from ftlab.grading.crash.ptrace import check_machine

START_S = 120.0  # for the server to import torch on a busy machine
_SLACK_S = 30.0  # for the server around a task that has its own limit
_MAIN = ("import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
         "from ftlab.grading.crash.server import main; main()")

Function = Callable[[Path], Any]


class Stage:
    """A server process and a work folder; `with Stage() as stage` may serve many checks, one after the other.

    `preload` names modules that the server imports once, before it forks a child per task: name what the functions
    import and takes long, or every single load imports it again. Raises FaultUnavailable
    where system calls cannot be traced.
    """

    def __init__(self, folder: Path | None = None, preload: Sequence[str] = ("torch",)) -> None:
        check_machine()
        self._parent, self._preload = folder, list(preload)
        self._server: subprocess.Popen[bytes] | None = None
        self._work: Path | None = None
        self._raw = b""

    def __enter__(self) -> Self:
        self._work = Path(tempfile.mkdtemp(prefix="ftlab-crash-", dir=self._parent)).resolve()
        try:
            with (self._work / "server.log").open("wb") as log:
                self._server = subprocess.Popen([sys.executable, "-c", _MAIN, json.dumps(sys.path)], stderr=log,
                                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            self._ask("preload", START_S, modules=self._preload)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server with everything below it, and remove the work folder; may be called twice."""
        server, self._server = self._server, None
        if server is not None:
            _end(server)
        work, self._work = self._work, None
        if work is not None:
            remove(work)

    @property
    def folder(self) -> Path:
        """The folder that prepare, save and load are called with; always the same path, as links may name it."""
        return self._inside("checkpoints")

    def set_functions(self, prepare: Function, save: Function, load: Function) -> None:
        """The functions of the next check; raises NotPicklable."""
        try:
            raw = cloudpickle.dumps((prepare, save, load))
        except Exception as error:
            raise NotPicklable(f"prepare, save and load run in another process, and cannot be sent there: {error}",
                               hint="open files and start threads inside of them") from None
        self._inside("functions").write_bytes(raw)

    def record(self, seconds: float) -> Recording:
        """Run prepare and save in an empty folder; raises JobError or WaitTimeout when one of them does not return."""
        if self.folder.exists():
            remove(self.folder)
        self.folder.mkdir()
        out = self._inside("recording.json")
        self._ask("record", 2 * seconds, folder=str(self.folder), out=str(out), seconds=seconds)
        return Recording.from_json(out.read_text())

    def load(self, seconds: float) -> dict[str, Any]:
        """Run load on the folder as it is: {"digest", "text"} of the value, or {"raised"}."""
        return self._ask("load", seconds, folder=str(self.folder), seconds=seconds)

    def _inside(self, name: str) -> Path:
        if self._work is None:
            raise FtlabError("the stage is closed", hint="with Stage() as stage: ...")
        return self._work / name

    def _ask(self, task: str, patience: float, **request: Any) -> dict[str, Any]:
        if self._server is None or self._server.stdin is None:
            raise FtlabError("the stage is closed", hint="with Stage() as stage: ...")
        if task != "preload":
            request["functions"] = str(self._inside("functions"))
        self._server.stdin.write((json.dumps({"task": task, **request}) + "\n").encode())
        self._server.stdin.flush()
        reply = json.loads(self._read_line(task, time.monotonic() + patience + _SLACK_S))
        if "error" in reply:
            raise from_dict(reply["error"])
        return dict(reply)

    def _read_line(self, task: str, deadline: float) -> bytes:
        assert self._server is not None and self._server.stdout is not None
        pipe = self._server.stdout.fileno()
        while b"\n" not in self._raw:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                raise self._broken(WaitTimeout(f"the crash server did not answer to {task!r}", seen=self._log()))
            got = os.read(pipe, 1 << 16)
            if not got:
                raise self._broken(JobError(f"the crash server ended during {task!r}", seen=self._log()))
            self._raw += got
        line, _, self._raw = self._raw.partition(b"\n")
        return line

    def _broken(self, error: FtlabError) -> FtlabError:
        """A server that was not understood once is not asked again: its next answer might belong to this question."""
        self.close()
        return error

    def _log(self) -> str:
        return self._inside("server.log").read_text(errors="replace").strip()[-2000:]


def remove(folder: Path) -> None:
    """Delete a folder, also where student's code took the rights away."""

    def retry(function: Callable[..., Any], path: str, error: Any) -> None:
        os.chmod(os.path.dirname(path), 0o700)
        os.chmod(path, 0o700)
        function(path)

    shutil.rmtree(folder, onerror=retry)


def _end(server: subprocess.Popen[bytes]) -> None:
    """Ask the server to end; kill it with all its children when it does not."""
    for pipe in (server.stdin, server.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        server.wait(5.0)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(server.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
        server.kill()
        server.wait()
