"""Temporary folders: they go with their owner, and one whose owner is dead is found and removed, no other."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ftlab.cluster import runs, temporary
from ftlab.cluster.temporary import TemporaryFolder
from tests.limits import SOON_S

OWNER = ("import sys; from ftlab.cluster.temporary import TemporaryFolder; made = TemporaryFolder('owned'); "
         "(made.path / 'file').write_text('x'); print(made.path, flush=True); sys.stdin.read()")


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTLAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(runs.engine, "look", lambda: [])
    monkeypatch.setattr(runs, "_labelled_processes", lambda: iter(()))  # of everybody on this machine
    return tmp_path / "runs"


def owner() -> tuple[subprocess.Popen[str], Path]:
    """Another process with a folder."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_folder_is_private_and_goes_with_its_block(base):
    with TemporaryFolder("drill") as folder:
        assert folder.parent == base and folder.name.startswith("drill-")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 == stat.S_IMODE(base.stat().st_mode)
    assert list(base.iterdir()) == []


def test_a_folder_goes_with_its_object_and_may_be_closed_twice(base):
    made = TemporaryFolder("drill")
    made.close()
    made.close()
    TemporaryFolder("forgotten")
    assert list(base.iterdir()) == []


def test_a_fork_of_the_owner_does_not_take_the_folder_along(base):
    made = TemporaryFolder("drill")
    child = os.fork()
    if child == 0:
        made.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert made.path.is_dir() and temporary.in_use(made.path)
    made.close()


def test_a_folder_goes_with_a_process_that_ends(base):
    process, folder = owner()
    assert folder.is_dir()
    process.communicate(timeout=SOON_S)
    assert list(base.iterdir()) == []


def test_a_folder_in_use_is_no_leftover_and_one_of_a_killed_process_is(base):
    process, folder = owner()
    assert temporary.in_use(folder) and runs.find_leftovers() == [] == runs.reap() and folder.is_dir()
    kill(process)
    assert not temporary.in_use(folder)
    assert [each.folder for each in runs.find_leftovers()] == [folder], "at once, though it is young"
    assert [each.folder for each in runs.reap()] == [folder]
    assert list(base.iterdir()) == [] == runs.find_leftovers()


def test_the_next_folder_that_is_made_removes_those_of_dead_owners_only(base):
    (dead, left), (alive, used) = owner(), owner()
    (base / "somebody-elses").mkdir()
    kill(dead)
    with TemporaryFolder("drill"):
        assert not left.exists() and used.is_dir() and (base / "somebody-elses").is_dir()
    kill(alive)


def test_an_owner_that_was_stopped_is_not_dead(base):
    process, folder = owner()
    os.kill(process.pid, signal.SIGSTOP)
    assert runs.reap() == [] and folder.is_dir()
    kill(process)


def test_a_lock_without_a_folder_is_removed_too(base):
    process, folder = owner()
    kill(process)
    temporary.remove(folder)
    runs.reap()
    assert list(base.iterdir()) == []


def test_a_folder_that_only_a_label_names_is_not_removed_unless_it_is_ours(base, tmp_path, monkeypatch):
    precious = tmp_path / "precious"
    precious.mkdir()
    os.utime(precious, (1, 1))
    child = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(runs, "_labelled_processes", lambda: iter([("x", precious, child.pid)]))
    assert [each.cluster for each in runs.reap()] == ["x"] and child.wait(SOON_S) == -9
    assert precious.is_dir()


def test_rights_that_were_taken_away_and_links_do_not_keep_a_folder(base, tmp_path):
    (tmp_path / "outside").mkdir()
    with TemporaryFolder("drill") as folder:
        (folder / "locked" / "deep").mkdir(parents=True)
        (folder / "locked").chmod(0)
        (folder / "link").symlink_to(tmp_path / "outside")
    assert list(base.iterdir()) == [] and (tmp_path / "outside").is_dir()
