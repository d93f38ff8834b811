"""The wheels that an image is built from, fetched by this machine's own pip.

pip is configured on this machine (index, certificates, folders on disk), and none of that may end up in an image. So
the wheels are fetched here and sent along with the build, which then needs neither the network nor a secret. This works
where wheels for this Python also fit the image's: the same system, architecture and minor version.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from ftlab.errors import ClusterError

FOLDER = "build/wheels"
_STAMP = ".complete"


def fits(python: str, machine: str) -> bool:
    """Whether wheels that this Python's pip fetches run on an image's (`3.11`, `x86_64`)."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return sys.platform == "linux" and (python, machine) == (here, platform.machine())


def fetch(root: Path, say: Callable[[str], None]) -> Path:
    """Fetch the wheels for the project at `root`, or find them complete; raises ClusterError with pip's last words."""
    folder = root / FOLDER
    names = [*tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"], "setuptools"]
    wanted = fingerprint(names, (root / "constraints.txt").read_bytes())
    stamp = folder / _STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        say("the packages are already here")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--progress-bar",
               "off", "--only-binary=:all:", "-d", str(folder), "-c", str(root / "constraints.txt"), *names]
    _run(command, say)
    stamp.write_text(wanted)
    return folder


def fingerprint(names: list[str], constraints: bytes) -> str:
    """What a folder of wheels was made for: packages, pins, Python, machine."""
    facts = "\n".join([*names, platform.machine(), f"{sys.version_info[0]}.{sys.version_info[1]}"])
    return hashlib.sha256(facts.encode() + constraints).hexdigest()


def _run(command: list[str], say: Callable[[str], None]) -> None:
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                said.append(line.rstrip())
                if line.startswith("Collecting "):
                    say(f"fetching {line.split()[1]}")
        except BaseException:
            pip.kill()  # Ctrl-C: the stamp is missing, the next run starts over
            raise
    if pip.returncode:
        errors = [line for line in said if line.startswith("ERROR")] or said
        raise ClusterError("pip could not fetch the packages of the image", seen="\n".join(errors[-3:])[:600],
                           hint="pip download torch, to see more; or --no-wheels: pip inside the build fetches them")
