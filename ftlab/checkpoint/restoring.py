"""From a checkpoint back into a live training state: read, verified, compared with what lives, and only then loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ftlab.checkpoint import tree
from ftlab.checkpoint.manifest import Manifest
from ftlab.checkpoint.rng import GENERATORS
from ftlab.checkpoint.state import TrainingState, differences
from ftlab.checkpoint.vault import Vault
from ftlab.errors import CheckpointDamaged, CheckpointMismatch


def restore(vault: Vault, name: str, training: TrainingState) -> Manifest:
    """Load a checkpoint; nothing is changed unless all of it was read and fits."""
    entry = vault.look(name)
    if entry.manifest is None:
        raise CheckpointDamaged(f"checkpoint {name} cannot be used: it is {entry.status}", seen=entry.reason)
    put([vault.read_shard(name, shard) for shard in entry.manifest.shards], training, name)
    return entry.manifest


def put(shards: Sequence[tree.Packed], training: TrainingState, name: str) -> None:
    """Put what was read and verified into the live state."""
    saved = _assemble(shards, training) if shards[0].pieces else tree.unpack(shards[0])
    try:
        check_fits(saved, training, name)
        wanted = [part for part in training.parts if part in saved["parts"]]
        training.restore({**saved, "parts": {part: saved["parts"][part] for part in wanted}})
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointDamaged(f"{name} does not hold a training state", seen=repr(error)[:300]) from None


def check_fits(saved: Mapping[str, Any], training: TrainingState, name: str) -> None:
    """Raise CheckpointMismatch, with names and shapes, if the checkpoint is of another model."""
    missing = sorted(training.parts.keys() - saved["parts"].keys() - {GENERATORS})
    lines = [f"{part}: here, not in the checkpoint" for part in missing]
    for part, module in training.parts.items():
        if isinstance(module, nn.Module) and part in saved["parts"]:
            lines += [f"{part}.{line}" for line in differences(_shapes(module.state_dict()),
                                                               _shapes(saved["parts"][part]))]
    if lines:
        raise CheckpointMismatch(f"checkpoint {name} is of another model (here: yours, there: the checkpoint's)",
                                 seen="\n        ".join([*lines[:12], *(["..."] if len(lines) > 12 else [])]),
                                 hint="build the model it was saved from, or choose another checkpoint")


def _assemble(shards: Sequence[tree.Packed], training: TrainingState) -> Any:
    from ftlab.checkpoint.resharding import assemble  # loads torch's DTensor, which takes a second

    return assemble(shards, training)


def _shapes(state: Mapping[str, Any]) -> list[list[Any]]:
    return [[name, list(value.shape), str(value.dtype)] for name, value in state.items()
            if isinstance(value, torch.Tensor)]
