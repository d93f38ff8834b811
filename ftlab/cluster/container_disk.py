"""The small disk that a cluster's containers share, at /disk: a volume in memory that a fault fills to the last byte.

It is filled and looked at from inside a node, as the node's own user: that needs no right on the host.
"""

from __future__ import annotations

import json
from typing import Any

from ftlab.cluster.container import Container, run_inside
from ftlab.config import DISK
from ftlab.errors import FaultError

_BALLAST = f"{DISK}/.ftlab-ballast"
_LOOK = ("s = os.statvfs({disk!r})\n"
         "print(json.dumps({{'size_bytes': s.f_blocks * s.f_frsize, 'free_bytes': s.f_bavail * s.f_frsize}}))")
_FILL = ("import json, os\n"
         "with open({file!r}, 'ab', buffering=0) as out:\n"
         "  for size in (1 << 20, 4096, 1):\n"
         "    try:\n"
         "      while out.write(bytes(size)): pass\n"
         "    except OSError: pass\n") + _LOOK
_EMPTY = "import json, os\nif os.path.exists({file!r}): os.unlink({file!r})\n" + _LOOK


def fill_disk(client: Any, node: Container, python: str) -> dict[str, Any]:
    """Write until nothing fits any more; what the file system says then."""
    room = _do(client, node, python, _FILL)
    return {**room, "status": "full" if room["free_bytes"] == 0 else f"{room['free_bytes']} bytes are still free"}


def empty_disk(client: Any, node: Container, python: str) -> dict[str, Any]:
    """Remove what filled it."""
    room = _do(client, node, python, _EMPTY)
    return {**room, "status": f"{room['free_bytes']} bytes are free"}


def _do(client: Any, node: Container, python: str, script: str) -> dict[str, int]:
    code, said = run_inside(client, node, [python, "-S", "-c", script.format(file=_BALLAST, disk=DISK)])
    if code:
        raise FaultError(f"{node.name} cannot fill or clear the disk", seen=said[-300:],
                         hint="Cluster(disk_mb=64, ...)")
    found: dict[str, int] = json.loads(said.strip().splitlines()[-1])
    return found
