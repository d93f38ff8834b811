"""The grader's end of the server: starts it, asks it, takes it down, and owns the folder in which all of it happens."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from ftlab.cluster.sandbox import DESK, ROOM, Local, Opener, Server
from ftlab.errors import FtlabError, JobError, WaitTimeout, from_dict
from ftlab.grading.crash.operations import Recording
from ftlab.grading.crash.ptrace import check_machine
from ftlab.grading.stage.outcome import Outcome
from ftlab.grading.stage.play import Play

START_S = 120.0  # for the server to import torch on a busy machine
_SLACK_S = 90.0  # for the server around a task that has its own limit
_MAIN = ("import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
         "from ftlab.grading.stage.server import main; main()")

_MAX_RECORDING = 256 << 20  # bytes
_sealed: list[Stage] = []  # sandboxed stages of a grader: as long as there is one, no other stage is opened

Function = Callable[[Path], Any]


def open_here(argv: list[str], work: Path, log: Any) -> Server:
    """Start the server as a child of this process, without any sandbox: for a student's own checks."""
    if _sealed:
        raise FtlabError("a check tried to run a student's part outside of the sandbox", hint="use current_stage()")
    return Local(argv, stderr=log, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


@contextlib.contextmanager
def only(stage: Stage) -> Iterator[None]:
    """Refuse to run student's code outside of a sandbox for so long, if this stage is in one."""
    sealed = [stage] if stage.sandboxed else []
    _sealed.extend(sealed)
    try:
        yield
    finally:
        for each in sealed:
            _sealed.remove(each)


class Stage:
    """A server process and a work folder; `with Stage() as stage` may serve many checks, one after the other.

    `preload` names modules that the server imports once, before it forks a child per task: name what the functions
    import and takes long, or every single load imports it again. `opener` starts the server, in a sandbox if need be.
    The server sees two folders under the same paths as this process: the desk, on which only we write, and the room,
    in which student's code does what it likes.
    """

    def __init__(self, folder: Path | None = None, preload: Sequence[str] = ("torch",),
                 opener: Opener = open_here) -> None:
        self._parent, self._preload, self._opener = folder, list(preload), opener
        self._server: Server | None = None
        self._work: Path | None = None
        self._raw = b""

    def __enter__(self) -> Self:
        self._work = Path(tempfile.mkdtemp(prefix="ftlab-stage-", dir=self._parent)).resolve()
        try:
            for name in (DESK, ROOM):
                (self._work / name).mkdir()
            path = [os.path.abspath(each) for each in sys.path if each]
            with (self._work / "server.log").open("wb") as log:
                self._server = self._opener([sys.executable, "-c", _MAIN, json.dumps(path)], self._work, log)
            self._ask("preload", START_S, modules=self._preload, wiped=list(self._server.wiped))
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
    def open(self) -> bool:
        """Whether it can be asked."""
        return self._server is not None

    @property
    def sandboxed(self) -> bool:
        """Whether the server was started by anything but `open_here`."""
        return self._opener is not open_here

    @property
    def folder(self) -> Path:
        """The folder that prepare, save and load are called with; always the same path, as links may name it."""
        return self._inside(ROOM) / "checkpoints"

    def need(self, *modules: str) -> None:
        """Have the server import these modules of ours, or of the environment, unless it has: children then start with
        them. Never a student's module: the server runs no student's code."""
        new = [name for name in modules if name not in self._preload]
        if new:
            self._ask("preload", START_S, modules=new)
            self._preload += new

    def run(self, play: Play, seconds: float) -> Outcome:
        """Perform a play in a child that has so long; whatever it does, an Outcome comes back."""
        return Outcome.from_reply(self._ask("run", seconds, play=self._put(play), seconds=seconds))

    def hear(self, play: Play, seconds: float, each_s: float) -> tuple[list[dict[str, Any]], Outcome]:
        """Perform a play that is called with `tell=`: what it told, and how it ended; it may be silent for `each_s`."""
        reply = self._ask("tell", seconds, play=self._put(play), seconds=seconds, each_s=each_s)
        return list(reply.pop("told")), Outcome.from_reply(reply)

    def _put(self, play: Play) -> str:
        file = self._inside(DESK) / "play"
        file.write_text(play.to_json())
        file.chmod(0o644)  # whatever the umask: the server may be another user
        return str(file)

    def new_folder(self, name: str) -> Path:
        """An empty folder that plays may be told of; it lasts until the stage is closed."""
        folder = self._inside(ROOM) / name
        if os.path.lexists(folder):
            remove(folder)
        folder.mkdir()
        self.hand_over(folder)
        return folder

    def hand_over(self, folder: Path) -> None:
        """Let the server's user own a folder in the room, with all that is in it."""
        user = self._server.user if self._server is not None else None
        if user is None or user == os.getuid():
            return
        for parent, folders, files in os.walk(folder):
            for each in ("", *folders, *files):
                os.chown(os.path.join(parent, each).rstrip("/"), user, -1, follow_symlinks=False)

    def set_functions(self, prepare: Function | Play, save: Function | Play, load: Function | Play) -> None:
        """What the next crash check runs, each with the folder as last argument; raises NotPicklable."""
        plays = [each if isinstance(each, Play) else Play.of_any(each) for each in (prepare, save, load)]
        (self._inside(DESK) / "functions").write_text("\n".join(play.to_json() for play in plays))

    def record(self, seconds: float) -> Recording:
        """Run prepare and save in an empty folder; raises JobError or WaitTimeout when one of them does not return, and
        FaultUnavailable where system calls cannot be traced."""
        check_machine()
        self.new_folder(self.folder.name)
        out = self._inside(ROOM) / "recording.json"
        self._ask("record", 2 * seconds, functions=self._functions(), folder=str(self.folder), out=str(out),
                  seconds=seconds)
        return Recording.from_json(_read(out))

    def load(self, seconds: float) -> dict[str, Any]:
        """Run load on the folder as it is: {"digest", "text"} of the value, or {"raised"}."""
        return self._ask("load", seconds, functions=self._functions(), folder=str(self.folder), seconds=seconds)

    def _functions(self) -> str:
        return str(self._inside(DESK) / "functions")

    def _inside(self, name: str) -> Path:
        if self._work is None:
            raise FtlabError("the stage is closed", hint="with Stage() as stage: ...")
        return self._work / name

    def _ask(self, task: str, patience: float, **request: Any) -> dict[str, Any]:
        if self._server is None or self._server.stdin is None:
            raise FtlabError("the stage is closed", hint="with Stage() as stage: ...")
        try:
            self._server.stdin.write((json.dumps({"task": task, **request}) + "\n").encode())
            self._server.stdin.flush()
        except OSError as error:
            raise self._broken(JobError(f"the stage's server is gone before {task!r}", seen=str(error))) from None
        line = self._read_line(task, time.monotonic() + patience + _SLACK_S)
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._broken(JobError(f"the stage's server spoke nonsense after {task!r}",
                                        seen=repr(error))) from None
        if "error" in reply:
            raise from_dict(reply["error"])
        return dict(reply)

    def _read_line(self, task: str, deadline: float) -> bytes:
        assert self._server is not None and self._server.stdout is not None
        pipe = self._server.stdout.fileno()
        chunks = [self._raw]
        while b"\n" not in chunks[-1]:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                raise self._broken(WaitTimeout(f"the stage's server did not answer to {task!r}", seen=self._log()))
            got = os.read(pipe, 1 << 16)
            if not got:
                raise self._broken(JobError(f"the stage's server ended during {task!r}", seen=self._log()))
            chunks.append(got)
        line, _, self._raw = b"".join(chunks).partition(b"\n")
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
        if not os.path.islink(path):  # what a link leads to is not ours to change
            os.chmod(path, 0o700)
        function(path)

    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()
        return
    try:
        shutil.rmtree(folder, onerror=retry)
    except RecursionError:  # folders in folders, a thousand deep
        subprocess.run(["rm", "-rf", "--", str(folder)], check=True, timeout=60)


def _read(file: Path) -> str:
    """What the server left in the room, where student's code may have put anything under its name."""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_RECORDING:
            raise JobError(f"{file.name} is no file that we wrote, or larger than {_MAX_RECORDING >> 20} MB",
                           hint="a save may write some hundred MB, not more")
        return opened.read()


def _end(server: Server) -> None:
    """Ask the server to end; kill it with all its children when it does not."""
    for pipe in (server.stdin, server.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        server.wait(5.0)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(_SLACK_S)
