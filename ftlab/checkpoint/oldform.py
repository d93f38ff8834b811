"""Files of the old form: `checkpoint_epoch_N.pt` with `epoch, model_state_dict, optimizer_state_dict, loss`.

Read with `weights_only`, written complete or not at all (a temporary file, fsync, rename, fsync of the folder). They
hold no digest, no random numbers and no position in the data: they resume at an epoch, not in the middle of one.
"""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftlab.checkpoint.restoring import check_fits
from ftlab.checkpoint.state import TrainingState
from ftlab.errors import CheckpointDamaged, NoCheckpoint

_NAME = re.compile(r"checkpoint_epoch_(\d+)\.pt")
_KEYS = ("epoch", "model_state_dict", "optimizer_state_dict")


def old_files(folder: Path) -> list[Path]:
    """The files of the old form in a folder, the newest epoch first."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(_NAME.fullmatch(path.name)[1]), reverse=True)  # type: ignore[index]


def write_old(path: Path, *, epoch: int | None, model: Any, optimizer: Any, loss: float | None) -> None:
    """Write a file of the old form from two state dicts."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            torch.save({"epoch": epoch, "model_state_dict": model, "optimizer_state_dict": optimizer, "loss": loss},
                       file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def load_old(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Load a file of the old form into a model and an optimizer; its epoch and loss."""
    saved = _read(path)
    parts: dict[str, Any] = {"model": model}
    check_fits({"parts": {"model": saved["model_state_dict"]}}, TrainingState.of(parts, 0), path.name)
    model.load_state_dict(saved["model_state_dict"])
    if optimizer is not None:
        optimizer.load_state_dict(saved["optimizer_state_dict"])
    return {"epoch": saved["epoch"], "loss": saved.get("loss")}


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise NoCheckpoint(f"there is no file {path}")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointDamaged(f"{path} cannot be read", seen=str(error)[:300],
                                hint="it is cut off, or holds something other than tensors and plain values") from None
    missing = [key for key in _KEYS if not isinstance(saved, dict) or key not in saved]
    if missing:
        raise CheckpointDamaged(f"{path} is no checkpoint of the old form: {', '.join(missing)} is missing")
    return dict(saved)
