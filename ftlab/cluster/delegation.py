"""Cgroups for users who are not root: systemd delegates a scope to them, where a user manager of theirs runs.

A launcher that could make no cages where it is gets a scope of its own (`systemd-run --user --scope -p Delegate=yes`):
everything below it is the user's, so the kernel can be made to kill one node for memory. v2 hands no controller on to
the groups below one that holds processes; so the launcher goes into a leaf of its scope first (`settle`).

Where this stops: without systemd, or where its user manager has no memory controller to give away (v1), only root can
make cages, or somebody to whom root has given a cgroup by hand.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from ftlab.cluster import cgroups
from ftlab.cluster.cgroups import LABEL, MemoryCage
from ftlab.health.kernel import CGROUPS, PROC, find_cgroup, read

_SCOPE = ("systemd-run", "--user", "--scope", "--quiet", "--collect", "-p", "Delegate=yes", "--")
_TRY_S = 10.0
_TRY_CAGES = ("import sys; from ftlab.cluster import cgroups, delegation; delegation.settle(); "
              "sys.stdout.write(cgroups.available())")


def scope() -> tuple[str, ...]:
    """What stands before a command so that it runs in a scope of its own; nothing where it needs none, or gets none."""
    return _SCOPE if not no_scope() and cgroups.available() else ()


def why_no_cages() -> str:
    """Empty if a launcher can have the kernel kill for memory here, in a scope of its own if need be; else why not."""
    here = cgroups.available()
    in_scope = _no_cages_in_scope() if here else ""
    return f"{here}; systemd gives none: {in_scope}" if in_scope else ""


@cache
def no_scope() -> str:
    """Empty if systemd runs commands of this user in a scope, and hands open files on to them; else why not."""
    if os.geteuid() == 0:
        return "its scopes are for users who are not root"
    if shutil.which(_SCOPE[0]) is None:
        return "there is no systemd-run here"
    if not Path(f"/run/user/{os.getuid()}/systemd/private").exists():
        return f"no user manager of systemd runs for user {os.getuid()}"
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer):
        return _failure([*_SCOPE, "sh", "-c", f": >&{writer}"], writer)


@cache
def _no_cages_in_scope() -> str:
    return no_scope() or _failure([*_SCOPE, sys.executable, "-c", _TRY_CAGES])


def settle(*, proc: Path = PROC, cgroup_root: Path = CGROUPS) -> bool:
    """Go into a leaf of this process's cgroup, if it is ours, v2 and holds nobody else, so that cages can lie beside
    it; whether that was needed and done."""
    home = find_cgroup(MemoryCage.controller, proc=proc, cgroup_root=cgroup_root)
    if home is None or home.version == 1 or not os.access(home.path / "cgroup.subtree_control", os.W_OK):
        return False
    if any(MemoryCage.controller in read(level / "cgroup.subtree_control").split() for level in home.levels()):
        return False
    if read(home.path / "cgroup.procs").split() != [str(os.getpid())]:
        return False
    leaf = home.path / f"{LABEL}launcher-{os.getpid()}-0"
    with contextlib.suppress(OSError):  # then cages cannot be made, and `available` tells why
        leaf.mkdir()
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
        for controller in read(home.path / "cgroup.controllers").split():
            if controller in ("memory", "cpu"):
                (home.path / "cgroup.subtree_control").write_text(f"+{controller}")
        return True
    return False


def _failure(command: list[str], *files: int) -> str:
    """What a command says that fails, or writes if it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TRY_S, pass_fds=files)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return last[0] if done.returncode else done.stdout.strip()
