"""Reading a shard: every byte goes through the digest on its way into the tensor it belongs to.

The header stands at the end of the file and is read first, to know the tensors; it is believed only so far as to
allocate what the file is large enough to fill. Nothing in it is executed. The rest is read by two threads, a piece at a
time, straight into the tensors' own memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ftlab.checkpoint.arena import aligned
from ftlab.checkpoint.digest import PIECE, combine, digest_piece
from ftlab.checkpoint.manifest import Shard
from ftlab.checkpoint.storage import Read
from ftlab.checkpoint.tree import Packed, Slot, slots
from ftlab.errors import CheckpointDamaged

_READERS = 2


class ShardReader:
    """One shard's bytes, wherever they are; raises CheckpointDamaged when they are not what was written."""

    def __init__(self, read: Read, shard: Shard, where: str) -> None:
        self._read, self._shard, self._where = read, shard, where

    def read(self) -> Packed:
        """The tensors, each in memory of its own, and the header."""
        header = bytearray(self._shard.header_bytes)
        self._fill(self._shard.bytes - len(header), [memoryview(header)])
        wanted = self._parse(bytes(header))
        tensors = [torch.empty(slot.bytes, dtype=torch.uint8) for slot in wanted]
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
            self._fill(*piece)
            return digest_piece(piece[1])

        pieces = list(_cut(memory))
        if len(pieces) == 1:
            return self._compare([take(pieces[0])])
        with ThreadPoolExecutor(_READERS, thread_name_prefix="ftlab-read") as readers:
            self._compare(list(readers.map(take, pieces)))

    def _compare(self, found: Sequence[bytes]) -> None:
        if combine(found) != self._shard.digest:
            raise CheckpointDamaged(f"{self._where} does not match its digest")

    def _fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if self._read(offset, buffers) != sum(len(buffer) for buffer in buffers):
            raise CheckpointDamaged(f"{self._where} ends too early")


def _cut(memory: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Places in memory, grouped into the pieces of a file: where each begins, and what it fills."""
    offset, room = 0, PIECE
    piece: list[memoryview] = []
    for place in memory:
        while len(place) >= room:
            piece.append(place[:room])
            yield offset, piece
            place, piece, offset, room = place[room:], [], offset + PIECE, PIECE
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
