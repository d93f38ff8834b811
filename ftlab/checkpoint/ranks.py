"""The few things ranks must agree on around a checkpoint; without a process group everything here is trivial."""

from __future__ import annotations

import socket
from typing import TypeVar

import torch.distributed as dist

from ftlab.checkpoint.storage import Storage
from ftlab.errors import StorageError

Value = TypeVar("Value")
_PROBE = "probe"


def here() -> tuple[int, int]:
    """This rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if _grouped() else (0, 1)


def agree(value: Value) -> Value:
    """Rank 0's value, on every rank."""
    if not _grouped() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def check_shared(storage: Storage, token: str) -> None:
    """Raise StorageError on all ranks if some do not see what rank 0 writes: a folder that is not really shared."""
    rank, world = here()
    folder = f"{_PROBE}-{token}"
    try:
        problem = "" if rank else _write_probe(storage, folder, token)
        dist.barrier()
        if not problem and rank and _PROBE not in storage.files(folder):
            problem = f"rank {rank} on {socket.gethostname()} does not see what rank 0 wrote"
    except StorageError as error:
        problem = f"rank {rank} on {socket.gethostname()}: {error.message} ({error.seen})"
    answers: list[str] = [""] * world
    dist.all_gather_object(answers, problem)
    if rank == 0 and not answers[0]:
        storage.remove(folder, first=_PROBE)
    if any(answers):
        raise StorageError(f"{storage.url} is not one storage for all {world} ranks",
                           seen="; ".join(answer for answer in answers if answer),
                           hint="use a folder that every node mounts, or an object store (s3://, gs://)")


def _write_probe(storage: Storage, folder: str, token: str) -> str:
    try:
        storage.write(folder, _PROBE, [token.encode()])
        storage.sync(folder)
    except StorageError as error:
        return f"rank 0 cannot write: {error.message} ({error.seen})"
    return ""


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()
