"""The memory of one container: what it uses, and limits that faults set and lift."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ftlab.cluster.container import Container, ask, inner_pid, run_inside
from ftlab.cluster.nodes import limit_data
from ftlab.errors import FaultError, FaultUnavailable
from ftlab.health.kernel import find_cgroup

_LOWER_S = 3.0  # how long a smaller memory limit is tried


def memory_use(node: Container) -> int:
    """Bytes that a container holds and the kernel could not take back."""
    group = find_cgroup("memory", node.pid)
    if group is None:
        raise FaultUnavailable("the memory of a container cannot be read here")
    stat = dict(line.split() for line in (group.path / "memory.stat").read_text().splitlines())
    name = "memory.usage_in_bytes" if group.version == 1 else "memory.current"
    cache = int(stat["inactive_file"]) + int(stat["active_file"])
    return max(0, int((group.path / name).read_text()) - cache)


def set_memory(client: Any, node: Container, limit: int) -> None:
    """Let a container take so many bytes, swap included."""
    ask("change its memory limit", client.update_container, node.container, mem_limit=limit, memswap_limit=limit)


def lower_memory(client: Any, node: Container, limit: int) -> float:
    """Set a smaller memory limit; when it began to hold. The kernel refuses one that is below the use of this very
    moment, so it is tried again until a step has given back what it took."""
    deadline = time.monotonic() + _LOWER_S
    while True:
        at = time.monotonic()
        try:
            set_memory(client, node, limit)
            return at
        except FaultError as error:
            if "unable to set memory limit" not in error.message or at > deadline:
                raise


def limit_worker_data(client: Any, node: Container, python: str, pids: Iterable[int], size: int) -> None:
    """Set RLIMIT_DATA from here, or, where that needs a right we lack, from inside, as the same user."""
    found = list(pids)
    try:
        limit_data(found, size)
        return
    except PermissionError:
        inner = [inner_pid(pid) for pid in found]
    script = (f"import resource as r\nfor pid in {inner}:\n try: r.prlimit(pid, r.RLIMIT_DATA, ({size}, -1))\n"
              f" except ProcessLookupError: pass")
    code, said = run_inside(client, node, [python, "-S", "-c", script])
    if code:
        raise FaultUnavailable(f"the memory of {node.name}'s worker cannot be limited", seen=said[-300:])
