"""Reading a shard: every byte goes through the digest on its way into the tensor it belongs to.

The header stands at the end of the file and is read first, to know the tensors; it is believed only so far as to
allocate what the file is large enough to fill. Nothing in it is executed.
"""

from __future__ import annotations

import torch
import xxhash

from ftlab.checkpoint.arena import aligned
from ftlab.checkpoint.manifest import Shard
from ftlab.checkpoint.storage import Reader
from ftlab.checkpoint.tree import Packed, Slot, slots
from ftlab.errors import CheckpointDamaged

_PIECE = 4 << 20  # hashed while it is still in the cache


class ShardReader:
    """One shard's file, open for reading; raises CheckpointDamaged when it is not what was written."""

    def __init__(self, file: Reader, shard: Shard, where: str) -> None:
        self._file, self._shard, self._where = file, shard, where
        self._sha = xxhash.xxh3_128()
        self._scratch = memoryview(bytearray(_PIECE))

    def read(self) -> Packed:
        """The tensors, each in memory of its own, and the header."""
        header = self._peek_header()
        wanted = self._parse(header)
        tensors = [self._tensor(slot) for slot in wanted]
        self._finish(self._shard.header_bytes)
        return Packed(header, tensors, {index: slot.piece for index, slot in enumerate(wanted) if slot.piece})

    def check(self) -> None:
        """Read everything and keep nothing."""
        self._finish(self._shard.bytes)

    def _peek_header(self) -> bytes:
        self._file.seek(self._shard.bytes - self._shard.header_bytes)
        header = bytearray(self._shard.header_bytes)
        self._fill(memoryview(header))
        self._file.seek(0)
        return bytes(header)

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

    def _tensor(self, slot: Slot) -> torch.Tensor:
        flat = torch.empty(slot.bytes, dtype=torch.uint8)
        memory = memoryview(flat.numpy().data)
        for start in range(0, len(memory), _PIECE):
            self._take(memory[start:start + _PIECE])
        self._take(self._scratch[:aligned(slot.bytes) - slot.bytes])
        return flat.view(slot.dtype).view(slot.shape)

    def _finish(self, left: int) -> None:
        while left:
            piece = self._scratch[:min(left, _PIECE)]
            self._take(piece)
            left -= len(piece)
        if self._sha.hexdigest() != self._shard.digest:
            raise CheckpointDamaged(f"{self._where} does not match its digest")

    def _take(self, memory: memoryview) -> None:
        self._fill(memory)
        self._sha.update(memory)

    def _fill(self, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            count = self._file.readinto(memory[done:])
            if not count:
                raise CheckpointDamaged(f"{self._where} ends too early")
            done += count


class MemoryReader:
    """A snapshot in memory, read as if it were a file."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill memory; how many bytes came."""
        count = min(len(buffer), len(self._data) - self._at)
        buffer[:count] = self._data[self._at:self._at + count]
        self._at += count
        return count

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a place counted from the beginning."""
        self._at = offset
        return offset
