"""The grader's end of the server: starts it, asks it, takes it down, and owns the folder in which all of it happens."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from ftlab.cluster.sandbox import DESK, PACKAGE, ROOM, Local, Opener, Server
from ftlab.cluster.temporary import TemporaryFolder, remove
from ftlab.config import stage_environment
from ftlab.errors import FtlabError, JobError, WaitTimeout
from ftlab.grading.crash.operations import Recording
from ftlab.grading.crash.ptrace import check_machine
from ftlab.grading.stage.connection import Connection, Heard
from ftlab.grading.stage.interrupts import held
from ftlab.grading.stage.outcome import Outcome
from ftlab.grading.stage.package import copy_package
from ftlab.grading.stage.play import Play

START_S = 120.0  # for the server to import torch on a busy machine
_MAIN = ("import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
         "from ftlab.grading.stage.server import main; main()")

_MAX_RECORDING = 256 << 20  # bytes
_sealed: list[Stage] = []  # sandboxed stages of a grader: as long as there is one, no other stage is opened

Function = Callable[[Path], Any]


def open_here(argv: list[str], work: Path, log: Any) -> Server:
    """Start the server as a child of this process, without any sandbox: for a student's own checks."""
    if _sealed:
        raise FtlabError("a check tried to run a student's part outside of the sandbox", hint="use current_stage()")
    temporary = work / ROOM / "tmp"
    temporary.mkdir()
    server = Local(argv, stderr=log, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
                   env=stage_environment(work, temporary))
    server.wiped = (str(temporary),)
    return server


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
    in which student's code does what it likes. In a sandbox it sees a copy of ftlab without what judges `labs`, and
    without the reference of what they ask for.
    """

    def __init__(self, folder: Path | None = None, preload: Sequence[str] = ("torch",),
                 opener: Opener = open_here, labs: Sequence[str] = ()) -> None:
        self._parent, self._preload, self._opener, self._labs = folder, list(preload), opener, tuple(labs)
        self._connection: Connection | None = None
        self._work: TemporaryFolder | None = None

    def __enter__(self) -> Self:
        try:
            with held():
                server, work = self._start()
            self._ask("begin", START_S, wiped=list(server.wiped), home="" if self.sandboxed else str(work))
            self._ask("preload", START_S, modules=self._preload)
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> tuple[Server, Path]:
        """Start the server in a new folder."""
        self._work = TemporaryFolder("stage", self._parent)
        work = self._work.path
        for name in (DESK, ROOM):
            (work / name).mkdir()
        if self.sandboxed:
            copy_package(work / PACKAGE, self._labs)
        path = [os.path.abspath(each) for each in sys.path if each]
        with (work / "server.log").open("wb") as log:
            server = self._opener([sys.executable, "-c", _MAIN, json.dumps(path)], work, log)
        self._connection = Connection(server, work / "server.log")
        return server, work

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server with everything below it, and remove the work folder; may be called twice."""
        with held():
            connection, self._connection = self._connection, None
            work, self._work = self._work, None
            try:
                if connection is not None:
                    connection.close()
            finally:
                if work is not None:
                    work.close()

    @property
    def open(self) -> bool:
        """Whether it can be asked: it was not closed, its server lives, and owes no reply."""
        return self._connection is not None and self._connection.usable

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

    def run_group(self, plays: Sequence[Play], seconds: float, lost: int = -1) -> list[Outcome]:
        """Perform plays at the same time, each in a child of its own that sees none of the others' arguments; what came
        of each. One that is `lost` is not waited for."""
        self._ask("gather", START_S, count=len(plays))
        reply = self._ask("group", seconds, plays=[play.to_json() for play in plays], seconds=seconds, lost=lost)
        self._ask("hush", START_S)
        return [Outcome.from_reply(each) for each in reply["said"]]

    def hear(self, play: Play, seconds: float, each_s: float) -> tuple[list[dict[str, Any]], Outcome]:
        """Perform a play that is called with `tell=`: what it told, and how it ended; it may be silent for `each_s`.

        If it brings the server down, that is its end, and what it told before stands.
        """
        told: list[dict[str, Any]] = []
        try:
            reply = self._ask("tell", seconds, told.append, play=self._put(play), seconds=seconds, each_s=each_s)
        except (JobError, WaitTimeout) as error:
            self.close()
            last = error.seen.strip().splitlines()[-1:]
            return told, Outcome(ended=f"it brought the sandbox down: {(last or [error.message])[0]}")
        return told, Outcome.from_reply(reply)

    @contextlib.contextmanager
    def answering(self, play: Play, seconds: float) -> Iterator[Callable[[Any], Outcome]]:
        """A play that gives a function: what it answers to one question after the other, as outcomes. All questions
        together have so long; after one that was not answered no other is."""
        over: list[Outcome] = []

        def ask(question: Any) -> Outcome:
            if not over:
                found = Outcome.from_reply(self._ask("ask", seconds, question=json.dumps(question)))
                if found.ok:
                    return found
                over.append(found)
            return over[0]

        first = Outcome.from_reply(self._ask("talk", seconds, play=self._put(play), seconds=seconds))
        over += [] if first.ok else [first]
        try:
            yield ask
        finally:
            if self.open:
                self._ask("hush", START_S)

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
        user = self._connection.server.user if self._connection is not None else None
        if user is None or user == os.getuid():
            return
        for parent, folders, files in os.walk(folder):
            for each in ("", *folders, *files):
                os.chown(os.path.join(parent, each).rstrip("/"), user, -1, follow_symlinks=False)

    def set_functions(self, *functions: Function | Play) -> None:
        """What the next `record` runs (prepare and save), or the next `load`s; each is called with the folder as last
        argument. Raises NotPicklable."""
        plays = [each if isinstance(each, Play) else Play.of_any(each) for each in functions]
        (self._inside(DESK) / "functions").write_text("\n".join(play.to_json() for play in plays))

    def record(self, seconds: float) -> Recording:
        """Run prepare and save in an empty folder; raises JobError or WaitTimeout when one of them does not return, and
        FaultUnavailable where system calls cannot be traced."""
        check_machine()
        self.new_folder(self.folder.name)
        out = self._inside(ROOM) / "recording.json"
        self._ask("record", 2 * seconds, functions=self._functions(), folder=str(self.folder), out=str(out),
                  seconds=seconds)
        try:
            return Recording.from_json(_read(out))
        finally:
            self.clear_room(keep=self.folder.name)

    def load(self, seconds: float) -> dict[str, Any]:
        """Run load on the folder as it is, and on nothing else: {"digest", "text"} of the value, or {"raised"}."""
        self.clear_room(keep=self.folder.name)  # a state that was put elsewhere would survive every crash
        return self._ask("load", seconds, functions=self._functions(), folder=str(self.folder), seconds=seconds)

    def clear_room(self, keep: str = "") -> None:
        """Remove what lies in the room, but for one folder."""
        for each in self._inside(ROOM).iterdir():
            if each.name not in (keep, "tmp"):
                remove(each)

    def _functions(self) -> str:
        return str(self._inside(DESK) / "functions")

    def _inside(self, name: str) -> Path:
        if self._work is None:
            raise FtlabError("the stage is closed", hint="with Stage() as stage: ...")
        return self._work.path / name

    def _ask(self, task: str, patience_s: float, heard: Heard | None = None, **request: Any) -> dict[str, Any]:
        if self._connection is None:
            raise FtlabError("the stage is closed", hint="with Stage() as stage: ...")
        try:
            return self._connection.ask(task, patience_s, heard, **request)
        except BaseException:
            if self._connection is None or self._connection.pending:  # whatever came between: its reply is yet to come
                self.close()
            raise


def _read(file: Path) -> str:
    """What the server left in the room, where student's code may have put anything under its name."""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_RECORDING:
            raise JobError(f"{file.name} is no file that we wrote, or larger than {_MAX_RECORDING >> 20} MB",
                           hint="a save may write some hundred MB, not more")
        return opened.read()
