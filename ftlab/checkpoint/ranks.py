"""The few things ranks must agree on around a checkpoint; without a process group everything here is trivial."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import zlib
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ftlab.checkpoint.storage import Storage, open_storage
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


def agree_on(flag: bool) -> bool:
    """Rank 0's answer to a question that is asked in every step: a single number, not a pickle."""
    if not _grouped() or dist.get_world_size() == 1:
        return flag
    answer = torch.tensor([int(flag)])
    dist.broadcast(answer, src=0)
    return bool(answer.item())


def gather(value: Value) -> list[Value]:
    """Every rank's value."""
    if not _grouped() or dist.get_world_size() == 1:
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_different(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's value, if they differ; nothing if all are the same, which costs one small collective."""
    if not _grouped() or dist.get_world_size() == 1:
        return []
    mine = torch.tensor([zlib.crc32(json.dumps(value, sort_keys=True).encode())])
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    if len({int(row) for row in rows}) == 1:
        return []
    values: list[dict[str, Any]] = [{}] * len(rows)
    dist.all_gather_object(values, value)
    return values


def open_shared(url: str) -> Storage:
    """The storage, opened by all ranks; raises StorageError on all of them if it is not one and the same for all."""
    if here()[1] == 1:
        return open_storage(url)
    storage, problem = None, ""
    try:
        storage = open_storage(url)
    except StorageError as error:
        problem = _explain(error)
    _raise_together(url, problem)
    assert storage is not None
    check_shared(storage, agree(secrets.token_hex(4)))
    return storage


def check_shared(storage: Storage, token: str) -> None:
    """Raise StorageError on all ranks if some do not see what rank 0 writes: a folder that is not really shared."""
    rank, folder = here()[0], f"{_PROBE}-{token}"
    problem = "" if rank else _write_probe(storage, folder, token)
    dist.barrier()
    try:
        if not problem and rank and _PROBE not in storage.files(folder):
            problem = f"rank {rank} on {socket.gethostname()} does not see what rank 0 wrote"
    except StorageError as error:
        problem = _explain(error)
    try:
        _raise_together(storage.url, problem)
    finally:
        if rank == 0:
            with contextlib.suppress(StorageError):
                storage.remove(folder, first=_PROBE)


def _raise_together(url: str, problem: str) -> None:
    answers = [""] * here()[1]
    dist.all_gather_object(answers, problem)
    if any(answers):
        raise StorageError(f"{url} cannot be used by all {len(answers)} ranks as one storage",
                           seen="; ".join(answer for answer in answers if answer),
                           hint="use a folder that every node mounts, or an object store (s3://, gs://)")


def _explain(error: StorageError) -> str:
    return f"rank {here()[0]} on {socket.gethostname()}: {error.message} ({error.seen})"


def _write_probe(storage: Storage, folder: str, token: str) -> str:
    try:
        storage.write(folder, _PROBE, [token.encode()])
        storage.sync(folder)
    except StorageError as error:
        return _explain(error)
    return ""


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()
