"""From system calls to operations: who did what to the folder.

Each handler is a generator: it looks around at the entry of a call, yields, gets the call's result, and records what
happened. Files are told apart by inode, so descriptors that were duplicated, inherited or opened before the save need
no bookkeeping. Written bytes are read back from the file itself, the same way for every kind of write.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Generator
from pathlib import Path

from ftlab.errors import FaultError
from ftlab.grading.crash.operations import MAX_BYTES, MAX_OPERATIONS, Entry, Operation
from ftlab.grading.crash.syscalls import Call
from ftlab.grading.crash.tracee import Tracee, as_int

Inode = tuple[int, int]  # (device, inode)
Handler = Generator[None, int, None]

_O_TMPFILE = 0o20000000  # without O_DIRECTORY, which differs between machines
_AT_REMOVEDIR, _RENAME_EXCHANGE = 0x200, 2
_RWF_SYNC = 0x2 | 0x4  # pwritev2: RWF_DSYNC, RWF_SYNC
_KEEP_SIZE, _PUNCH_HOLE, _ZERO_RANGE = 0x1, 0x2, 0x10
_PROT_WRITE, _MAP_SHARED_MASK = 0x2, 0x1  # MAP_SHARED and MAP_SHARED_VALIDATE
_CLONES = (0x40049409, 0x4020940D)  # FICLONE, FICLONERANGE


class Recorder:
    """Collects the operations on one folder; `nodes` numbers the inodes that `prepare` left in it, `before` is these.

    Every crash is replayed in the grader's memory: so a save may write, and make files grow, only so much, and that is
    looked at before any byte is read.
    """

    def __init__(self, folder: Path, nodes: dict[Inode, int], mark: Inode, before: tuple[Entry, ...] = ()) -> None:
        self._sizes = {each.node: len(each.data) for each in before}
        self.folder, self.nodes, self.mark = folder, nodes, mark  # a write to the pipe `mark` says: save returned
        self.operations: list[Operation] = []
        self._count, self._bytes = len(nodes), 0
        self._clean_outside: set[Inode] = set()  # files outside the folder that were synced after their last write

    def enter(self, thread: int, call: Call) -> Handler | None:
        """At the entry of a call: the handler to send its result to, or None when it is of no interest."""
        make: Callable[[Tracee, Call], Handler] | None = getattr(self, f"_{call.name}", None)
        if make is None:
            return None
        handler = make(Tracee(thread), call)
        return handler if _goes_on(handler.__next__) else None

    def leave(self, handler: Handler, result: int) -> None:
        """At the exit of a call."""
        _goes_on(lambda: handler.send(result))

    # ---- files ---------------------------------------------------------------------------------------------------

    def _openat(self, who: Tracee, call: Call) -> Handler:
        yield from self._open(who, who.file(call.args[0], call.args[1]), call.args[2])

    def _openat2(self, who: Tracee, call: Call) -> Handler:
        yield from self._open(who, who.file(call.args[0], call.args[1]), who.number(call.args[2]))

    def _open(self, who: Tracee, path: Path, flags: int) -> Handler:
        there = path.stat() if path.exists() else None
        result = yield
        if result < 0:
            return
        if flags & _O_TMPFILE:
            self._new_node(_inode(who.descriptor(result).stat()))
        elif there is None and flags & os.O_CREAT:
            self._entry_made("create", path, who.descriptor(result).stat())
        elif there is not None and flags & os.O_TRUNC and there.st_size:
            self._cut(who.descriptor(result).stat(), path, 0)

    def _mknodat(self, who: Tracee, call: Call) -> Handler:
        path = who.entry(call.args[0], call.args[1])
        result = yield
        if result == 0 and stat.S_ISREG(path.lstat().st_mode):
            self._entry_made("create", path, path.lstat())

    def _write(self, who: Tracee, call: Call) -> Handler:
        result = yield
        if result > 0:
            self._written(who, call.args[0], None, result)

    _writev = _write

    def _pwrite64(self, who: Tracee, call: Call) -> Handler:
        result = yield
        if result > 0:
            self._written(who, call.args[0], call.args[3], result)

    _pwritev = _pwrite64

    def _pwritev2(self, who: Tracee, call: Call) -> Handler:
        result = yield
        if result > 0:
            offset = None if call.args[3] == (1 << 64) - 1 else call.args[3]
            self._written(who, call.args[0], offset, result, synced=bool(call.args[5] & _RWF_SYNC))

    def _sendfile(self, who: Tracee, call: Call) -> Handler:
        yield from self._write(who, call)

    def _copy_file_range(self, who: Tracee, call: Call) -> Handler:
        result = yield
        if result > 0:  # the kernel has moved *offset to the end of what it wrote
            offset = who.number(call.args[3]) - result if call.args[3] else None
            self._written(who, call.args[2], offset, result)

    _splice = _copy_file_range

    def _truncate(self, who: Tracee, call: Call) -> Handler:
        path = who.file((1 << 64) - 100, call.args[0])
        result = yield
        if result == 0:
            self._cut(path.stat(), path, call.args[1])

    def _ftruncate(self, who: Tracee, call: Call) -> Handler:
        result = yield
        if result == 0:
            self._cut(who.descriptor(call.args[0]).stat(), _place(who, call.args[0]), call.args[1])

    def _fallocate(self, who: Tracee, call: Call) -> Handler:
        descriptor, mode, offset, length = call.args[:4]
        before = who.descriptor(descriptor).stat().st_size
        result = yield
        if result < 0:
            return
        info, end = who.descriptor(descriptor).stat(), offset + length
        if not mode & _KEEP_SIZE and end > before:
            self._cut(info, _place(who, descriptor), end)
        if mode & (_PUNCH_HOLE | _ZERO_RANGE) and min(end, info.st_size) > offset:
            self._written(who, descriptor, offset, min(end, info.st_size) - offset)

    # ---- names ---------------------------------------------------------------------------------------------------

    def _mkdirat(self, who: Tracee, call: Call) -> Handler:
        path = who.entry(call.args[0], call.args[1])
        result = yield
        if result == 0:
            self._entry_made("mkdir", path, path.lstat())

    def _symlinkat(self, who: Tracee, call: Call) -> Handler:
        target, path = who.text(call.args[0]), who.entry(call.args[1], call.args[2])
        result = yield
        if result == 0:
            self._entry_made("symlink", path, path.lstat(), target=target)

    def _linkat(self, who: Tracee, call: Call) -> Handler:
        path = who.entry(call.args[2], call.args[3])
        result = yield
        if result == 0:
            self._named(path)

    def _unlinkat(self, who: Tracee, call: Call) -> Handler:
        path = who.entry(call.args[0], call.args[1])
        node = self._node(path.lstat())
        result = yield
        if result == 0:
            self._gone(path, node, "rmdir" if call.args[2] & _AT_REMOVEDIR else "unlink")

    def _renameat2(self, who: Tracee, call: Call) -> Handler:
        source, target = who.entry(*call.args[:2]), who.entry(*call.args[2:4])
        node, other = self._node(source.lstat()), self._node(target.lstat()) if os.path.lexists(target) else None
        result = yield
        if result != 0 or (node is not None and node == other):  # two names of one file: rename does nothing
            return
        left, entered = self._node_of_folder(source), self._node_of_folder(target)
        if entered is not None and left is not None and node is not None:
            swapped = other if as_int(call.args[4]) & _RENAME_EXCHANGE and other is not None else -1
            self._add(kind="rename", node=node, path=self._name(target), parent=entered, name=target.name,
                      other=swapped, source=self._name(source), source_parent=left, source_name=source.name,
                      mtime=target.parent.stat().st_mtime_ns)
        elif entered is not None:
            self._named(target)
        elif left is not None:
            self._gone(source, node, "unlink")

    # ---- syncs, and what cannot be followed ------------------------------------------------------------------------

    def _fsync(self, who: Tracee, call: Call) -> Handler:
        info, place, covers = who.descriptor(call.args[0]).stat(), _place(who, call.args[0]), len(self.operations)
        result = yield
        node = self._node(info)
        if result == 0 and node is not None:
            self._add(kind="fsync", node=node, path=self._name(place), covers=covers)
        elif result == 0:
            self._clean_outside.add(_inode(info))

    def _sync(self, who: Tracee, call: Call) -> Handler:
        covers = len(self.operations)
        result = yield
        if result == 0:
            self._add(kind="sync", covers=covers)

    def _mmap(self, who: Tracee, call: Call) -> Handler:
        _, _, protection, flags, descriptor, _ = call.args
        if not (flags & _MAP_SHARED_MASK and protection & _PROT_WRITE) or as_int(descriptor) < 0:
            return
        if self._node(who.descriptor(descriptor).stat()) is not None:
            raise _cannot(f"save writes `{self._name(_place(who, descriptor))}` through shared memory (mmap)")
        yield

    def _ioctl(self, who: Tracee, call: Call) -> Handler:
        if call.args[1] & 0xFFFFFFFF in _CLONES and self._node(who.descriptor(call.args[0]).stat()) is not None:
            raise _cannot(f"save clones a file into `{self._name(_place(who, call.args[0]))}` (FICLONE)")
        return
        yield

    def _io_uring_setup(self, who: Tracee, call: Call) -> Handler:
        raise _cannot("save uses io_uring")
        yield

    _io_uring_enter = _io_uring_setup

    # ---- what the handlers share -----------------------------------------------------------------------------------

    def _written(self, who: Tracee, register: int, offset: int | None, count: int, *, synced: bool = False) -> None:
        info = who.descriptor(register).stat()
        if _inode(info) == self.mark:
            self._add(kind="returned")
            return
        self._clean_outside.discard(_inode(info))
        node = self._node(info)
        if node is None or not stat.S_ISREG(info.st_mode):
            return
        flags, place = who.flags(register), _place(who, register)
        if offset is None:
            offset = who.position(register) - count
        elif flags & os.O_APPEND:  # Linux appends, whatever offset was asked for
            offset = info.st_size - count
        self._take(node, count, offset + count)
        self._add(kind="write", node=node, path=self._name(place), offset=offset, mtime=info.st_mtime_ns,
                  data=_read_back(who.descriptor(register), offset, count))
        if synced or flags & os.O_DSYNC:
            self._add(kind="fsync", node=node, path=self._name(place), covers=len(self.operations))

    def _cut(self, info: os.stat_result, path: Path, size: int) -> None:
        node = self._node(info)
        if node is not None:
            self._take(node, 0, size)
            self._sizes[node] = size
            self._add(kind="truncate", node=node, path=self._name(path), size=size, mtime=info.st_mtime_ns)

    def _entry_made(self, kind: str, path: Path, info: os.stat_result, target: str = "") -> None:
        parent = self._node_of_folder(path)
        if parent is not None:
            self._add(kind=kind, node=self._new_node(_inode(info)), path=self._name(path), parent=parent,
                      name=path.name, target=target, mtime=path.parent.stat().st_mtime_ns)

    def _named(self, path: Path) -> None:
        """A file got a name in the folder; one that was written outside of it brings its bytes along."""
        parent, info = self._node_of_folder(path), path.lstat()
        if parent is None:
            return
        if self._node(info) is None and not stat.S_ISREG(info.st_mode):
            raise _cannot(f"save moves `{self._name(path)}` in from outside of its folder, and that is no plain file")
        if self._node(info) is None:
            node = self._new_node(_inode(info))
            self._take(node, info.st_size, info.st_size)
            self._add(kind="write", node=node, path=self._name(path), data=path.read_bytes(), mtime=info.st_mtime_ns)
            if _inode(info) in self._clean_outside:
                self._add(kind="fsync", node=node, path=self._name(path), covers=len(self.operations))
        self._add(kind="link", node=self.nodes[_inode(info)], path=self._name(path), parent=parent, name=path.name,
                  mtime=path.parent.stat().st_mtime_ns)

    def _gone(self, path: Path, node: int | None, kind: str) -> None:
        parent = self._node_of_folder(path)
        if parent is not None:
            self._add(kind=kind, node=-1 if node is None else node, path=self._name(path), parent=parent,
                      name=path.name, mtime=path.parent.stat().st_mtime_ns)

    def _add(self, **fields: object) -> None:
        if len(self.operations) >= MAX_OPERATIONS:
            raise FaultError(f"save did more than {MAX_OPERATIONS} operations: too many to replay for every crash",
                             hint="check the manager with a small model")
        self.operations.append(Operation(**fields))  # type: ignore[arg-type]

    def _take(self, node: int, count: int, end: int) -> None:
        """Note that a file is written to, or grows, up to `end`; the hole that it leaves has to be replayed as well."""
        before = self._sizes.get(node, 0)
        self._bytes += count + max(0, end - count - before)
        self._sizes[node] = max(before, end)
        if self._bytes > MAX_BYTES:
            raise FaultError(f"save wrote, or made files grow by, more than {MAX_BYTES >> 20} MB: too much to replay "
                             "for every crash", hint="check the manager with a small model")

    def _new_node(self, inode: Inode) -> int:
        self.nodes[inode], self._count = self._count, self._count + 1  # an inode number may have been used before
        return self.nodes[inode]

    def _node(self, info: os.stat_result) -> int | None:
        return self.nodes.get(_inode(info))

    def _node_of_folder(self, path: Path) -> int | None:
        """The node of the directory that holds a path; None when that lies outside of our folder."""
        return self._node(path.parent.stat()) if path != self.folder else None

    def _name(self, path: Path) -> str:
        text = str(path).removesuffix(" (deleted)")
        return "" if text == str(self.folder) else os.path.relpath(text, self.folder)


def _goes_on(step: Callable[[], object]) -> bool:
    """Whether a handler waits for the call's result; what vanished meanwhile is caught by the comparison at the end."""
    try:
        step()
        return True
    except (StopIteration, OSError):
        return False


def _inode(info: os.stat_result) -> Inode:
    return info.st_dev, info.st_ino


def _place(who: Tracee, register: int) -> Path:
    return Path(os.readlink(who.descriptor(register)))


def _read_back(file: Path, offset: int, count: int) -> bytes:
    with file.open("rb", buffering=0) as raw:
        return os.pread(raw.fileno(), count, offset)


def _cannot(what: str) -> FaultError:
    return FaultError(f"{what}: that cannot be followed, so no crash of it can be shown",
                      hint="write with open().write, torch.save or os.write")
