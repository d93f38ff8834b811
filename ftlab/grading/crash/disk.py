"""What a disk may hold after a crash: the model, as pure functions of the recorded operations.

At any moment the disk holds, for certain, what was synced. Of the rest, a `Choice` says what made it. Contents of a
file are un-synced until an fsync of that file; an entry of a directory until an fsync of that directory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ftlab.grading.crash.operations import DATA, ENTRIES, ROOT, Operation, Recording

_KEPT_BYTES = 128 << 20  # of contents that are asked for again and again
_EVERYTHING = -2  # the node of a sync of all
VARIANTS = ("lost", "emptied", "half", "stale", "front", "back")  # what may become of a file's un-synced bytes


@dataclass(frozen=True)
class Choice:
    """What of the un-synced work did not reach the disk; what is not named here did."""

    data: Mapping[int, str] = field(default_factory=dict)  # file -> one of VARIANTS, or "without 7"
    cuts: Mapping[int, int] = field(default_factory=dict)  # directory -> its entries from this operation on are lost

    def __bool__(self) -> bool:
        return bool(self.data or self.cuts)


class Disk:
    """The disk at each boundary k: the machine died after k operations (after number k-1, before number k)."""

    def __init__(self, recording: Recording) -> None:
        self.operations = recording.operations
        self._base = {each.node: each for each in recording.before}
        self._names = [each for each in recording.before if each.path]
        self._paths = {each.path: each.node for each in recording.before}
        self.kinds = {each.node: each.kind for each in recording.before}
        self.targets = {each.node: each.target for each in recording.before}
        for each in recording.operations:
            if each.kind in ("mkdir", "symlink", "create"):
                self.kinds[each.node] = {"mkdir": "directory", "create": "file"}.get(each.kind, each.kind)
                self.targets[each.node] = each.target
        self._data_of: dict[int, list[int]] = {}
        for number, each in enumerate(recording.operations):
            if each.kind in DATA:
                self._data_of.setdefault(each.node, []).append(number)
        self._times, self._syncs = _times(recording.operations), _syncs(recording.operations)
        self._trees: dict[tuple[int, tuple[tuple[int, int], ...]], dict[str, int]] = {}
        self._contents: dict[tuple[int, int, int, str], bytes] = {}
        self._kept = 0

    @property
    def size(self) -> int:
        """At most so many bytes are in the folder of any image, and in a file's history."""
        return sum(len(each.data) for each in self._base.values()) + sum(
            len(each.data) + each.size for each in self.operations if each.kind in DATA)

    def unsynced_data(self, k: int) -> dict[int, list[int]]:
        """File -> the numbers of its un-synced writes and truncations."""
        found: dict[int, list[int]] = {}
        for number, each in enumerate(self.operations[:k]):
            if each.kind in DATA and number >= self.synced(each.node, k):
                found.setdefault(each.node, []).append(number)
        return found

    def unsynced_entries(self, k: int) -> dict[int, list[int]]:
        """Directory -> the numbers of its un-synced entry operations."""
        found: dict[int, list[int]] = {}
        for number, each in enumerate(self.operations[:k]):
            if each.kind in ENTRIES and number >= self.synced(each.parent, k):
                found.setdefault(each.parent, []).append(number)
        return found

    def tree(self, k: int, choice: Choice) -> dict[str, int]:
        """Path -> node of everything that can be reached."""
        key = (k, tuple(sorted(choice.cuts.items())))
        if key not in self._trees:
            if len(self._trees) > 64:
                self._trees.clear()
            self._trees[key] = self._tree(k, choice)
        return self._trees[key]

    def _tree(self, k: int, choice: Choice) -> dict[str, int]:
        entries: dict[int, dict[str, int]] = {}
        for old in self._names:
            folder, _, name = old.path.rpartition("/")
            entries.setdefault(self._paths[folder], {})[name] = old.node
        for number, each in enumerate(self.operations[:k]):
            if each.kind in ENTRIES and (number < choice.cuts.get(each.parent, k)
                                         or number < self.synced(each.parent, k)):
                self._apply(entries, each)
        return dict(_walk(entries, ROOT, ""))

    def state(self, node: int, k: int, choice: Choice) -> tuple[int, int, int, str]:
        """All that the content of a file depends on: the node, its writes so far, how many are durable, the variant."""
        numbers, durable = self._data_of.get(node, []), self.synced(node, k)
        seen = bisect_left(numbers, k)
        synced = min(seen, bisect_left(numbers, durable))
        return node, seen, synced, choice.data.get(node, "kept") if synced < seen else "kept"

    def file(self, node: int, k: int, choice: Choice) -> bytes:
        """What is in a file."""
        return self.content(*self.state(node, k, choice))

    def content(self, node: int, seen: int, durable: int, variant: str) -> bytes:
        """What is in a file of which so many writes were done, and so many are durable."""
        key = (node, seen, durable, variant)
        if key not in self._contents:
            found = self._content(*key)
            if self._kept + len(found) > _KEPT_BYTES:
                self._contents.clear()
                self._kept = 0
            self._contents[key] = found
            self._kept += len(found)
        return self._contents[key]

    def mtime(self, node: int, k: int) -> int:
        """When a node last changed; managers may look for the newest."""
        numbers, times = self._times.get(node, ([], []))
        last = bisect_left(numbers, k)
        return times[last - 1] if last else (self._base[node].mtime if node in self._base else 0)

    def _apply(self, entries: dict[int, dict[str, int]], each: Operation) -> None:
        here = entries.setdefault(each.parent, {})
        if each.kind in ("unlink", "rmdir"):
            here.pop(each.name, None)
            return
        there = entries.setdefault(each.source_parent, {})
        if each.kind == "rename" and there.get(each.source_name) == each.node:
            del there[each.source_name]
        if self.kinds.get(each.node) == "directory":  # a directory has one name only
            for names in entries.values():
                for name in [name for name, node in names.items() if node == each.node]:
                    del names[name]
        here[each.name] = each.node
        if each.other >= 0:
            there[each.source_name] = each.other

    def synced(self, node: int, k: int) -> int:
        """Operations on a node before this number are durable at boundary k."""
        durable = 0
        for each in (node, _EVERYTHING):
            numbers, covers = self._syncs.get(each, ([], []))
            last = bisect_left(numbers, k)
            durable = max(durable, covers[last - 1] if last else 0)
        return durable

    def _content(self, node: int, seen: int, durable: int, variant: str) -> bytes:
        base, numbers = self._base[node].data if node in self._base else b"", self._data_of.get(node, [])
        old = _fold(base, [self.operations[number] for number in numbers[:durable]])
        pending = {number: self.operations[number] for number in numbers[durable:seen]}
        if variant.startswith("without "):
            pending.pop(int(variant.removeprefix("without ")), None)
            variant = "kept"
        return _variant(old, list(pending.values()), variant)


def _variant(old: bytes, pending: list[Operation], variant: str) -> bytes:
    """A file whose content `old` is durable, and what became of the operations that are not."""
    new, stale = _fold(old, pending), _fold(old, pending, write_zeros=True)
    cut = any(each.kind == "truncate" for each in pending)
    if variant == "lost":
        return old
    if variant == "emptied":  # its size was changed, but no data came
        return _fold(old, [each for each in pending if each.kind == "truncate"])
    if variant == "half":  # it had not grown to its end
        low = len(old) if len(new) > len(old) and not cut else 0
        return new[:(low + len(new)) // 2]
    if variant == "stale":  # it has its size, but none of its new blocks: zeros, or what was there before
        return stale
    middle = _middle(pending)
    if variant == "front":
        return new[:middle] + stale[middle:]
    return stale[:middle] + new[middle:] if variant == "back" else new


def _fold(base: bytes, operations: list[Operation], *, write_zeros: bool = False) -> bytes:
    """Apply writes and truncations; with `write_zeros`, a write extends the file but brings no bytes."""
    content = bytearray(base)
    for each in operations:
        if each.kind == "truncate":
            del content[each.size:]
            content.extend(bytes(each.size - len(content)))
            continue
        end = each.offset + len(each.data)
        content.extend(bytes(max(0, end - len(content))))
        if not write_zeros:
            content[each.offset:end] = each.data
    return bytes(content)


def _times(operations: tuple[Operation, ...]) -> dict[int, tuple[list[int], list[int]]]:
    """Node -> the numbers of the operations that changed it, and when each was."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for number, each in enumerate(operations):
        if each.kind in DATA or each.kind in ENTRIES:
            numbers, times = found.setdefault(each.node if each.kind in DATA else each.parent, ([], []))
            numbers.append(number)
            times.append(each.mtime)
    return found


def _syncs(operations: tuple[Operation, ...]) -> dict[int, tuple[list[int], list[int]]]:
    """Node, or everything -> the numbers of its syncs, and what is durable after each."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for number, each in enumerate(operations):
        if each.kind in ("fsync", "sync"):
            numbers, covers = found.setdefault(each.node if each.kind == "fsync" else _EVERYTHING, ([], []))
            numbers.append(number)
            covers.append(max(each.covers, covers[-1] if covers else 0))
    return found


def _middle(pending: list[Operation]) -> int:
    """The middle of the part that un-synced writes touch."""
    writes = [each for each in pending if each.kind == "write"]
    low = min((each.offset for each in writes), default=0)
    return (low + max((each.offset + len(each.data) for each in writes), default=0)) // 2


def _walk(entries: Mapping[int, Mapping[str, int]], folder: int, prefix: str) -> Iterator[tuple[str, int]]:
    for name, node in sorted(entries.get(folder, {}).items()):
        yield prefix + name, node
        yield from _walk(entries, node, f"{prefix}{name}/")
