"""Starting launchers warm: forked from a template that this process keeps, instead of importing torch each time.

The template is made with the first cluster and ends with this process. What launchers inherit from it (imports, limits,
cgroup, namespaces) is the state in which it was made: where this process's own has changed since, another one is made.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ftlab.cluster.launcher_template import READY, LaunchOrder
from ftlab.config import CLUSTER_LABEL, FOLDER_LABEL, import_settings, runs_dir, template_environment

_LOOK_S = 0.2
_ANSWER_S = 10.0  # a fork takes milliseconds
_PLACES = {"FTLAB_LABEL_1": CLUSTER_LABEL, "FTLAB_LABEL2": FOLDER_LABEL}  # names as long as the labels'
_NAME = "ft-" + 8 * "0"  # as long as a cluster's name
_made: list[LauncherTemplate] = []  # at most one
_making = threading.Lock()


class ForkedLauncher:
    """A launcher that another process forked, watched through a descriptor of the kernel's."""

    def __init__(self, pid: int, watch: int) -> None:
        self.pid, self._watch = pid, watch

    def poll(self) -> int | None:
        """None while it runs."""
        return 0 if self._ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Block until it has ended; raises TimeoutExpired as a Popen does."""
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired(["launcher"], timeout or 0.0)
        return 0

    def kill(self) -> None:
        """End it at once."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Have it end itself."""
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._watch, number)

    def _ended(self, timeout: float | None) -> bool:
        waiting = select.poll()
        waiting.register(self._watch, select.POLLIN)
        return bool(waiting.poll(None if timeout is None else 1000 * timeout))

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._watch)


class LauncherTemplate:
    """The template's process, as its owner sees it."""

    def __init__(self) -> None:
        self.made_in, self.ready = _circumstances(), False
        self._looking = threading.Lock()
        mine, theirs = socket.socketpair()
        self._places = dict(zip(_PLACES, (_NAME, str(runs_dir() / _NAME)), strict=True))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ftlab.cluster.launcher_template", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
                pass_fds=(theirs.fileno(),), start_new_session=True, env=template_environment(self._places))
        self._link = Connection(mine.detach())

    @property
    def usable(self) -> bool:
        """Whether it lives, and a launcher that is started now would inherit the same from this process."""
        return self._process.poll() is None and self.made_in == _circumstances()

    def look(self, seconds: float) -> bool:
        """Wait so long for it to be warm; whether there is no need to wait any longer."""
        with self._looking, contextlib.suppress(EOFError, OSError):
            if not self.ready and self._link.poll(seconds):
                self.ready = self._link.recv() == READY
        return self.ready or self._process.poll() is not None

    def launch(self, folder: Path, environment: dict[str, str], link: Connection, log: int) -> ForkedLauncher:
        """Fork a launcher that owns `link` and writes to `log`; raises OSError if the template is gone."""
        labels = {f"{place}={self._places[place]}": f"{name}={environment[name]}" for place, name in _PLACES.items()}
        self._link.send(LaunchOrder(folder=folder, environment=environment, labels=labels, umask=_umask(), cwd=_cwd(),
                                    path=["", *filter(None, sys.path)]))
        for handle in (link.fileno(), log):
            reduction.send_handle(self._link, handle, self._process.pid)
        if not self._link.poll(_ANSWER_S):
            raise TimeoutError("the launcher template does not answer")
        return ForkedLauncher(self._link.recv(), reduction.recv_handle(self._link))

    def close(self) -> None:
        """End it; launchers that it forked go on."""
        self._link.close()
        self._process.kill()
        self._process.wait()


def prepare(wait: bool, say: Callable[[str], None], timeout: float) -> None:
    """Have a warm template at hand; where there is none, and `wait` is not wanted, none is made."""
    if not _possible():
        return
    with _making:
        template = _current()
        if template is None and not wait:
            return
        if template is None:
            _made[:] = [template := LauncherTemplate()]
    deadline = time.monotonic() + timeout
    while not template.look(_LOOK_S) and time.monotonic() < deadline:
        say("importing torch")


def launch(folder: Path, environment: dict[str, str], link: Connection, log: int) -> ForkedLauncher | None:
    """A launcher forked from the template; None if there is none that is warm."""
    with _making:
        template = _current() if _possible() else None
        if template is None or not template.ready:
            return None
        try:
            return template.launch(folder, environment, link, log)
        except (OSError, EOFError):
            _drop(template)
            return None


def _current() -> LauncherTemplate | None:
    for template in _made:
        if template.usable:
            return template
        _drop(template)
    return None


def _drop(template: LauncherTemplate) -> None:
    _made.clear()
    if template.made_in[0] == os.getpid():  # a fork of its owner leaves it alone
        template.close()


def _circumstances() -> tuple[Any, ...]:
    """What a process that is started now would inherit, and could not be given afterwards."""
    limits = tuple(resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_"))
    spaces = tuple(os.readlink(path) for path in sorted(Path("/proc/self/ns").iterdir()))
    return (os.getpid(), os.getresuid(), os.getresgid(), limits, spaces, Path("/proc/self/cgroup").read_text(),
            len(str(runs_dir())), import_settings())


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _possible() -> bool:
    return hasattr(os, "pidfd_open") and os.path.isdir("/proc/self/ns")
