"""`ftlab lab`: where the labs are, and what JupyterLab is started with."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ftlab.cli import lab
from ftlab.config import lab_environment
from ftlab.errors import ConfigError


def test_the_labs_are_found_here_or_above(tmp_path):
    (tmp_path / "labs" / "lab00").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no folder labs/"):
        lab.find_labs(tmp_path)
    (tmp_path / "labs" / "lab00" / "one.ipynb").write_text("{}")
    for start in (tmp_path, tmp_path / "labs", tmp_path / "labs" / "lab00"):
        assert lab.find_labs(start) == tmp_path / "labs"


def test_our_programs_come_first_and_the_users_settings_stay(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/home/me/jupyter")
    environment = lab_environment(lab.SETTINGS)
    assert environment["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/usr/bin"]
    assert environment["JUPYTER_CONFIG_PATH"].split(os.pathsep) == [str(lab.SETTINGS), "/home/me/jupyter"]


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/sh", "/usr/bin/zsh"])
def test_a_terminal_is_no_login_shell(shell):
    command = lab.terminal_shell(shell)
    assert command[0] == shell and "-l" not in command and "--login" not in command
    assert (len(command) == 3) == shell.endswith("bash"), "bash reads a file of ours after the user's"


def test_what_the_user_adds_comes_last():
    assert lab.command(Path("/labs"), ["--port=1", "--no-browser"])[-2:] == ["--port=1", "--no-browser"]


def test_the_settings_are_valid_json():
    found = sorted(lab.SETTINGS.rglob("*.json"))
    assert len(found) == 3 and all(json.loads(each.read_text()) for each in found)
