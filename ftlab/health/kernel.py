"""What the kernel tells of a process, in the small files of /proc and of its cgroups.

They are read often, beside training, by agents whose code has left the caches by then: so with as few calls as
possible, and with paths as plain text. A file that is not there, or not for us, reads as empty.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_READ = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """The cgroup of a process for one controller, as far as it can be seen from here."""

    version: Literal[1, 2]
    path: Path
    top: Path  # where the hierarchy is mounted; inside a container this is the container's own cgroup

    def levels(self) -> tuple[Path, ...]:
        """Itself and those above it: the limits of all of them hold."""
        return _levels(self.path, self.top)


_found: dict[tuple[str, str, Path], Cgroup] = {}  # by what a process's own file says: while that stays, so does this


def find_cgroup(controller: str, pid: int | None = None, proc: Path = PROC,
                cgroup_root: Path = CGROUPS) -> Cgroup | None:
    """The cgroup of a process for `memory` or `cpu`, v1 or v2; None where there is none, or it cannot be seen."""
    key = controller, read(f"{folder(pid, proc)}/cgroup"), cgroup_root
    found = _found.get(key) or _find_cgroup(*key)
    if found is not None:
        _found[key] = found
    return found


def folder(pid: int | None = None, proc: Path = PROC) -> str:
    """The folder of a process; of this one without `pid`."""
    return f"{proc}/{'self' if pid is None else pid}"


def read(file: str | Path) -> str:
    """The text of a file of the kernel; empty if it is not there or not for us."""
    try:
        fd = os.open(file, os.O_RDONLY)
    except OSError:
        return ""
    try:
        text = b""
        while piece := os.read(fd, _READ):
            text += piece
        return text.decode(errors="replace").strip()
    except OSError:  # the process ended meanwhile
        return ""
    finally:
        os.close(fd)


def entries(file: str | Path) -> dict[str, int]:
    """A file of lines `name number`."""
    return dict(_numbers(read(file)))


def word_after(text: str, title: str) -> str:
    """The word after a title at the beginning of a line; empty if there is no such line."""
    _, found, after = f"\n{text}".partition(f"\n{title}")
    return after.split(maxsplit=1)[0] if found and after.strip() else ""


def _find_cgroup(controller: str, lines: str, cgroup_root: Path) -> Cgroup | None:
    for line in lines.splitlines():
        _, names, inside = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        for version, top in _mounts(controller, names, cgroup_root):
            if ".." not in inside.split("/"):  # it would lead out of what this container may see
                path = f"{top}/{inside.lstrip('/')}"
                # a container may be told its path on the host, while its own cgroup is mounted as the top
                return Cgroup(version=version, path=Path(path) if os.path.isdir(path) else top, top=top)
    return None


def _numbers(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if number.strip().isdigit():
            yield name, int(number)


@cache
def _levels(path: Path, top: Path) -> tuple[Path, ...]:
    return (path, *(above for above in path.parents if above.is_relative_to(top)))


def _mounts(controller: str, names: str, root: Path) -> list[tuple[Literal[1, 2], Path]]:
    """Where the hierarchy with these controllers (none: v2) is mounted, if ours is one of them."""
    if names:
        return [(1, top) for top in (root / names, root / controller) if top.is_dir()]
    # the second where v1 and v2 stand side by side
    return [(2, top) for top in (root, root / "unified") if controller in read(top / "cgroup.controllers").split()]
