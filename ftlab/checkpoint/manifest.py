"""What a checkpoint consists of: written after its parts, and checked before any of them is believed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ftlab.errors import CheckpointDamaged, CheckpointTooNew

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's part: tensors first, then the header that says where each belongs."""

    file: str
    rank: int
    bytes: int  # of the whole file
    header_bytes: int  # of its end
    digest: str  # xxh3-128 of the whole file


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One checkpoint."""

    step: int
    world: int  # shards there must be
    shards: tuple[Shard, ...]
    epoch: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    created: float = 0.0  # seconds since 1970
    writer: str = ""
    format: int = FORMAT

    def to_json(self) -> bytes:
        """The manifest's file."""
        return json.dumps(asdict(self), indent=1).encode()

    @staticmethod
    def from_json(raw: bytes, where: str) -> Manifest:
        """Read a manifest; raises CheckpointTooNew for a later format, CheckpointDamaged for nonsense."""
        try:
            data: dict[str, Any] = json.loads(raw)
            if int(data["format"]) > FORMAT:
                raise CheckpointTooNew(f"{where} has format {data['format']}, this ftlab knows up to {FORMAT}",
                                       hint="upgrade ftlab, or load it with the version that wrote it")
            shards = tuple(Shard(**row) for row in data.pop("shards"))
            if any(not 0 < shard.header_bytes <= shard.bytes for shard in shards):
                raise ValueError("a shard has an impossible size")
            return Manifest(shards=shards, **data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointDamaged(f"the manifest of {where} cannot be read: {error}") from None

    @property
    def size(self) -> int:
        """Bytes of all shards together."""
        return sum(shard.bytes for shard in self.shards)
