"""Running something as an ordinary user: as oneself, or, where the tests run as root, as nobody.

Root's interpreter may lie where others cannot read it; then another one of the same version is taken, with the packages
of this one.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

from tests.limits import COMMAND_S

ROOT = Path(__file__).parents[1]
NOBODY = 65534


def why_not() -> str:
    """Empty if something can be run as an ordinary user here, else why not."""
    if os.getuid():
        return ""
    if not _open_to_all(ROOT) or not _open_to_all(Path(site.getsitepackages()[0])):
        return "others cannot read this repository or its packages"
    return "" if _python() else "others can read no interpreter of this version"


def run_as_ordinary(code: str, home: Path, *, timeout: float = COMMAND_S) -> str:
    """What some code says that an ordinary user runs, with a home of his own."""
    environment = {"PATH": os.defpath, "HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1",
                   "PYTHONPATH": os.pathsep.join([str(ROOT), *site.getsitepackages()])}
    who: dict = {} if os.getuid() else {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    if who:
        os.chown(home, NOBODY, NOBODY)
    done = subprocess.run([_python(), "-c", code], cwd=home, env=environment, capture_output=True, text=True,
                          timeout=timeout, **who)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _python() -> str:
    """An interpreter that everybody may use."""
    if os.getuid() or _open_to_all(Path(os.path.realpath(sys.executable))):
        return sys.executable
    other = shutil.which(f"python{sys.version_info[0]}.{sys.version_info[1]}", path="/usr/bin:/usr/local/bin")
    return other if other and _open_to_all(Path(os.path.realpath(other))) else ""


def _open_to_all(path: Path) -> bool:
    return all(each.stat().st_mode & 0o001 for each in (path, *path.parents))
