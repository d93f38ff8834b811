"""What a save did to its folder, as data: the folder before, every operation in order, and the folder after.

Files and directories are *nodes* with a number, as inodes are: a rename moves a name, not a file. Node 0 is the folder
itself. The whole recording travels from the process that traced it as JSON, so reading it executes nothing.
"""

from __future__ import annotations

import base64
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ftlab.errors import FaultError

ROOT = 0  # the node of the folder itself
MAX_BYTES = 64 << 20  # of data in one recording; what a file grows by without being written counts too
MAX_OPERATIONS = 10_000  # of one recording

DATA = frozenset({"write", "truncate"})  # change what is inside a file
ENTRIES = frozenset({"create", "mkdir", "symlink", "link", "rename", "unlink", "rmdir"})  # change a directory


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation on the file system, or the moment when `save` returned."""

    kind: str  # one of DATA, of ENTRIES, or: fsync, sync, returned
    node: int = -1  # the file or directory it is about
    path: str = ""  # where that was then, relative to the folder
    parent: int = -1  # the directory whose entry changed
    name: str = ""  # the entry's name in there
    source: str = ""  # rename: the path it had before
    source_parent: int = -1  # rename: the directory it left
    source_name: str = ""  # rename: its name in there
    other: int = -1  # rename with RENAME_EXCHANGE: the node that went the other way
    target: str = ""  # symlink: what it points to
    offset: int = 0  # write: where in the file
    data: bytes = b""  # write: what
    size: int = 0  # truncate: the new size
    covers: int = 0  # fsync, sync: operations before this number are durable now
    mtime: int = 0  # what the clock of the file system said, in ns

    def __str__(self) -> str:
        return _SENTENCES[self.kind].format(op=self, name=self.path or ".", count=len(self.data))


_SENTENCES = {
    "create": "created `{name}`",
    "mkdir": "made the directory `{name}`",
    "symlink": "made `{name}` a symbolic link to `{op.target}`",
    "link": "gave a file the name `{name}`",
    "rename": "renamed `{op.source}` to `{name}`",
    "unlink": "deleted `{name}`",
    "rmdir": "removed the directory `{name}`",
    "write": "wrote {count} bytes to `{name}` at {op.offset}",
    "truncate": "cut `{name}` to {op.size} bytes",
    "fsync": "synced `{name}`",
    "sync": "synced everything",
    "returned": "save returned",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One name in a folder that was read from the real disk."""

    path: str  # relative to the folder; "" is the folder itself
    kind: str  # file, directory or symlink
    node: int
    data: bytes = b""  # of a file
    target: str = ""  # of a symlink
    mtime: int = 0


@dataclass(frozen=True)
class Recording:
    """A traced save: what `prepare` left, what `save` did, and what was there at the end."""

    before: tuple[Entry, ...]
    operations: tuple[Operation, ...]
    after: tuple[Entry, ...]

    def to_json(self) -> str:
        """The recording as text; bytes become base64."""
        parts: dict[str, tuple[Any, ...]] = {"before": self.before, "operations": self.operations, "after": self.after}
        return json.dumps({name: [_plain(asdict(each)) for each in items] for name, items in parts.items()})

    @staticmethod
    def from_json(text: str) -> Recording:
        """The recording that `to_json` wrote."""
        raw = json.loads(text)
        entries = {part: tuple(Entry(**_rich(each)) for each in raw[part]) for part in ("before", "after")}
        return Recording(entries["before"], tuple(Operation(**_rich(each)) for each in raw["operations"]),
                         entries["after"])


def read_folder(folder: Path, nodes: dict[tuple[int, int], int]) -> tuple[Entry, ...]:
    """Everything in a folder; `nodes` maps (device, inode) to a node's number and learns the ones it did not know."""
    found, todo, size = list[Entry](), [folder], 0
    while todo:
        path = todo.pop()
        info = path.lstat()
        size += info.st_size if stat.S_ISREG(info.st_mode) else 0  # a sparse file is as long as it says
        if size > MAX_BYTES or len(found) > MAX_OPERATIONS:
            raise FaultError(f"the folder holds more than {MAX_BYTES >> 20} MB or {MAX_OPERATIONS} files: too much to "
                             "copy for every crash", hint="check the manager with a small model")
        entry = _read_entry(folder, path, nodes)
        if entry is not None:
            found.append(entry)
        if entry is not None and entry.kind == "directory":
            todo.extend(sorted(path.iterdir(), reverse=True))
    return tuple(found)


def _read_entry(folder: Path, path: Path, nodes: dict[tuple[int, int], int]) -> Entry | None:
    info = path.lstat()
    name = "" if path == folder else str(path.relative_to(folder))
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
    kind = kinds.get(stat.S_IFMT(info.st_mode))
    if kind is None:  # pipes and sockets hold nothing that a crash could lose
        return None
    node = nodes.setdefault((info.st_dev, info.st_ino), len(nodes))
    return Entry(path=name, kind=kind, node=node, mtime=info.st_mtime_ns,
                 data=path.read_bytes() if kind == "file" else b"",
                 target=os.readlink(path) if kind == "symlink" else "")


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "data": base64.b64encode(fields["data"]).decode()}


def _rich(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "data": base64.b64decode(fields["data"])}
