"""The memory tier: two slots of shared memory into which a training state is copied, in turn.

Filling a slot is all that the training loop waits for: one memory copy. What happens to the snapshot then (it is
written to storage, or sent to another node) is done behind the loop's back, by a thread or by the node's agent, which
has mapped the same memory and so still holds the snapshot when the worker is killed. The memory has no name and goes
with the last process that holds it.

The kernel takes many times longer to give memory than the copy into it takes, so `make_room` asks for it as soon as the
size of the state is known, behind the loop's back, and not when the first snapshot is due.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ftlab.checkpoint.pace import step_back
from ftlab.checkpoint.tree import Packed
from ftlab.errors import ConfigError

_ALIGN = 64
_CARD = 4 * mmap.PAGESIZE  # bytes in front of the snapshot
_CHUNK = 8 << 20  # bytes that one thread copies at a time
_TWO_THREADS = 16 << 20  # states smaller than this are copied by one thread
_WORTH_A_THREAD = 1 << 20  # smaller snapshots get their memory when they are taken
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


@dataclass(frozen=True)
class Filled:
    """What a slot holds: tensors first, then the header."""

    bytes: int
    header_bytes: int


class Slot:
    """One snapshot's memory; grows when the state does.

    The first page is the slot's card: what the snapshot is, written once its digest is known and wiped before the
    memory is filled again. A slot without a card holds nothing that may be used.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _anonymous_file() if fd is None else fd
        if os.fstat(self.fd).st_size < _CARD:
            os.ftruncate(self.fd, _CARD)
        self._card = mmap.mmap(self.fd, _CARD, flags=mmap.MAP_SHARED)
        self._memory: mmap.mmap | None = None
        self._layout: tuple[int, ...] = ()
        self._views: list[torch.Tensor] = []
        self._lock = threading.Lock()  # held by whoever fills it or gets its memory

    def prepare(self, size: int) -> None:
        """Get memory for a snapshot of this size, now."""
        with self._lock:
            if self.fd >= 0:
                self._reserve(size, ())

    def fill(self, packed: Packed) -> Filled:
        """Copy a state into the slot."""
        with self._lock:
            self.wipe()
            sizes = tuple(tensor.numel() * tensor.element_size() for tensor in packed.tensors)
            data = sum(aligned(size) for size in sizes)
            self._reserve(data + len(packed.header), sizes)
            _copy(packed.tensors, self._views)
            self.view(data + len(packed.header))[data:] = packed.header
            return Filled(data + len(packed.header), len(packed.header))

    def reserve(self, size: int) -> memoryview:
        """Room for a snapshot that comes from elsewhere."""
        self.wipe()
        self._reserve(size, ())
        return self.view(size)

    def view(self, size: int) -> memoryview:
        """The snapshot's bytes; for whoever has mapped the same memory, too."""
        if self._memory is None or len(self._memory) < _CARD + size:
            self._memory = mmap.mmap(self.fd, os.fstat(self.fd).st_size, flags=mmap.MAP_SHARED)
        return memoryview(self._memory)[_CARD:_CARD + size]

    def label(self, card: Mapping[str, Any]) -> None:
        """Say what the slot holds, now that it is complete."""
        raw = json.dumps(card).encode()
        if len(raw) > _CARD - 8:
            raise ConfigError(f"a snapshot's card of {len(raw)} bytes does not fit: are there many metrics?")
        self._card[8:8 + len(raw)] = raw
        self._card[0:8] = len(raw).to_bytes(8, "little")

    def card(self) -> dict[str, Any] | None:
        """What the slot holds, if it is complete."""
        size = int.from_bytes(self._card[0:8], "little")
        return dict(json.loads(self._card[8:8 + size])) if size else None

    def wipe(self) -> None:
        """What the slot held must not be used any more."""
        self._card[0:8] = bytes(8)

    def close(self) -> None:
        """Let go of the memory; may be called twice."""
        with self._lock:
            self._views, self._memory = [], None  # unmapped with the last view of it
            if self.fd >= 0:
                self._card.close()
                os.close(self.fd)
                self.fd = -1

    def _reserve(self, size: int, sizes: tuple[int, ...]) -> None:
        if self._memory is None or len(self._memory) < _CARD + size:
            room = _CARD + -(-size * 9 // 8 // mmap.PAGESIZE) * mmap.PAGESIZE  # headers grow a little
            os.ftruncate(self.fd, room)
            self._views, self._layout = [], ()
            self._memory = mmap.mmap(self.fd, room, flags=mmap.MAP_SHARED | _POPULATE)
        if self._layout != sizes:
            whole = torch.frombuffer(self._memory, dtype=torch.uint8, offset=_CARD)
            self._views, self._layout = [whole[start:start + size] for start, size in _offsets(sizes)], sizes


def make_room(slots: Sequence[Slot], packed: Packed) -> None:
    """Have a thread get the slots' memory for snapshots like this one; who fills one before waits for it."""
    size = sum(aligned(tensor.numel() * tensor.element_size()) for tensor in packed.tensors) + len(packed.header)

    def prepare() -> None:
        step_back()
        for slot in slots:
            slot.prepare(size)

    if size >= _WORTH_A_THREAD:
        threading.Thread(target=prepare, name="ftlab-room", daemon=True).start()


def _offsets(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for size in sizes:
        yield start, size
        start += aligned(size)


def aligned(size: int) -> int:
    """The room a tensor of so many bytes takes."""
    return -(-size // _ALIGN) * _ALIGN


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("ftlab-arena")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _copy(tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
    """Copy tensors into views of bytes; large states with two threads (copying does not hold the GIL)."""
    jobs = [job for tensor, view in zip(tensors, views, strict=True) for job in _pieces(tensor, view)]
    if sum(view.numel() for view in views) < _TWO_THREADS:
        return _work(iter(jobs))
    queue = _Shared(jobs)
    with ThreadPoolExecutor(1, thread_name_prefix="ftlab-copy") as helper:
        other = helper.submit(_work, queue)
        _work(queue)
    return other.result()  # raises what went wrong there


def _pieces(tensor: torch.Tensor, view: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if not tensor.numel():
        return
    if not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.is_complex() or tensor.is_conj():
        yield view.view(tensor.dtype).view(tensor.shape), tensor
        return
    flat = tensor.reshape(-1).view(torch.uint8)
    for start in range(0, len(flat), _CHUNK):
        yield view[start:start + _CHUNK], flat[start:start + _CHUNK]


def _work(jobs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for target, source in jobs:
            if target.dtype == source.dtype == torch.uint8:  # torch would share each copy among threads of its own
                np.copyto(target.numpy(), source.numpy())
            else:
                target.copy_(source)


class _Shared(Iterator[tuple[torch.Tensor, torch.Tensor]]):
    """One list that two threads take from."""

    def __init__(self, jobs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._jobs = jobs

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return self._jobs.pop()
        except IndexError:
            raise StopIteration from None
