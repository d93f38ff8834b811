"""`ftlab lab`, behind `make lab`: JupyterLab on the labs, as a student should find it.

`ftlab` is found in its terminals and kernels, whether or not the environment is activated. The instructors' sidebar of
nbgrader and JupyterLab's news are left out by a folder of settings of our own (`cli/jupyter`), which the server reads
beside the user's: nothing in the user's home is changed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from ftlab.config import lab_environment, login_shell
from ftlab.errors import ConfigError

SETTINGS = Path(__file__).parent / "jupyter"


def lab(arguments: argparse.Namespace) -> int:
    """Become JupyterLab; returns only by an error."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise ConfigError("jupyterlab is not installed", hint="make setup, or pip install 'ftlab[labs]'")
    labs = find_labs(Path.cwd())
    os.execve(sys.executable, command(labs, arguments.jupyter), lab_environment(SETTINGS))


def find_labs(start: Path) -> Path:
    """The folder `labs` with notebooks, here or above. Raises ConfigError if there is none."""
    for folder in (start, *start.parents):
        if any((folder / "labs").glob("lab*/*.ipynb")):
            return folder / "labs"
    raise ConfigError(f"there is no folder labs/ with notebooks in {start} or above it",
                      hint="go to the folder that holds labs/; authors: ftlab labs release")


def command(labs: Path, more: list[str]) -> list[str]:
    """How JupyterLab is called; `more` comes last, and so has the last word."""
    root = ["--allow-root"] if os.geteuid() == 0 else []
    return [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={labs}",
            f"--ServerApp.terminado_settings={ {'shell_command': terminal_shell(login_shell())} }", *root, *more]


def terminal_shell(shell: str) -> list[str]:
    """What a terminal runs: never a login shell, as /etc/profile would take our programs off the PATH again."""
    return [shell, "--rcfile", str(SETTINGS / "bashrc")] if Path(shell).name == "bash" else [shell]
