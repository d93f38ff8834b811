"""Digests of large data: of each piece, then of the pieces' digests, so that several threads can take part.

xxh3-128 tells damage at the speed of memory. It is no signature: who may write to the storage can also write a digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

PIECE = 16 << 20


def digest(data: memoryview | bytes) -> str:
    """Of data that is all there."""
    view = memoryview(data).cast("B")
    return combine([digest_piece([view[start:start + PIECE]]) for start in range(0, max(1, len(view)), PIECE)])


def digest_piece(buffers: Iterable[memoryview | bytes]) -> bytes:
    """Of one piece, which may lie in several places."""
    sha = xxhash.xxh3_128()
    for buffer in buffers:
        sha.update(buffer)
    return bytes(sha.digest())


def combine(pieces: Sequence[bytes]) -> str:
    """Of the whole, from its pieces' digests; of a single piece, that piece's."""
    return (pieces[0] if len(pieces) == 1 else bytes(xxhash.xxh3_128(b"".join(pieces)).digest())).hex()
