"""From an image that cannot be loaded to the mistake behind it.

First everything is put back on the disk that makes no difference, so that only the decisive loss is left. Then the
clock is turned back to the operation after which the same loss began to hurt. Loss and operation together name the
mistake: "data of X lost" and "X was renamed into place" is a sync that came too late, or never.
"""

from __future__ import annotations

from collections.abc import Callable

from ftlab.grading.crash.disk import Choice
from ftlab.grading.crash.images import Image, Images
from ftlab.grading.crash.operations import ENTRIES, Operation
from ftlab.grading.crash.result import Explanation

MISTAKES: dict[str, str] = {
    "rename-before-sync": "`{new}` was renamed into place before its data was synced: os.fsync(file) before os.replace",
    "folder-before-sync": "`{cause}` was renamed into place before the data of `{new}` in it was synced: os.fsync "
                          "every file in it (and the directory itself) before os.replace",
    "in-place": "`{new}` was overwritten in place, so a crash leaves neither the old nor the new state: write to a "
                "temporary file, os.fsync it, then os.replace it",
    "final-name": "`{new}` was written under its final name, so a crash leaves a part of it where load looks: write "
                  "to a temporary name, os.fsync it, then os.replace it",
    "marker-first": "`{cause}` was written before `{new}`, which it vouches for, was complete and synced: write the "
                    "data and os.fsync it first, the marker last",
    "deleted-early": "the old `{cause}` was deleted before the new state was durable: commit `{new}` first (write, "
                     "os.fsync, os.replace, os.fsync of the directory), delete old ones last",
    "entry-not-synced": "save returned, but the directory entry of `{new}` was never synced, so a crash may undo "
                        "it: os.fsync the directory after os.replace",
    "data-not-synced": "save returned, but the data of `{new}` was never synced, so a crash may lose it: "
                       "os.fsync(file) before save returns",
    "returned-early": "save returned before it had written everything (`{new}` came later): wait for the writing "
                      "thread or process before you return",
    "no-new-state": "nothing crashed, and yet load does not give a new state after save: did save return before its "
                    "thread had written it, or does load look elsewhere?",
    "unknown": "un-synced work reached the disk in another order than it was done: os.fsync what others depend on "
               "before you go on",
}

Fails = Callable[[Image], bool]


def explain(images: Images, image: Image, fails: Fails) -> tuple[Image, Explanation]:
    """The simplest image with the same fault, and the mistake; `fails` loads an image and judges it."""
    simple = simplify(images, image, fails)
    cause = exposing_operation(images, simple, fails)
    mistake, new = _classify(images, simple, cause, fails)
    return simple, Explanation(mistake, MISTAKES[mistake].format(new=new, cause=cause.path or "."))


def simplify(images: Images, image: Image, fails: Fails) -> Image:
    """Put back, one thing at a time, whatever was lost without making a difference."""
    for lost in [*image.choice.data, *image.choice.cuts]:
        data = {node: variant for node, variant in image.choice.data.items() if node != lost}
        cuts = {node: cut for node, cut in image.choice.cuts.items() if node != lost}
        less = images.image(image.boundary, Choice(data=data, cuts=cuts))
        if fails(less):
            image = less
    for folder in image.choice.cuts:  # of the entries that have to be lost, the last ones may be enough
        for cut in reversed(images.disk.unsynced_entries(image.boundary).get(folder, [])):
            less = images.image(image.boundary, Choice(image.choice.data, {**image.choice.cuts, folder: cut}))
            if fails(less):
                image = less
                break
    return image


def exposing_operation(images: Images, image: Image, fails: Fails) -> Operation:
    """The operation after which this loss began to hurt."""
    k = image.boundary
    while k > 0 and fails(images.image(k - 1, image.choice)):
        k -= 1
    return images.operations[max(0, k - 1)]


def what_was_lost(images: Images, image: Image) -> tuple[str, ...]:
    """The un-synced work that an image lacks, in words."""
    files = [f"{_VARIANT_WORDS.get(variant, 'one of the writes')} to `{_path(images, image.boundary, node)}`, "
             "which was not synced"
             for node, variant in image.choice.data.items()]
    entries = [f"{each}; the directory was not synced"
               for folder, numbers in images.disk.unsynced_entries(image.boundary).items()
               for each in (images.operations[number] for number in numbers
                            if number >= image.choice.cuts.get(folder, image.boundary))]
    return (*files, *entries)


_VARIANT_WORDS = {
    "lost": "all that was written", "emptied": "the bytes that were written (but it was cut)",
    "half": "the last half of what was written", "stale": "the blocks that were written (but it has its new size)",
    "front": "the second half of the blocks written", "back": "the first half of the blocks written",
}


def _classify(images: Images, image: Image, cause: Operation, fails: Fails) -> tuple[str, str]:
    """(mistake, the file it is about)."""
    choice, k = image.choice, image.boundary
    if cause.kind == "returned" and choice:
        if choice.cuts:
            return "entry-not-synced", images.operations[min(choice.cuts.values())].path
        return "data-not-synced", _path(images, k, next(iter(choice.data)))
    if choice.data:
        return _classify_data(images, k, next(iter(choice.data)), cause)
    if choice.cuts:
        lost = images.operations[min(choice.cuts.values())]
        return ("deleted-early" if cause.kind in ("unlink", "rmdir") else "marker-first"), lost.path
    return _classify_order(images, k, cause, fails)


def _classify_data(images: Images, k: int, file: int, cause: Operation) -> tuple[str, str]:
    """The bytes of one file were lost, and `cause` made that hurt."""
    path = _path(images, k, file)
    if cause.kind in ("unlink", "rmdir"):
        return "deleted-early", path
    if cause.kind in ("rename", "link") and cause.node == file:
        return "rename-before-sync", cause.path
    if cause.kind == "rename" and path.startswith(cause.path + "/"):
        return "folder-before-sync", path
    if cause.node == file:
        return ("in-place" if _was_there_before(images, file) else "final-name"), path
    return "marker-first" if cause.kind not in ("fsync", "sync") else "unknown", path


def _classify_order(images: Images, k: int, cause: Operation, fails: Fails) -> tuple[str, str]:
    """Nothing was lost: the operations themselves come in an order that has a gap."""
    heal = _healing_operation(images, k, fails)
    new = heal.path if heal else cause.path
    if cause.kind == "returned":
        return "returned-early", new
    if cause.kind in ("unlink", "rmdir"):
        return "deleted-early", new
    if cause.kind == "rename" and _was_there_before(images, cause.node):  # the old one was moved out of the way
        return "deleted-early", new
    if heal is None or heal.node == cause.node or cause.kind == "mkdir":
        return ("in-place" if _was_there_before(images, cause.node) else "final-name"), cause.path
    return "marker-first", new


def _healing_operation(images: Images, k: int, fails: Fails) -> Operation | None:
    """The operation that ends the gap, when no crash comes in between."""
    for later in range(k + 1, len(images.operations) + 1):
        if not fails(images.image(later, Choice())):
            return images.operations[later - 1]
    return None


def _was_there_before(images: Images, node: int) -> bool:
    return node in images.disk.tree(0, Choice()).values()


def _path(images: Images, k: int, node: int) -> str:
    """Where a file is, if all goes well; else where it was last seen."""
    names = [path for path, each in images.disk.tree(k, Choice()).items() if each == node]
    seen = [each.path for each in images.operations[:k] if each.node == node and each.kind in {*ENTRIES, "write"}]
    return (names or seen[::-1] or ["?"])[0]
