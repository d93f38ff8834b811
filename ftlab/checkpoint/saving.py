"""The persistent tier's work: one snapshot in, one checkpoint out; done by a thread, or by the node's agent.

Every rank writes its own shard. The rank that commits waits for the others' shards, which show in the storage itself,
so no collective runs behind the training loop's back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ftlab.checkpoint.fence import require_unfenced
from ftlab.checkpoint.manifest import Manifest, Shard
from ftlab.checkpoint.newest import Damage
from ftlab.checkpoint.pace import Pace, at_once
from ftlab.checkpoint.vault import Vault, folder_name
from ftlab.errors import CheckpointError, CheckpointFenced, StorageError

log = logging.getLogger(__name__)
_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """What to write and what to call it."""

    step: int
    tag: str  # the same on all ranks of one save
    bytes: int
    header_bytes: int
    rank: int = 0
    world: int = 1  # shards the checkpoint will have
    epoch: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    taken: float = 0.0  # when the snapshot was taken, on the monotonic clock
    generation: int = 0  # of the ranks that save together

    @property
    def name(self) -> str:
        """The checkpoint's folder."""
        return folder_name(self.step, self.tag)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)


def persist(vault: Vault, order: SaveOrder, data: memoryview, *, timeout_s: float,
            over: Callable[[], bool] = lambda: False, given_up: Callable[[], bool] = lambda: False,
            pace: Pace = at_once) -> None:
    """Write a snapshot, and commit it if this rank is the one that commits.

    `over` tells that the ranks which save together are not all there any more: waiting for their shards is in vain.
    `given_up` tells that this node was told to start over: what it holds is of a world that has moved on.
    """
    try:
        shards = _write(vault, order, data[:order.bytes], time.monotonic() + timeout_s, over, pace)
        if given_up():
            raise CheckpointFenced(f"{order.name} is not committed: this node was given up, and starts over")
        if order.rank == 0:
            _commit(vault, order, shards)
    except Exception as error:
        if order.world == 1:
            _clear_up(vault, order.name)
        if isinstance(error, StorageError):  # perhaps because whoever took over has removed the attempt
            with contextlib.suppress(StorageError):
                require_unfenced(vault.storage, order.name)
        raise


def _write(vault: Vault, order: SaveOrder, data: memoryview, deadline: float, over: Callable[[], bool],
           pace: Pace) -> list[Shard]:
    """Write this rank's shard; all shards, for the rank that commits."""
    shard = vault.write_shard(order.name, order.rank, data, order.header_bytes, pace)
    if order.rank != 0:
        vault.storage.write(order.name, _card(order.rank), [json.dumps(asdict(shard)).encode()])
        vault.storage.sync(order.name)
        return [shard]
    return [shard, *_others(vault, order, deadline, over)]


def _commit(vault: Vault, order: SaveOrder, shards: list[Shard]) -> None:
    vault.commit(order.name, Manifest(step=order.step, world=order.world, shards=tuple(shards), epoch=order.epoch,
                                      metrics=dict(order.metrics), created=time.time(), writer="ftlab"))


def _clear_up(vault: Vault, name: str) -> None:
    """What a failed save left must not take the room that the next one needs."""
    with contextlib.suppress(StorageError):
        if not vault.look(name).good:
            vault.remove(name)


def retire(vault: Vault, keep: int, after: str = "", tell: Callable[[Damage], None] = lambda damage: None) -> list[str]:
    """After a commit: remove what is not to be kept; the names. That it cannot be removed is no failure of the save,
    and for a node that was given up meanwhile nothing is removed. Damage that shows on the way is set aside."""
    try:
        return vault.retain(keep, after, lambda entry: tell(Damage.mark(vault, entry, entry.reason)))
    except (StorageError, CheckpointFenced) as error:
        log.warning("old checkpoints could not be removed: %s", error)
        return []


def await_commit(vault: Vault, name: str, timeout_s: float) -> None:
    """Block until somebody else's checkpoint is there; raises StorageError when it does not come."""
    deadline = time.monotonic() + timeout_s
    while not vault.look(name).good:
        if time.monotonic() > deadline:
            raise StorageError(f"checkpoint {name} is not in {vault.storage.url} after {timeout_s:g} s",
                               hint="is the folder shared by all nodes? the writer may also have failed: see its error")
        time.sleep(_LOOK_S)


def _others(vault: Vault, order: SaveOrder, deadline: float, over: Callable[[], bool]) -> list[Shard]:
    """The shards of the other ranks, once all are there."""
    wanted, found = {_card(rank) for rank in range(1, order.world)}, dict[str, Shard]()
    while missing := sorted(wanted - set(found)):
        if news := _read_cards(vault, order.name, missing):
            found |= news
            continue
        if time.monotonic() > deadline or over():
            raise CheckpointError(f"{order.name} has {order.world - len(missing)} of {order.world} shards: "
                                  f"{', '.join(missing)} did not come", hint="a rank died, or the folder is not shared")
        time.sleep(_LOOK_S)
    return [found[card] for card in sorted(found)]


def _read_cards(vault: Vault, name: str, wanted: list[str]) -> dict[str, Shard]:
    """The cards that are there; one that is just being written is not there yet."""
    found = {}
    for card in set(wanted) & set(vault.storage.files(name)):
        with contextlib.suppress(ValueError, TypeError):
            found[card] = Shard(**json.loads(vault.storage.read(name, card)))
    return found


def _card(rank: int) -> str:
    return f"shard-{rank:05d}.json"
