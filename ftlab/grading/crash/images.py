"""Crash images: which of the many possible disks are tried, and each of them as a real folder.

At every boundary between two operations a bounded set of choices is made: everything kept, nothing un-synced kept,
names without data, data without names, and each un-synced thing gone wrong alone. Equal images count once. A save of
many operations, files or bytes is looked at in some places only, those around new and changed names first: how long
that takes, and how much memory, is not for the save to say.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ftlab.cluster.temporary import remove
from ftlab.errors import FaultError
from ftlab.grading.crash.disk import VARIANTS, Choice, Disk
from ftlab.grading.crash.operations import ENTRIES, Operation, Recording

_MAX_SINGLE_WRITES = 8  # so many writes of a file are lost alone, spread evenly
_MAX_SINGLE_FILES = 24  # so many files go wrong alone, and so many entries of a directory are cut off at
_MAX_BOUNDARIES = 200
_MIN_BOUNDARIES = 16
_MAX_WORK = 4 << 30  # bytes to be put together, about, for all images
_MAX_LOOKS = 4_000_000  # at files, about, for all images
_MAX_MADE = 200_000  # files, about, of all images that are built
_PER_BOUNDARY = 20  # images, about


@dataclass(frozen=True)
class Image:
    """One disk after a crash: the machine died after `boundary` operations, and `choice` was lost."""

    boundary: int
    choice: Choice
    key: str  # equal for equal folders
    must_be_new: bool  # save had returned


class Images:
    """All images of one recording."""

    def __init__(self, recording: Recording) -> None:
        self.disk = Disk(recording)
        self.operations = recording.operations
        self._digest = cache(self._content_digest)
        self._returned = next((number for number, each in enumerate(self.operations) if each.kind == "returned"),
                              len(self.operations))

    def all(self) -> list[Image]:
        """Every image once, in the order in which the crashes could happen."""
        found: dict[tuple[str, bool], Image] = {}
        for k in self.boundaries():
            for choice in choices(self.disk, k):
                image = self.image(k, choice)
                found.setdefault((image.key, image.must_be_new), image)
        return list(found.values())

    def boundaries(self) -> list[int]:
        """Where the machine dies: everywhere, or in so many places that it can be done in a minute."""
        every = list(range(len(self.operations) + 1))
        images = min(_MAX_WORK // max(1, self.disk.size), _MAX_LOOKS // max(1, len(self.disk.kinds)))
        count = max(_MIN_BOUNDARIES, min(_MAX_BOUNDARIES, images // _PER_BOUNDARY))
        if len(every) <= count:
            return every
        turning = [k for k in every if k in (0, len(self.operations)) or _turns(self.operations, k)]
        chosen = set(spread(turning, count))
        return sorted(chosen | set(spread([k for k in every if k not in chosen], count - len(chosen))))

    @property
    def sampled(self) -> bool:
        """Whether some places were left out."""
        return len(self.boundaries()) <= len(self.operations)

    def affordable(self, limit: int) -> int:
        """How many images may be built: each is written as a whole."""
        most = min(_MAX_WORK // max(1, self.disk.size), _MAX_MADE // max(1, len(self.disk.kinds)))
        return min(limit, max(_MIN_BOUNDARIES, most))

    def image(self, k: int, choice: Choice) -> Image:
        """One image, with the key of its folder."""
        sha = hashlib.sha256()
        for path, node in self.disk.tree(k, choice).items():
            kind = self.disk.kinds.get(node, "file")
            inside = self._digest(*self.disk.state(node, k, choice)) if kind == "file" else self.disk.targets.get(node)
            sha.update(f"{kind}\0{path}\0{inside}\0\0".encode("utf-8", "surrogateescape"))
        return Image(k, choice, sha.hexdigest(), k > self._returned)

    def files(self, image: Image) -> list[tuple[str, int]]:
        """Path and size of every file; directories end with a slash."""
        found = []
        for path, node in self.disk.tree(image.boundary, image.choice).items():
            if self.disk.kinds.get(node, "file") == "directory":
                found.append((path + "/", 0))
            else:
                found.append((path, len(self.disk.file(node, image.boundary, image.choice))))
        return found

    def build(self, image: Image, folder: Path) -> None:
        """Make a folder look like an image, with the times that its files had."""
        if os.path.lexists(folder):
            remove(folder)
        folder.mkdir()
        tree, made = self.disk.tree(image.boundary, image.choice), dict[int, Path]()
        for path, node in tree.items():
            self._make(image, node, folder / path, made)
        for path, node in reversed(tree.items()):  # a folder's own time comes after what is in it
            if self.disk.kinds.get(node) != "symlink":
                time = self.disk.mtime(node, image.boundary)
                os.utime(folder / path, ns=(time, time))

    def check_complete(self, recording: Recording) -> None:
        """Raise FaultError when the operations do not explain what the save left: something went past the tracer."""
        whole = Choice()
        tree = self.disk.tree(len(self.operations), whole)
        ours = {path: self._summary(node, whole) for path, node in tree.items()}
        real = {each.path: (each.kind, each.data or each.target.encode()) for each in recording.after if each.path}
        for path in sorted({*ours, *real}):
            if ours.get(path) != real.get(path):
                raise FaultError(f"`{path}` was changed in a way that the recorder could not follow",
                                 hint="write with open().write, torch.save or os.write, not through mmap")

    def _make(self, image: Image, node: int, path: Path, made: dict[int, Path]) -> None:
        kind = self.disk.kinds.get(node, "file")
        if os.path.realpath(path.parent) != str(path.parent):  # student's links must not lead our writes elsewhere
            raise FaultError(f"`{path.name}` lies behind a symbolic link, which cannot be followed")
        if kind == "directory":
            path.mkdir()
        elif kind == "symlink":
            path.symlink_to(self.disk.targets[node])
        elif node in made:
            path.hardlink_to(made[node])
        else:
            path.write_bytes(self.disk.file(node, image.boundary, image.choice))
            made[node] = path

    def _summary(self, node: int, choice: Choice) -> tuple[str, bytes]:
        kind = self.disk.kinds.get(node, "file")
        if kind == "file":
            return kind, self.disk.file(node, len(self.operations), choice)
        return kind, self.disk.targets.get(node, "").encode()

    def _content_digest(self, node: int, seen: int, synced: int, variant: str) -> str:
        return hashlib.sha256(self.disk.content(node, seen, synced, variant)).hexdigest()


def choices(disk: Disk, k: int) -> Iterator[Choice]:
    """What may have been lost at one boundary, the most likely first."""
    files, folders = disk.unsynced_data(k), disk.unsynced_entries(k)
    no_names = {folder: numbers[0] for folder, numbers in folders.items()}
    yield Choice()
    for variant in VARIANTS:
        yield Choice(data=dict.fromkeys(files, variant))
    yield Choice(cuts=no_names)
    yield Choice(data=dict.fromkeys(files, "lost"), cuts=no_names)
    for file in spread(list(files), _MAX_SINGLE_FILES):
        numbers = files[file]
        for variant in (*VARIANTS, *(f"without {number}" for number in spread(numbers, _MAX_SINGLE_WRITES))):
            yield Choice(data={file: variant})
            yield Choice(data={file: variant}, cuts=no_names)
    for folder in spread(list(folders), _MAX_SINGLE_FILES):
        numbers = folders[folder]
        others = {other: first for other, first in no_names.items() if other != folder}
        for cut in [*spread(numbers[1:], _MAX_SINGLE_FILES), None]:
            own = {} if cut is None else {folder: cut}
            for data in ({}, dict.fromkeys(files, "lost")):
                yield Choice(data=data, cuts=own)
                yield Choice(data=data, cuts={**others, **own})
        yield Choice(cuts={folder: numbers[0]})


def select(images: list[Image], operations: Recording, limit: int) -> list[Image]:
    """At most `limit` images, always the same ones: those at turning points first, the others spread evenly."""
    if len(images) <= limit:
        return images
    turning = [number for number, each in enumerate(images) if _is_turning(each, operations)]
    chosen = set(spread(turning, limit))
    rest = [number for number in range(len(images)) if number not in chosen]
    chosen |= set(spread(rest, limit - len(chosen)))
    return [images[number] for number in sorted(chosen)]


def _is_turning(image: Image, recording: Recording) -> bool:
    """Whether the machine died just before or after something else than a write."""
    return _turns(recording.operations, image.boundary)


def _turns(operations: tuple[Operation, ...], k: int) -> bool:
    around = operations[max(0, k - 1):k + 1]
    return any(each.kind in ENTRIES or each.kind in ("returned", "truncate") for each in around)


def spread(items: list[int], count: int) -> list[int]:
    """At most `count` of the items, spread evenly, with the first and the last."""
    if len(items) <= count:
        return items
    if count <= 1:
        return items[:max(count, 0)]
    return [items[number * (len(items) - 1) // (count - 1)] for number in range(count)]
