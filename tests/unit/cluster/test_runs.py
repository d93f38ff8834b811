"""Run folders, cards and leftovers.

`labelled` would find the processes of every cluster on this machine, and `reap` would end them: here it is only shown
the processes that a test started itself. The engine's containers are everybody's too: here nobody is asked for them.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ftlab.cluster import runs
from ftlab.config import CLUSTER_LABEL, FOLDER_LABEL, runs_dir
from tests.limits import SOON_S

SLEEPER = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs.engine, "look", lambda: [])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTLAB_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], subprocess.Popen]]:
    """Start a process that waits, with or without a cluster's label; only such processes are seen."""
    children: list[subprocess.Popen] = []
    monkeypatch.setattr(runs.psutil, "process_iter", lambda: iter(
        [psutil.Process(os.getpid()), *(psutil.Process(child.pid) for child in children if child.returncode is None)]))

    def start(cluster: str | None) -> subprocess.Popen:
        environment = {name: value for name, value in os.environ.items() if name not in (CLUSTER_LABEL, FOLDER_LABEL)}
        labels = {CLUSTER_LABEL: cluster, FOLDER_LABEL: str(runs_dir() / cluster)} if cluster else {}
        child = subprocess.Popen(SLEEPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 env=environment | labels)
        assert child.stdout is not None
        child.stdout.readline()
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def card(cluster: str, pid: int) -> dict[str, object]:
    return {"cluster": cluster, "launcher_pid": pid, "token": "secret", "url": "http://127.0.0.1:1"}


def test_a_folder_and_its_card_are_private_to_the_user(folder):
    folder.mkdir(mode=0o755)
    made = runs.make_folder("abc")
    runs.write_card(made, card("abc", 1))
    for path, mode in ((folder, 0o700), (made, 0o700), (made / runs.CARD, 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode, path
    assert (made / "logs").is_dir() and sorted(each.name for each in made.iterdir()) == ["cluster.json", "logs"]
    with pytest.raises(FileExistsError):
        runs.make_folder("abc")


def test_only_cards_of_living_launchers_are_read(folder, sleeper):
    alive, unlabelled = sleeper("alive"), sleeper(None)
    for name, pid in (("alive", alive.pid), ("dead", 2 ** 22 + 1), ("stolen", unlabelled.pid), ("other", alive.pid)):
        runs.write_card(runs.make_folder(name), card(name, pid))
    (runs.make_folder("torn") / runs.CARD).write_text('{"cluster": "to')
    (runs.make_folder("odd") / runs.CARD).write_text(json.dumps({"cluster": "odd", "launcher_pid": "x"}))
    assert [each["cluster"] for each in runs.read_cards()] == ["alive"]


def test_there_is_nothing_to_read_where_no_cluster_ever_ran(folder):
    assert list(runs.read_cards()) == [] and not folder.exists()


def test_a_process_is_running_only_if_it_lives_and_carries_the_label(sleeper):
    child = sleeper("mine")
    assert runs.is_running(child.pid, "mine")
    assert not runs.is_running(child.pid, "yours") and not runs.is_running(2 ** 22 + 1, "mine")
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is dead, and nobody has buried it yet
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    assert not runs.is_running(child.pid, "mine") and runs.labelled() == {}


def test_labelled_processes_are_found_and_others_are_not(sleeper):
    first, second, _ = sleeper("one"), sleeper("one"), sleeper(None)
    assert runs.labelled() == {"one": [first.pid, second.pid]}


def test_what_a_dead_launcher_left_behind_is_found_and_removed(folder, sleeper):
    orphan, stranger = sleeper("gone"), sleeper(None)
    left = runs.make_folder("gone")
    runs.write_card(left, card("gone", 2 ** 22 + 1))
    (found,) = runs.find_leftovers()
    assert (found.cluster, found.folder, found.pids) == ("gone", left, (orphan.pid,))
    assert found.describe() == f"gone: 1 processes, folder {left}"
    assert runs.reap() == [found]
    assert orphan.wait(timeout=SOON_S) == -9
    assert not left.exists() and stranger.poll() is None
    assert runs.find_leftovers() == []


def test_a_folder_without_processes_and_processes_without_a_folder_are_leftovers_too(folder, sleeper):
    orphan = sleeper("no-folder")
    empty = runs.make_folder("no-process")
    os.utime(empty, (1.0, 1.0))
    assert [(each.cluster, each.pids) for each in runs.find_leftovers()] == [
        ("no-folder", (orphan.pid,)), ("no-process", ())]
    runs.reap()
    assert orphan.wait(timeout=SOON_S) == -9 and not empty.exists()


def test_a_cluster_that_runs_is_not_touched(folder, sleeper):
    launcher, node = sleeper("alive"), sleeper("alive")
    made = runs.make_folder("alive")
    runs.write_card(made, card("alive", launcher.pid))
    assert runs.find_leftovers() == [] == runs.reap()
    assert launcher.poll() is None and node.poll() is None and made.exists()


def test_a_cluster_that_runs_from_another_folder_is_not_touched(folder, sleeper, monkeypatch):
    launcher = sleeper("alive")
    runs.write_card(runs.make_folder("alive"), card("alive", launcher.pid))
    monkeypatch.setenv("FTLAB_RUNS", str(folder.parent / "others"))
    assert runs.find_leftovers() == [] == runs.reap()
    assert launcher.poll() is None


def test_a_cluster_that_is_just_being_started_is_not_touched(folder, sleeper):
    child = sleeper("young")
    made = runs.make_folder("young")
    assert runs.find_leftovers() == []
    os.utime(made, (1.0, 1.0))
    assert [each.pids for each in runs.find_leftovers()] == [(child.pid,)], "but it must get ready some time"


def test_a_cluster_that_starts_slowly_is_no_leftover_while_its_launcher_lives(folder, sleeper):
    """On a busy machine the card takes longer than anybody would wait for it; another start once removed such one."""
    made, launcher = runs.make_folder("slow"), sleeper("slow")
    runs.write_pid(made, launcher.pid)
    os.utime(made, (1, 1))
    assert runs.find_leftovers() == [] and runs.launcher_lives("slow", made)
    launcher.kill()
    launcher.communicate()
    assert [each.cluster for each in runs.find_leftovers()] == ["slow"]
