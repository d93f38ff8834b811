"""The folder of running clusters: private to this user, whoever took its name in the temporary folder."""

from __future__ import annotations

import os
import tempfile

import pytest

from ftlab.config import runs_dir
from ftlab.errors import ConfigError


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.delenv("FTLAB_RUNS", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_running_clusters_have_a_folder_of_this_user(temporary):
    assert runs_dir() == temporary / f"ftlab-{os.getuid()}"


@pytest.mark.parametrize("take", [lambda name: name.symlink_to(name.parent), lambda name: name.write_text("")],
                         ids=["a link", "a file"])
def test_a_name_that_is_no_folder_is_not_used(temporary, take):
    mine = temporary / f"ftlab-{os.getuid()}"
    take(mine)
    assert runs_dir() == mine.with_name(f"{mine.name}-1")


def test_a_folder_of_another_user_is_left_to_him(temporary, monkeypatch):
    theirs = temporary / f"ftlab-{os.getuid() + 1}"
    theirs.mkdir()
    me = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: me)
    assert runs_dir() == theirs.with_name(f"{theirs.name}-1")


def test_a_folder_that_is_in_use_stays_in_use_when_the_first_name_is_free_again(temporary):
    second = temporary / f"ftlab-{os.getuid()}-1"
    second.mkdir(mode=0o700)
    assert runs_dir() == second


def test_no_folder_at_all_is_a_clear_error(temporary, monkeypatch):
    for name in [f"ftlab-{os.getuid()}", *(f"ftlab-{os.getuid()}-{number}" for number in range(1, 10))]:
        (temporary / name).write_text("")
    with pytest.raises(ConfigError, match="not a folder of this user") as caught:
        runs_dir()
    assert "FTLAB_RUNS" in caught.value.hint
    monkeypatch.setenv("FTLAB_RUNS", str(temporary / f"ftlab-{os.getuid()}"))
    with pytest.raises(ConfigError, match="not a folder of this user"):
        runs_dir()


def test_no_temporary_folder_is_a_clear_error(monkeypatch):
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.delenv("FTLAB_RUNS", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(ConfigError, match="no temporary folder can be written to"):
        runs_dir()
