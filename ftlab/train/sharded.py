"""Jobs whose state is spread over the ranks (FSDP2): nobody holds all of it, so a lost rank takes its part along.

The parts are built anew in each generation, on a mesh over its ranks. Their state comes from snapshots in memory: each
rank's own, and for a rank that is gone the replica that another node kept; all of one save, so that all are of one
step. Without a full set the newest good checkpoint is loaded, resharded if the world has changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ftlab.checkpoint import ranks
from ftlab.checkpoint.newest import load_first
from ftlab.checkpoint.restoring import put
from ftlab.checkpoint.state import TrainingState
from ftlab.errors import ConfigError, StateLost
from ftlab.train.ladder import Card, Ladder, Note, read_card

Build = Callable[[Any], Mapping[str, Any]]
_SAVE_IT = ("cluster.submit(train, checkpoint=CheckpointConfig(...)): then every rank keeps snapshots of its part, and "
            "another node a replica of them")


class ShardedParts(SimpleNamespace):
    """What `ctx.sharded(build)` returns: the parts of the present generation, as attributes."""


class ShardedJob:
    """Builds and restores the parts of a sharded job."""

    def __init__(self, build: Build, seed: int) -> None:
        self._build, self._seed = build, seed
        self.warned = False  # that nothing of it is saved
        self.parts = ShardedParts()

    def build(self, state: TrainingState, world: int) -> None:
        """New parts for a new world, at step 0."""
        from torch.distributed.device_mesh import init_device_mesh  # only sharded jobs need it

        torch.manual_seed(self._seed)
        built = dict(self._build(init_device_mesh("cpu", (world,))))
        if "model" not in built:
            raise ConfigError("build(mesh) must return a dict with a model in it",
                              hint='return {"model": model, "optimizer": optimizer}')
        state.rebuild(built)
        vars(self.parts).clear()
        vars(self.parts).update(built)

    def warn_unsaved(self, step: int) -> list[Note]:
        """Nobody else holds any rank's part, so the first node that is lost will end the job: say it, once."""
        if self.warned:
            return []
        self.warned, text = True, "sharded state has no copy on other ranks: losing one node will end this job"
        warnings.warn(f"{text}; {_SAVE_IT}", stacklevel=2)
        return [("state.unprotected", step, {"detail": text, "hint": _SAVE_IT})]

    def restore(self, state: TrainingState, ladder: Ladder, rank: int, world: int,
                trained: bool) -> tuple[str, list[Note]]:
        """Bring the new parts to the newest step that can be had; the rung, and what is to be noted."""
        everyone: list[list[Card]] = [[] for _ in range(world)]
        dist.all_gather_object(everyone, ladder.cards())
        chosen = choose_save(everyone)
        if chosen is None:
            return _load_storage(state, ladder, rank, trained)
        shards = _exchange(chosen, ladder, rank, world)
        put([read_card(chosen.cards[old], data) for old, data in shards], state, "the snapshot in memory")
        rung = "memory" if all(holder == old for old, holder in chosen.holders.items()) else "replica"
        return rung, [("checkpoint.recalled", chosen.step, {"rung": rung})] if rank == 0 else []


@dataclass(frozen=True)
class ChosenSave:
    """One save of which all shards are in memory somewhere."""

    step: int
    holders: dict[int, int]  # rank that saved → rank that has it now
    cards: dict[int, Card]  # by the rank that saved


def choose_save(everyone: Sequence[Sequence[Card]]) -> ChosenSave | None:
    """The newest save of which every shard is in somebody's memory; preferably each in its own rank's."""
    saves: dict[tuple[int, str], dict[int, tuple[int, Card]]] = {}
    for holder, cards in enumerate(everyone):
        for card in cards:
            found = saves.setdefault((int(card["step"]), str(card["tag"])), {})
            if card["rank"] not in found or holder == card["rank"]:
                found[card["rank"]] = (holder, card)
    whole = [key for key, found in saves.items() if len(found) == next(iter(found.values()))[1]["world"]]
    if not whole:
        return None
    found = saves[max(whole)]
    return ChosenSave(max(whole)[0], {old: holder for old, (holder, _) in sorted(found.items())},
                      {old: card for old, (_, card) in found.items()})


def _exchange(chosen: ChosenSave, ladder: Ladder, rank: int, world: int) -> list[tuple[int, memoryview]]:
    """The shards this rank needs: its own if the world is as large as it was, else all of them."""
    same = len(chosen.holders) == world
    needed: list[tuple[int, memoryview]] = []
    for old, holder in chosen.holders.items():
        card = chosen.cards[old]
        mine = ladder.slots[card["slot"]].view(card["bytes"]) if holder == rank else None
        if same and holder == old:
            data = mine
        else:  # a broadcast: unlike a receive, it is woken when the other side dies
            flat = torch.empty(card["bytes"], dtype=torch.uint8) if mine is None else torch.frombuffer(
                bytearray(mine), dtype=torch.uint8)
            dist.broadcast(flat, src=holder)
            data = memoryview(flat.numpy().data)
        if data is not None and (not same or old == rank):
            needed.append((old, data))
    return needed


def _load_storage(state: TrainingState, ladder: Ladder, rank: int, trained: bool) -> tuple[str, list[Note]]:
    """All ranks load the newest checkpoint that all of them find good."""
    if ladder.config is None:
        if trained:
            raise StateLost("a rank was lost, and with it the part of the state that only it held", hint=_SAVE_IT)
        return "initial", []
    notes: list[Note] = []
    entries = ranks.agree(ladder.good(notes) if rank == 0 else [])
    found = load_first(entries, lambda entry: ladder.read(entry, state, refreeze=False),
                       lambda entry, reason: notes.append(ladder.set_aside(entry, reason)) if rank == 0 else None,
                       ranks.gather)
    if found is not None:
        return "storage", [*notes, ("checkpoint.loaded", state.step, {"name": found.name})] if rank == 0 else []
    ladder.require_fresh(trained, notes)
    return "initial", notes
