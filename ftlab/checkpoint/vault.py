"""Checkpoints in a storage: complete or absent, verified when they are read, set aside when they are damaged.

A checkpoint is a folder `step-0000000120-<tag>` with one file per shard, a manifest with their digests, and the marker
`COMMIT`, written last, which holds the manifest's own digest. A folder without a valid marker is no checkpoint. A
damaged one gets a file `DAMAGED` with the reason and is never used or counted again, and never deleted. Creating the
marker is conditional, and refused to a generation that was given up: see `fence`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from ftlab.checkpoint.digest import PIECE, combine, digest, digest_piece
from ftlab.checkpoint.fence import COMMIT, closed_by, commit_once, require_unfenced
from ftlab.checkpoint.manifest import Manifest, Shard
from ftlab.checkpoint.pace import Pace, at_once, step_back
from ftlab.checkpoint.reading import ShardReader
from ftlab.checkpoint.storage import Storage
from ftlab.checkpoint.tree import Packed
from ftlab.errors import CheckpointDamaged, CheckpointFenced, CheckpointTooNew, NoCheckpoint, StorageError

MANIFEST, DAMAGED = "manifest.json", "DAMAGED"
_NAME = re.compile(r"step-(\d{10})-([0-9a-z]+)")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint's folder, and what can be said of it without reading its tensors."""

    name: str
    step: int
    status: str  # "good", "damaged", "set aside" (it was found damaged), "incomplete", "too new", "unreadable"
    reason: str = ""
    manifest: Manifest | None = None

    @property
    def good(self) -> bool:
        """Whether it is complete, as far as is known."""
        return self.status == "good"


class Vault:
    """All checkpoints of one run."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    # ---- looking -------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """All checkpoints, the one that was committed last first: a run may have gone back to an earlier step."""
        names = [name for name in self.storage.folders() if _NAME.fullmatch(name)]
        found = [entry for name in names if (entry := self._look_again(name)) is not None]
        return sorted(found, key=lambda entry: (entry.manifest.created if entry.manifest else 0.0, entry.step),
                      reverse=True)

    def look(self, name: str) -> Entry:
        """One checkpoint, without reading its tensors: marker, manifest, and the sizes of its files."""
        files = self.storage.files(name)
        match = _NAME.fullmatch(name)
        step = int(match[1]) if match else -1
        if DAMAGED in files:
            reason = self.storage.read(name, DAMAGED).decode(errors="replace")
            return Entry(name=name, step=step, status="set aside", reason=reason)
        if not files.get(COMMIT):  # an empty marker: it was being written
            return Entry(name=name, step=step, status="incomplete", reason="its save was not finished")
        marker = self.storage.read(name, COMMIT)
        if closed := closed_by(marker):
            return Entry(name=name, step=step, status="incomplete", reason=f"its save was not finished: {closed}")
        try:
            manifest = self._read_manifest(name, files, marker)
        except CheckpointTooNew as error:
            return Entry(name=name, step=step, status="too new", reason=error.message)
        except CheckpointDamaged as error:
            return Entry(name=name, step=step, status="damaged", reason=error.message)
        return Entry(name=name, step=step, status="good", manifest=manifest)

    def _look_again(self, name: str) -> Entry | None:
        """Look, and look again if somebody removed it meanwhile; None if it is gone."""
        try:
            return self.look(name)
        except StorageError:
            return self.look(name) if self.storage.files(name) else None

    def find(self, which: int | str) -> Entry:
        """A checkpoint by its step or its folder's name; raises NoCheckpoint."""
        entries = self.entries()
        name = str(which).rstrip("/").rsplit("/", 1)[-1]
        found = [entry for entry in entries if entry.name == name or str(entry.step) == name]
        if not found:
            seen = ", ".join(str(entry.step) for entry in entries) or "the folder holds none"
            raise NoCheckpoint(f"there is no checkpoint {which} in {self.storage.url}", seen=f"steps: {seen}")
        return next((entry for entry in found if entry.good), found[0])

    def _read_manifest(self, name: str, files: dict[str, int], marker: bytes) -> Manifest:
        if MANIFEST not in files:
            raise CheckpointDamaged(f"{name} has no manifest")
        raw = self.storage.read(name, MANIFEST)
        if marker.decode(errors="replace").strip() != digest(raw):
            raise CheckpointDamaged(f"the manifest of {name} does not match its commit marker")
        manifest = Manifest.from_json(raw, name)
        for shard in manifest.shards:
            if files.get(shard.file) != shard.bytes:
                seen = f"has {files[shard.file]} bytes" if shard.file in files else "is missing"
                raise CheckpointDamaged(f"{name}/{shard.file} {seen}, {shard.bytes} were written")
        return manifest

    # ---- writing -------------------------------------------------------------------------------------------

    def write_shard(self, name: str, rank: int, data: memoryview, header_bytes: int, pace: Pace = at_once) -> Shard:
        """Write one rank's part; it is durable when this returns, and no checkpoint yet.

        The digest of a piece is taken by another thread while the piece is written.
        """
        digests: list[Future[bytes]] = []

        def digested(beside: Executor) -> Iterator[memoryview]:
            for start in range(0, len(data), PIECE):
                piece = data[start:start + PIECE]
                digests.append(beside.submit(digest_piece, [piece]))
                yield piece

        file = f"shard-{rank:05d}.bin"
        with ThreadPoolExecutor(1, "ftlab-digest", step_back) as beside:
            self.storage.write(name, file, pace(digested(beside)))
        return Shard(file=file, rank=rank, bytes=len(data), header_bytes=header_bytes,
                     digest=combine([each.result() for each in digests]))

    def commit(self, name: str, manifest: Manifest) -> None:
        """Make it a checkpoint: manifest first, marker last, each durable before the next.

        Raises CheckpointFenced, and it is none, if a later generation has taken over from its writer's.
        """
        before = max((entry.manifest.created for entry in self.entries() if entry.manifest), default=0.0)
        raw = replace(manifest, created=max(manifest.created, before + 0.001)).to_json()  # clocks may go back
        self.storage.write(name, MANIFEST, [raw])
        self.storage.sync(name)
        commit_once(self.storage, name, digest(raw).encode())
        self.storage.sync(name)
        self._require_data(name, manifest)

    def _require_data(self, name: str, manifest: Manifest) -> None:
        """A marker that stands alone is none: whoever took over removed the rest while we were stopped before it."""
        gone = {MANIFEST, *(shard.file for shard in manifest.shards)} - set(self.storage.files(name))
        if gone:
            self.remove(name)
            raise CheckpointFenced(f"{name} is not committed: somebody removed {', '.join(sorted(gone))}",
                                   hint="its node was given up, or two jobs keep their checkpoints in one folder")

    # ---- reading -------------------------------------------------------------------------------------------

    def read_shard(self, name: str, shard: Shard) -> Packed:
        """One rank's part, verified; raises CheckpointDamaged."""
        with self.storage.open(name, shard.file) as file:
            return ShardReader(file, shard, f"{name}/{shard.file}", self.storage.at_once).read()

    def verify(self, name: str) -> Entry:
        """Read all of a checkpoint and compare the digests; what can be said of it now."""
        entry = self.look(name)
        if entry.manifest is None:
            return entry
        try:
            for shard in entry.manifest.shards:
                with self.storage.open(name, shard.file) as file:
                    ShardReader(file, shard, f"{name}/{shard.file}").check()
        except CheckpointDamaged as error:
            return Entry(name=name, step=entry.step, status="damaged", reason=error.message)
        except StorageError as error:
            return Entry(name=name, step=entry.step, status="unreadable", reason=f"{error.message} ({error.seen})")
        return entry

    # ---- clearing up ---------------------------------------------------------------------------------------

    def set_aside(self, name: str, reason: str) -> bool:
        """Mark a checkpoint as damaged, so that nobody uses or counts it; whether that could be written."""
        try:
            if not self.storage.files(name):
                return False  # it was removed while somebody looked at it: nothing is left to mark
            self.storage.write(name, DAMAGED, [reason.encode()])
            self.storage.sync(name)
        except StorageError:
            return False
        return True

    def retain(self, keep: int, after: str = "", tell: Callable[[Entry], None] = lambda entry: None) -> list[str]:
        """Remove good checkpoints beyond the newest `keep`, and saves older than those that were never finished.

        What was just committed (`after`) tells for whom it acts: raises CheckpointFenced, and removes nothing more,
        when a later generation has taken over. Damaged ones are left alone, and told of.
        """
        require_unfenced(self.storage, after)
        entries = self.entries()
        for entry in entries:
            if entry.status == "damaged":
                tell(entry)
        good = [entry for entry in entries if entry.good]
        if not good:
            return []
        stale = [entry for entry in entries if entry.status == "incomplete" and entry.step < good[0].step]
        removed = [entry.name for entry in [*good[keep:], *stale]]
        for name in removed:
            require_unfenced(self.storage, after)  # it may have been stopped since it looked
            self.remove(name)
        return removed

    def remove(self, name: str) -> None:
        """Delete a checkpoint; its marker goes first."""
        self.storage.remove(name, first=COMMIT)


def folder_name(step: int, tag: str) -> str:
    """The folder of a checkpoint; `tag` tells apart two saves of one step."""
    return f"step-{step:010d}-{tag}"
