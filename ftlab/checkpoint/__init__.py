"""Checkpoints: training state in memory and in storage, complete or absent, verified before it is used.

    state      what must survive together            tree       a state taken apart into a header and tensors
    arena      the memory tier                       saving     one snapshot to storage; `writer` does it in a thread
    vault      checkpoints in a storage              storage    a folder, or anything that fsspec reaches
    manager    CheckpointManager                     distributed  DistributedCheckpointManager, the lab's form
    restoring  back into a live state                resharding   for another number of ranks
    interval   how often                             oldform    files of the old form
    fence      who may still commit                  newest     the newest good one, the damaged set aside
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftlab.checkpoint.distributed import DistributedCheckpointManager as DistributedCheckpointManager
    from ftlab.checkpoint.manager import CheckpointManager as CheckpointManager

_HOMES = {"CheckpointManager": "manager", "DistributedCheckpointManager": "distributed"}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """The managers, looked up when they are used: the parts below them do not need each other."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ftlab.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ftlab.checkpoint.{_HOMES[name]}"), name)
