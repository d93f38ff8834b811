"""Checkpoint managers with one mistake each, and one without. Each keeps the state {"step", "weight"} in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def state(step: int) -> dict[str, Any]:
    return {"step": step, "weight": torch.full((300,), float(step))}


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RightManager:
    """Temporary file, fsync, replace, fsync of the directory."""

    name = "checkpoint.pt"

    def save(self, folder: Path, tree: dict[str, Any]) -> None:
        temporary = folder / f"{self.name}.tmp"
        torch.save(tree, temporary)
        sync(temporary)
        os.replace(temporary, folder / self.name)
        sync(folder)

    def load(self, folder: Path) -> Any:
        return torch.load(folder / self.name, weights_only=True)


class NoSync(RightManager):
    """Renames a file whose data was never synced."""

    def save(self, folder, tree):
        temporary = folder / f"{self.name}.tmp"
        torch.save(tree, temporary)
        os.replace(temporary, folder / self.name)
        sync(folder)


class NoDirectorySync(RightManager):
    """Never syncs the directory: the rename may be undone after save returned."""

    def save(self, folder, tree):
        temporary = folder / f"{self.name}.tmp"
        torch.save(tree, temporary)
        sync(temporary)
        os.replace(temporary, folder / self.name)


class InPlace(RightManager):
    """One file, overwritten in place."""

    def save(self, folder, tree):
        torch.save(tree, folder / self.name)
        sync(folder / self.name)
        sync(folder)


class Steps(RightManager):
    """One file per step; the newest one counts. Right as it stands."""

    def save(self, folder, tree):
        self.name = f"step-{tree['step']:06}.pt"
        super().save(folder, tree)

    def load(self, folder):
        return torch.load(max(folder.glob("step-*.pt")), weights_only=True)


class NoRename(Steps):
    """Writes under the final name, where load looks for the newest."""

    def save(self, folder, tree):
        path = folder / f"step-{tree['step']:06}.pt"
        torch.save(tree, path)
        sync(path)
        sync(folder)


class RetentionFirst(Steps):
    """Makes room by deleting the old one before the new one is there."""

    def save(self, folder, tree):
        for old in folder.glob("step-*.pt"):
            old.unlink()
        super().save(folder, tree)


class RetentionBeforeCommit(Steps):
    """Deletes the old one, in another directory, after the rename but before the new name is durable."""

    def save(self, folder, tree):
        old = list(folder.glob("*/step-*.pt"))
        inner = folder / str(tree["step"])
        inner.mkdir()
        sync(folder)
        path = inner / f"step-{tree['step']:06}.pt"
        torch.save(tree, path.with_suffix(".tmp"))
        sync(path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
        for each in old:
            each.unlink()
        for each in folder.iterdir():
            sync(each)

    def load(self, folder):
        return torch.load(max(folder.glob("*/step-*.pt")), weights_only=True)


class MarkerFirst(RightManager):
    """A marker names the newest file; it is durable before the file is."""

    def save(self, folder, tree):
        name = f"step-{tree['step']}.pt"
        temporary = folder / "latest.tmp"
        temporary.write_text(name)
        sync(temporary)
        os.replace(temporary, folder / "latest")
        sync(folder)
        torch.save(tree, folder / name)
        sync(folder / name)
        sync(folder)

    def load(self, folder):
        return torch.load(folder / (folder / "latest").read_text(), weights_only=True)


class MarkerBeforeSync(MarkerFirst):
    """The marker comes after the file, but before its data is synced."""

    def save(self, folder, tree):
        name = f"step-{tree['step']}.pt"
        torch.save(tree, folder / name)
        temporary = folder / "latest.tmp"
        temporary.write_text(name)
        sync(temporary)
        os.replace(temporary, folder / "latest")
        sync(folder)
        sync(folder / name)


WRONG: dict[type[RightManager], str] = {  # manager -> the mistake that has to be named
    NoSync: "rename-before-sync",
    NoDirectorySync: "entry-not-synced",
    InPlace: "in-place",
    NoRename: "final-name",
    RetentionFirst: "deleted-early",
    RetentionBeforeCommit: "deleted-early",
    MarkerFirst: "marker-first",
    MarkerBeforeSync: "marker-first",
}
