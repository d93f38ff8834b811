"""The launcher's process, as its owner sees it: started with a pipe, and ended by closing that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from ftlab.cluster import runs, warm_start
from ftlab.cluster.delegation import scope
from ftlab.cluster.launcher_settings import SETTINGS
from ftlab.config import ClusterConfig, child_environment

_END_S = 10.0  # for a launcher to end all that it has started
_LAST_WRITES_S = 2.0  # nodes of a launcher that was killed may still be writing


class LauncherProcess(Protocol):
    """What an owner can do with its launcher."""

    @property
    def pid(self) -> int:
        """The process's number."""

    def poll(self) -> int | None:
        """None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Block until it has ended; raises TimeoutExpired."""

    def kill(self) -> None:
        """End it at once."""

    def terminate(self) -> None:
        """Have it end itself."""


def start_launcher(cluster: str, config: ClusterConfig, folder: Path, token: str,
                   detached: bool) -> tuple[LauncherProcess, Connection]:
    """Start the launcher of a cluster, warm if it can be; its process, and the owner's end of the pipe. `detached`
    outlives its owner."""
    settings = {"cluster": cluster, "token": token, "config": config.to_dict(), "detached": detached}
    with os.fdopen(os.open(folder / SETTINGS, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        json.dump(settings, file)
    mine, theirs = Pipe()
    environment = child_environment(cluster, folder)
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    around = scope() if config.backend == "process" else ()
    with (folder / "launcher.log").open("wb") as log, theirs:
        launcher: LauncherProcess | None = None
        if not (detached or around):
            launcher = warm_start.launch(folder, environment, theirs, log.fileno())
        if launcher is None:
            command = [*around, sys.executable, "-m", "ftlab.cluster.launcher", str(folder), str(theirs.fileno())]
            launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                                        pass_fds=(theirs.fileno(),), start_new_session=True)
    runs.write_pid(folder, launcher.pid)
    return launcher, mine


def end_launcher(launcher: LauncherProcess, owner: Connection, folder: Path) -> None:
    """Close the owner's end; the launcher takes that as the end of the cluster."""
    owner.close()
    try:
        launcher.wait(_END_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
    deadline = time.monotonic() + _LAST_WRITES_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
