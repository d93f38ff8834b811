"""From a checkpoint back into a live training state: read, verified, compared with what lives, and only then loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ftlab.checkpoint import tree
from ftlab.checkpoint.manifest import Manifest
from ftlab.checkpoint.rng import GENERATORS
from ftlab.checkpoint.state import TrainingState, differences
from ftlab.checkpoint.vault import Vault
from ftlab.errors import CheckpointDamaged, CheckpointMismatch


@dataclass(frozen=True)
class Reading:
    """A checkpoint that was read, verified, and found to fit; nothing is changed yet."""

    manifest: Manifest
    captured: dict[str, Any]


def restore(vault: Vault, name: str, training: TrainingState, rank: int = 0, *, refreeze: bool = False) -> Manifest:
    """Load a checkpoint; nothing is changed unless all of it was read and fits."""
    reading = read(vault, name, training, rank, refreeze=refreeze)
    training.restore(reading.captured)
    return reading.manifest


def read(vault: Vault, name: str, training: TrainingState, rank: int = 0, *, refreeze: bool = False) -> Reading:
    """Read what one rank needs of a checkpoint; raises CheckpointDamaged or CheckpointMismatch. With `refreeze` those
    parameters are frozen when it is loaded that were when it was saved, as a job needs it that goes on."""
    entry = vault.look(name)
    if entry.manifest is None:
        raise CheckpointDamaged(f"checkpoint {name} cannot be used: it is {entry.status}", seen=entry.reason)
    shards = entry.manifest.shards
    first = vault.read_shard(name, shards[0])
    own = None
    if first.pieces:
        parts = [first, *(vault.read_shard(name, shard) for shard in shards[1:])]
    else:  # the others hold what differs between ranks that have the same state
        parts = [first]
        own = vault.read_shard(name, shards[rank]) if 0 < rank < len(shards) else None
    return Reading(entry.manifest, _fit(parts, training, name, own, refreeze))


def put(shards: Sequence[tree.Packed], training: TrainingState, name: str, *, refreeze: bool = False) -> None:
    """Put what was read and verified into the live state."""
    training.restore(_fit(shards, training, name, None, refreeze))  # what a load_state_dict raises is no damage


def _fit(shards: Sequence[tree.Packed], training: TrainingState, name: str, own: tree.Packed | None,
         refreeze: bool) -> dict[str, Any]:
    """What was read, as a state can take it; `own` parts of this rank go before those of the first."""
    try:
        saved = _assemble(shards, training) if shards[0].pieces else tree.unpack(shards[0])
        parts = {**saved["parts"], **(tree.unpack(own)["parts"] if own else {})}
        frozen = {name: saved[name] for name in ("frozen", "groups") if refreeze and name in saved}
        check_fits({"grads": saved["grads"], "parts": parts, **frozen}, training, name)
        return {"step": int(saved["step"]), "grads": list(saved["grads"]),
                "parts": {part: parts[part] for part in training.parts if part in parts},
                "transient": saved.get("transient", {}), **frozen,
                **({"rider": saved["rider"]} if "rider" in saved else {})}
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"{name} does not hold a training state", seen=repr(error)[:300]) from None


def check_fits(saved: Mapping[str, Any], training: TrainingState, name: str) -> None:
    """Raise CheckpointMismatch, with names and shapes, if the checkpoint is of another model."""
    lines = [*_compare_parts(saved["parts"], training, "groups" in saved),
             *_compare_gradients(saved.get("grads"), _trained(saved, training))]
    if lines:
        raise CheckpointMismatch(f"checkpoint {name} is of another model (here: yours, there: the checkpoint's)",
                                 seen="\n        ".join([*lines[:12], *(["..."] if len(lines) > 12 else [])]),
                                 hint="build the model it was saved from, or choose another checkpoint")


def _compare_parts(saved: Mapping[str, Any], training: TrainingState, regroup: bool) -> Iterator[str]:
    for name, part in training.parts.items():
        if name not in saved:
            if name != GENERATORS:
                yield f"{name}: here, not in the checkpoint"
        elif isinstance(part, nn.Module):
            yield from (f"{name}.{line}" for line in differences(_shapes(part.state_dict()), _shapes(saved[name])))
        elif isinstance(part, torch.optim.Optimizer):
            here, there = ([len(group["params"]) for group in groups]
                           for groups in (part.param_groups, saved[name]["param_groups"]))
            if here != there and not regroup:
                yield f"{name}: groups of {here} parameters here, of {there} there"


def _trained(saved: Mapping[str, Any], training: TrainingState) -> list[nn.Parameter]:
    """The parameters that will be trained once the checkpoint is loaded."""
    if "frozen" not in saved:
        return training.parameters()
    return [each for index, each in enumerate(training.all_parameters()) if index not in saved["frozen"]]


def _compare_gradients(saved: Sequence[torch.Tensor | None] | None, trained: Sequence[nn.Parameter]) -> Iterator[str]:
    if saved is None:
        return
    here = [tuple(parameter.shape) for parameter in trained]
    if len(here) != len(saved):
        yield f"{len(here)} trained parameters here, {len(saved)} there"
        return
    for shape, grad in zip(here, saved, strict=True):
        if grad is not None and tuple(grad.shape) != shape:
            yield f"a gradient of {tuple(grad.shape)} for a parameter of {shape}"


def _assemble(shards: Sequence[tree.Packed], training: TrainingState) -> Any:
    from ftlab.checkpoint.resharding import assemble  # loads torch's DTensor, which takes a second

    return assemble(shards, training)


def _shapes(state: Mapping[str, Any]) -> list[list[Any]]:
    return [[name, list(value.shape), str(value.dtype)] for name, value in state.items()
            if isinstance(value, torch.Tensor)]
