"""The folders of running clusters, and what is left of those that did not end well.

Each cluster has one private folder (`cluster.json` with its address and token, the journal, the logs) that goes away
with it. Every process of a cluster carries the cluster's label in its environment, every container and network among
its labels. `find_leftovers` and `reap` look for these, and touch nothing else. Temporary folders of other purposes lie
beside them (`temporary.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from ftlab.cluster import engine, temporary
from ftlab.cluster.cgroups import sweep
from ftlab.cluster.engine import Owned
from ftlab.config import CLUSTER_LABEL, FOLDER_LABEL, runs_dir

CARD = "cluster.json"
PID = "launcher.pid"  # there before the card, which a busy machine may take minutes to write
_STARTING_S = 30.0  # for which a folder may be without both


@dataclass(frozen=True)
class Leftover:
    """What is left of a cluster whose launcher is gone, or of a temporary folder whose owner is."""

    cluster: str
    folder: Path | None
    pids: tuple[int, ...] = field(default=())
    things: Owned | None = None  # containers, networks and volumes

    def describe(self) -> str:
        """One line for people."""
        parts = [f"{len(self.pids)} processes"] if self.pids else []
        parts += [f"folder {self.folder}"] if self.folder else []
        parts += [f"{len(self.things.containers)} containers"] if self.things and self.things.containers else []
        parts += [f"{len(self.things.networks)} networks"] if self.things and self.things.networks else []
        parts += [f"{len(self.things.volumes)} volumes"] if self.things and self.things.volumes else []
        return f"{self.cluster}: {', '.join(parts)}"


def make_folder(cluster: str) -> Path:
    """A new private folder for a cluster."""
    folder = temporary.private_base() / cluster
    folder.mkdir(mode=0o700)
    (folder / "logs").mkdir()
    return folder


def write_pid(folder: Path, launcher: int) -> None:
    """Leave the launcher's pid, so that nobody takes a cluster that starts slowly for a leftover."""
    (folder / PID).write_text(str(launcher))


def write_card(folder: Path, card: dict[str, Any]) -> None:
    """Leave a cluster's address, token and launcher for other commands of the same user."""
    path = folder / f"{CARD}.new"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(card, file)
    path.rename(folder / CARD)


def read_cards() -> Iterator[dict[str, Any]]:
    """The cards of all clusters of this user whose launcher lives."""
    for path in sorted(runs_dir().glob(f"*/{CARD}")):
        card = _read_card(path.parent)
        if card:
            yield card


def is_running(pid: int, cluster: str) -> bool:
    """Whether a process lives and carries the cluster's label."""
    try:
        process = psutil.Process(pid)
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.environ().get(CLUSTER_LABEL) == cluster)
    except psutil.Error:
        return False


def labelled() -> dict[str, list[int]]:
    """The pids that carry a cluster's label, by cluster."""
    found: dict[str, list[int]] = {}
    for cluster, _, pid in _labelled_processes():
        found.setdefault(cluster, []).append(pid)
    return found


def launcher_lives(cluster: str, folder: Path) -> bool:
    """Whether a cluster has its launcher, or is just being started."""
    return _is_alive(Leftover(cluster, folder))


def find_leftovers() -> list[Leftover]:
    """What earlier runs left behind: folders, processes, containers and networks of clusters whose launcher is
    gone."""
    found: dict[str, Leftover] = {}
    folders = [path for path in runs_dir().glob("*") if path.is_dir()] if runs_dir().is_dir() else []
    for folder in folders:
        found[folder.name] = Leftover(folder.name, folder)
    for cluster, folder, pid in _labelled_processes():
        before = found.get(cluster, Leftover(cluster, folder if folder.is_dir() else None))
        found[cluster] = replace(before, folder=before.folder or folder, pids=(*before.pids, pid))
    for things in engine.look():
        known = found.get(things.cluster, Leftover(things.cluster, things.folder if things.folder.is_dir() else None))
        found[things.cluster] = replace(known, things=things)
    return [each for each in sorted(found.values(), key=lambda each: each.cluster) if not _is_alive(each)]


def reap() -> list[Leftover]:
    """Remove what `find_leftovers` finds; what was removed."""
    found = find_leftovers()
    for leftover in found:
        for pid in leftover.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if leftover.things:
            engine.remove(engine.connect(), leftover.things)
        if leftover.folder and _is_ours(leftover.folder):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                temporary.remove(leftover.folder)
    temporary.sweep(runs_dir())
    sweep()
    return found


def _labelled_processes() -> Iterator[tuple[str, Path, int]]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.uids().real != os.getuid():
                continue
            environment = process.environ()
            cluster, folder = environment.get(CLUSTER_LABEL), environment.get(FOLDER_LABEL)
            if cluster and folder and process.status() != psutil.STATUS_ZOMBIE:
                yield cluster, Path(folder), process.pid


def _is_ours(folder: Path) -> bool:
    """Whether a folder, which may be known from a process's environment only, is one that we made."""
    return folder.parent == runs_dir() or temporary.has_lock(folder) or any((folder / name).is_file()
                                                                            for name in (CARD, PID))


def _is_alive(found: Leftover) -> bool:
    """Whether the cluster has its launcher, or is just being started and has no card yet; the owner of a temporary
    folder lives."""
    if found.folder is None:
        return False
    if temporary.has_lock(found.folder):
        return temporary.in_use(found.folder)
    if _read_card(found.folder):
        return True
    with contextlib.suppress(OSError, ValueError):
        if is_running(int((found.folder / PID).read_text()), found.cluster):
            return True
    with contextlib.suppress(OSError):
        young = time.time() - found.folder.stat().st_mtime < _STARTING_S
        return young and not (found.folder / CARD).exists()
    return False


def _read_card(folder: Path) -> dict[str, Any] | None:
    """A cluster's card, if its launcher lives."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        card: dict[str, Any] = json.loads((folder / CARD).read_text())
        if is_running(int(card["launcher_pid"]), str(card["cluster"])):
            return card
    return None
