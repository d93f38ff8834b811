"""Damage to the newest checkpoint in a folder: a flipped bit, a file cut short, or two files swapped.

Works on the files alone, as a failing disk would: it knows nothing of how checkpoints are read.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

from ftlab.checkpoint.fence import closed_by
from ftlab.errors import FaultError

WAYS = ("flip", "truncate", "swap")


def damage_newest(folder: str, way: str, seed: int = 0) -> dict[str, Any]:
    """Damage the checkpoint that would be loaded next; the receipt says what was done to which file."""
    if way not in WAYS:
        raise FaultError(f"no damage is called {way!r}", hint=f"ways are {', '.join(WAYS)}")
    if "://" in folder:
        raise FaultError(f"only checkpoints in a folder can be damaged, not in {folder}")
    found = _committed(Path(folder))
    if not found or (way == "swap" and len(found) < 2):
        raise FaultError(f"{folder} holds {len(found)} checkpoints: too few to damage", hint="let it train longer")
    at = time.monotonic()
    return {"at": at, "checkpoint": found[0].name, **_DAMAGES[way](found, random.Random(seed))}


def _committed(folder: Path) -> list[Path]:
    """Checkpoints that look complete, the newest first."""
    usable = [path for path in folder.glob("step-*") if _is_committed(path) and not (path / "DAMAGED").exists()]
    return sorted(usable, key=lambda path: float(json.loads((path / "manifest.json").read_bytes())["created"]),
                  reverse=True)


def _is_committed(path: Path) -> bool:
    try:
        return not closed_by((path / "COMMIT").read_bytes())
    except FileNotFoundError:
        return False


def _flip(found: list[Path], draw: random.Random) -> dict[str, Any]:
    file = _shard(found[0])
    place, bit = draw.randrange(file.stat().st_size), draw.randrange(8)
    with file.open("r+b") as raw:
        raw.seek(place)
        before = raw.read(1)[0]
        raw.seek(place)
        raw.write(bytes([before ^ (1 << bit)]))
        raw.flush()
        os.fsync(raw.fileno())
    after = _byte(file, place)
    return {"status": f"bit {bit} of byte {place} of {file.name}: {before:#04x} is now {after:#04x}"}


def _truncate(found: list[Path], draw: random.Random) -> dict[str, Any]:
    file = _shard(found[0])
    before = file.stat().st_size
    os.truncate(file, draw.randrange(before))
    return {"status": f"{file.name} had {before} bytes and has {file.stat().st_size}"}


def _swap(found: list[Path], draw: random.Random) -> dict[str, Any]:
    mine, other = _shard(found[0]), _shard(found[1])
    aside = mine.with_name("aside")
    mine.rename(aside)
    other.rename(mine)
    aside.rename(other)
    return {"status": f"{mine.name} of {found[0].name} and {found[1].name} are swapped", "also": found[1].name}


def _shard(checkpoint: Path) -> Path:
    return min(checkpoint.glob("shard-*.bin"))


def _byte(file: Path, place: int) -> int:
    with file.open("rb") as raw:
        raw.seek(place)
        return raw.read(1)[0]


_DAMAGES = {"flip": _flip, "truncate": _truncate, "swap": _swap}
