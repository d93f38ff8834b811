"""Reading a shard: every byte goes through the digest on its way into the tensor it belongs to.

The header stands at the end of the file and is read first, to know the tensors; it is believed only so far as to
allocate what the file is large enough to fill. Nothing in it is executed. The rest is read by two threads straight into
the tensors' own memory, and little enough at a time that what was just read is still in the cache when it goes through
the digest.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ftlab.checkpoint.arena import aligned
from ftlab.checkpoint.digest import PIECE, combine, digest_piece
from ftlab.checkpoint.manifest import Shard
from ftlab.checkpoint.storage import LocalStorage, Read
from ftlab.checkpoint.tree import Packed, Slot, slots
from ftlab.errors import CheckpointDamaged

_READERS = 2
_LARGE = 8 << 20
_HUGE_PAGES = 14  # MADV_HUGEPAGE
_libc = ctypes.CDLL(None)


class ShardReader:
    """One shard's bytes, wherever they are; raises CheckpointDamaged when they are not what was written."""

    def __init__(self, read: Read, shard: Shard, where: str, at_once: int = LocalStorage.at_once) -> None:
        self._read, self._shard, self._where, self._at_once = read, shard, where, at_once

    def read(self) -> Packed:
        """The tensors, each in memory of its own, and the header."""
        header = bytearray(self._shard.header_bytes)
        self._fill(self._shard.bytes - len(header), [memoryview(header)])
        wanted = self._parse(bytes(header))
        tensors = [_room(slot.bytes) for slot in wanted]
        memory: list[memoryview] = []
        for tensor in tensors:
            memory += [memoryview(tensor.numpy().data), memoryview(bytearray(aligned(len(tensor)) - len(tensor)))]
        self._verify([*memory, memoryview(header)])
        return Packed(bytes(header), [flat.view(slot.dtype).view(slot.shape)
                                      for flat, slot in zip(tensors, wanted, strict=True)],
                      {index: slot.piece for index, slot in enumerate(wanted) if slot.piece})

    def check(self) -> None:
        """Read everything and keep nothing."""
        scratch = memoryview(bytearray(min(PIECE, self._shard.bytes)))
        found = []
        for start in range(0, self._shard.bytes, PIECE):
            piece = [scratch[:min(PIECE, self._shard.bytes - start)]]
            self._fill(start, piece)
            found.append(digest_piece(piece))
        self._compare(found)

    def _parse(self, header: bytes) -> list[Slot]:
        try:
            wanted = slots(header)
            size = sum(aligned(slot.bytes) for slot in wanted)
        except Exception as error:  # whatever a hostile header makes torch say
            raise CheckpointDamaged(f"{self._where} has a header that cannot be read", seen=str(error)[:300]) from None
        if size != self._shard.bytes - self._shard.header_bytes:
            raise CheckpointDamaged(f"{self._where} has a header for {size} bytes of tensors",
                                    seen=f"the file has {self._shard.bytes - self._shard.header_bytes}")
        return wanted

    def _verify(self, memory: Sequence[memoryview]) -> None:
        """Fill memory from the file, all of it, and compare the digest."""

        def take(piece: tuple[int, list[memoryview]]) -> bytes:
            return digest_piece(self._arriving(*piece))

        pieces = list(_cut(memory, PIECE))
        if len(pieces) == 1:
            return self._compare([take(pieces[0])])
        with ThreadPoolExecutor(_READERS, thread_name_prefix="ftlab-read") as readers:
            self._compare(list(readers.map(take, pieces)))

    def _arriving(self, offset: int, buffers: Sequence[memoryview]) -> Iterator[memoryview]:
        """Buffers, a few at a time, as soon as they are filled."""
        for start, few in _cut(buffers, self._at_once):
            self._fill(offset + start, few)
            yield from few

    def _compare(self, found: Sequence[bytes]) -> None:
        if combine(found) != self._shard.digest:
            raise CheckpointDamaged(f"{self._where} does not match its digest")

    def _fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if self._read(offset, buffers) != sum(len(buffer) for buffer in buffers):
            raise CheckpointDamaged(f"{self._where} ends too early")


def _room(size: int) -> torch.Tensor:
    """Memory for a tensor; a large one in huge pages, if the kernel has some: making 4 KiB pages takes far longer than
    filling them."""
    tensor = torch.empty(size, dtype=torch.uint8)
    begin, end = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE, tensor.data_ptr() + size
    if size >= _LARGE and sys.platform == "linux":
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _HUGE_PAGES)  # a wish: no matter if refused
    return tensor


def _cut(memory: Sequence[memoryview], size: int) -> Iterator[tuple[int, list[memoryview]]]:
    """Places in memory, grouped into pieces of a file of that size: where each begins, and what it fills."""
    offset, room = 0, size
    piece: list[memoryview] = []
    for place in memory:
        while len(place) >= room:
            piece.append(place[:room])
            yield offset, piece
            place, piece, offset, room = place[room:], [], offset + size, size
        if len(place):
            piece.append(place)
            room -= len(place)
    if piece or offset == 0:
        yield offset, piece


def read_memory(data: memoryview) -> Read:
    """A snapshot in memory, read as if it were a file."""

    def read(offset: int, buffers: Sequence[memoryview]) -> int:
        done = 0
        for buffer in buffers:
            part = data[offset + done:offset + done + len(buffer)]
            buffer[:len(part)] = part
            done += len(part)
        return done

    return read
