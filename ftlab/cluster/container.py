"""One container of a cluster: what the launcher holds of it, and what the engine and the kernel say about it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ftlab.errors import FaultError
from ftlab.health.memory import OomCount


@dataclass
class Container:
    """A node that is a container, from the order to start it until the engine has forgotten it."""

    name: str  # the node's
    address: str
    container: str = ""  # its id, once it is started
    pid: int = 0  # of its first process, as this machine sees it
    handle: int = -1  # on that process: readable when it has ended
    ended_at: float | None = None
    how: str = ""
    cut: bool = False  # off the network
    rules: str | None = None  # the way of a partition that packet rules make
    lossy: bool = False  # a share of its packets is lost
    shaped: bool = False  # its link is slow or late
    oom: OomCount | None = None  # while its memory is limited by a fault
    ooms: int = 0  # kills that were told


def state_of(client: Any, container: str) -> dict[str, Any]:
    """What the engine says about a container; nothing if it is removed."""
    try:
        return dict(client.inspect_container(container)["State"])
    except Exception:  # removed meanwhile
        return {}


def engine_says(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a container's state that goes into receipts."""
    names = {"Status": "engine_status", "ExitCode": "exit_code", "OOMKilled": "oom_killed", "Paused": "paused"}
    return {ours: state[theirs] for theirs, ours in names.items() if theirs in state}


def ending(state: dict[str, Any]) -> str:
    """How a container ended, in words."""
    if not state or state.get("Running"):
        return "still there" if state else "gone"
    if state.get("OOMKilled"):
        return f"exited with code {state['ExitCode']}, out of memory"
    return "killed by SIGKILL" if state["ExitCode"] == 137 else f"exited with code {state['ExitCode']}"


def last_words(client: Any, container: str) -> str:
    """What a container said at the end, if it was not killed."""
    with contextlib.suppress(Exception):  # removed meanwhile
        said = client.logs(container, tail=4).decode(errors="replace").strip()
        return f"; it said: {said}" if said else ""
    return ""


def networks_of(client: Any, container: str) -> list[str]:
    """The networks that a container is on."""
    return sorted(client.inspect_container(container)["NetworkSettings"]["Networks"])


def ask(what: str, do: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Have the engine do something; raises FaultError with its words."""
    from docker.errors import APIError

    try:
        return do(*args, **options)
    except APIError as error:
        raise FaultError(f"the engine cannot have the container {what}: {error.explanation or error}") from None


def inner_pid(pid: int) -> int:
    """The pid of a process in its own container."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1])
    return 0


def cores_used(pid: int, seconds: float) -> float:
    """How much of a core a process takes."""
    def used() -> float:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)

    before = used()
    time.sleep(seconds)
    return max(0.0, used() - before) / seconds


def run_inside(client: Any, node: Container, command: list[str]) -> tuple[int, str]:
    """Run a program inside a container, as its user: its exit code and what it said."""
    job = client.exec_create(node.container, command)["Id"]
    said = client.exec_start(job).decode(errors="replace")
    return int(client.exec_inspect(job)["ExitCode"] or 0), said
