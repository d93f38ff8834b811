"""The checkpoint manager of the lab: one call per epoch, in one process, under DDP, or under FSDP2.

    manager = DistributedCheckpointManager("checkpoints", keep_last_n=3)
    found = manager.load_checkpoint(model, optimizer)          # None: start from scratch
    for epoch in range(found.epoch + 1 if found else 0, epochs):
        ...
        manager.save_checkpoint(model, optimizer, epoch, {"loss": loss})

Under DDP one rank writes and the others wait for it, with a deadline. Under FSDP2 every rank writes its own shard.
All ranks call the same methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftlab.checkpoint import ranks
from ftlab.checkpoint.manager import CheckpointManager
from ftlab.checkpoint.oldform import load_old, old_files, write_old
from ftlab.checkpoint.state import TrainingState
from ftlab.errors import ConfigError, StorageError


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint said beside the state."""

    epoch: int
    path: str
    metrics: dict[str, float] = field(default_factory=dict)


class DistributedCheckpointManager:
    """Saves once per epoch and keeps the last few; see the module's example."""

    def __init__(self, checkpoint_dir: str | Path = "", keep_last_n: int = 3, *, old_form: bool = False,
                 timeout_s: float = 60.0) -> None:
        self.manager = CheckpointManager(str(checkpoint_dir), every=1, keep_last_n=keep_last_n, timeout_s=timeout_s)
        self.keep_last_n, self.old_form = keep_last_n, old_form
        self._folder = Path(self.manager.vault.storage.url)
        if old_form and "://" in self.manager.vault.storage.url:
            raise ConfigError("files of the old form can only be written to a folder, not to a URL")

    def save_checkpoint(self, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int,
                        metrics: Mapping[str, float] | None = None) -> str:
        """Save at the end of an epoch; the checkpoint's path. Returns when it is durable, raises when it cannot be."""
        if self.old_form:
            return self._save_old(model, optimizer, epoch, metrics or {})
        name = self.manager.save({"model": model, "optimizer": optimizer}, epoch, epoch=epoch, metrics=metrics,
                                 wait=True)
        return f"{self.manager.vault.storage.url}/{name}"

    def load_checkpoint(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None,
                        checkpoint_path: str | Path | None = None) -> Loaded | None:
        """Load the newest good checkpoint, or the one at a path; None if there is none to load."""
        state = {"model": model, **({"optimizer": optimizer} if optimizer is not None else {})}
        if checkpoint_path is not None and str(checkpoint_path).endswith(".pt"):
            return self._load_old(Path(checkpoint_path), model, optimizer)
        if checkpoint_path is not None:
            manifest = self.manager.load(state, str(checkpoint_path))
        elif (newest := self.manager.load_latest(state)) is not None:
            manifest = newest
        else:
            old = old_files(self._folder)
            return self._load_old(old[0], model, optimizer) if old else None
        path = str(checkpoint_path or self.manager.vault.find(manifest.step).name)
        return Loaded(manifest.step if manifest.epoch is None else manifest.epoch, path, manifest.metrics)

    def cleanup_old_checkpoints(self) -> list[str]:
        """Remove all but the newest `keep_last_n` good ones, and what unfinished saves left; their names."""
        if ranks.here()[0] != 0:
            return []
        removed = self.manager.vault.retain(self.keep_last_n)
        for path in old_files(self._folder)[self.keep_last_n:]:
            path.unlink()
            removed.append(path.name)
        return removed

    def _save_old(self, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int,
                  metrics: Mapping[str, float]) -> str:
        path = self._folder / f"checkpoint_epoch_{epoch}.pt"
        parts: dict[str, Any] = TrainingState.of({"model": model, "optimizer": optimizer}, epoch).parts
        problem = None
        if ranks.here()[0] == 0:
            try:
                write_old(path, epoch=epoch, model=parts["model"].state_dict(),
                          optimizer=parts["optimizer"].state_dict(), loss=metrics.get("loss"))
                self.cleanup_old_checkpoints()
            except OSError as error:
                problem = str(error)
        problem = ranks.agree(problem)
        if problem:
            raise StorageError(f"cannot write {path}", seen=problem)
        return str(path)

    def _load_old(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Loaded:
        bare = TrainingState.of({"model": model}, 0).parts["model"]
        found = load_old(path, bare, optimizer)
        loss = found["loss"]
        return Loaded(int(found["epoch"] or 0), str(path), {"loss": float(loss)} if loss is not None else {})
