"""Who a node is: its name and address, where its controller listens, and the token. No heavy imports: the launcher
hands identities out before it has imported torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class NodeIdentity:
    """Who a node is and where its controller listens."""

    name: str
    address: str
    controller: str  # http://host:port
    token: str
    logs: Path | None = None
    orphan_s: float | None = None  # it ends itself when its controller is silent for so long; None: a lifeline tells it


def write_identity(path: Path, identity: NodeIdentity, procs: int, owner: int) -> None:
    """Leave a container its identity, token included, in a file that only `owner` can read."""
    body = {**asdict(identity), "logs": str(identity.logs) if identity.logs else None, "procs": procs}
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(body, file)
    if owner != os.getuid():
        os.chown(path, owner, -1)


def read_identity(path: Path) -> tuple[NodeIdentity, int]:
    """What `write_identity` left, and how many workers the node has."""
    body: dict[str, Any] = json.loads(path.read_text())
    procs = int(body.pop("procs"))
    return NodeIdentity(**{**body, "logs": Path(body["logs"]) if body["logs"] else None}), procs
