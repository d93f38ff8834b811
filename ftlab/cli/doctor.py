"""What this machine can run, and what to do about each gap.

Everything is tried rather than guessed: addresses are bound, a packet filter is put on a real socket, the Docker
engine is asked. Nothing heavy is imported, nothing is changed, and no check can raise or take longer than about half
a second: a check that fails in an unforeseen way becomes a finding that says so.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ftlab.cluster.abilities import gaps
from ftlab.cluster.engine import SOCKETS
from ftlab.cluster.image import possible
from ftlab.cluster.packets import available

GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing that was examined; `ok` is None where it is optional or only worth knowing."""

    name: str
    ok: bool | None
    detail: str
    hint: str = ""


def examine() -> list[Finding]:
    """Examine this machine; never raises, takes well under two seconds."""
    return [finding for check in CHECKS for finding in _run(check)]


def render(findings: Sequence[Finding]) -> str:
    """The findings as a table for people; every gap is followed by what to do about it."""
    width = max((len(each.name) for each in findings), default=0)
    marks = {True: "✓", False: "✗", None: "·"}
    lines: list[str] = []
    for each in findings:
        lines.append(f"{marks[each.ok]} {each.name:<{width}}  {each.detail}")
        if each.hint:
            lines.append(f"  {'':<{width}}  try: {each.hint}")
    missing = [each.name for each in findings if each.ok is False]
    verdict = f"missing: {', '.join(missing)}" if missing else "everything the embedded cluster needs is here"
    return "\n".join([*lines, "", verdict])


def run(arguments: argparse.Namespace) -> int:
    """`ftlab doctor`: 0 if nothing that the embedded cluster needs is missing."""
    findings = examine()
    missing = [each.name for each in findings if each.ok is False]
    if arguments.json:
        body = {"ok": not missing, "missing": missing, "findings": [asdict(each) for each in findings]}
        sys.stdout.write(json.dumps(body) + "\n")
    else:
        sys.stdout.write(render(findings) + "\n")
    return 1 if missing else 0


def _run(check: Callable[[], Finding | list[Finding]]) -> list[Finding]:
    try:
        found = check()
    except Exception as error:  # the outer edge: doctor must report on broken machines, of all things
        name = check.__name__.removeprefix("_").replace("_", " ")
        return [Finding(name, None, f"could not be examined: {type(error).__name__}: {error}")]
    return found if isinstance(found, list) else [found]


# ---- Python and its packages -------------------------------------------------------------------------------


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    detail = f"{platform.python_version()} on {platform.system()} {platform.release()} ({platform.machine()})"
    return Finding("python", ok, detail, "" if ok else "use Python 3.11 or newer: make setup PYTHON=...")


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("torch", False, "not installed", "make setup")
    ok = tuple(int(part) for part in version.split("+")[0].split(".")[:2]) >= (2, 13)
    return Finding("torch", ok, version, "" if ok else "ftlab needs torch 2.13 or newer: make setup")


def _notebooks() -> list[Finding]:
    found = []
    for name, use in (("jupyterlab", "make lab"), ("nbgrader", "grading"), ("ipywidgets", "live views")):
        version = _version(name)
        hint = "" if version else "pip install -c constraints.txt -e '.[labs]', or make setup"
        found.append(Finding(name, True if version else None, version or f"not installed (used for {use})", hint))
    return found


def _chromium() -> Finding:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return Finding("browser", True if path else None, path or "no Chromium (used only by the browser tests)",
                   "" if path else "Debian: apt install chromium")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- the machine -------------------------------------------------------------------------------------------


def _cpus() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    hint = "" if usable >= 2 else "with one CPU all nodes share it: use nodes=2 and expect slow steps"
    return Finding("cpus", True if usable >= 2 else None, f"{usable} usable of {os.cpu_count()}", hint)


def _memory() -> Finding:
    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    ok = free >= 2 * GIB
    return Finding("memory", ok, f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB",
                   "" if ok else "four nodes and a spare want about 2 GiB: close something, or use fewer nodes")


def _disk() -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    ok = free >= GIB
    return Finding("disk", ok, f"{free / GIB:.1f} GiB free in {folder}",
                   "" if ok else "free some space, or point TMPDIR somewhere else")


def _shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", None, "no /dev/shm on this system")
    stat = os.statvfs("/dev/shm")
    size = stat.f_blocks * stat.f_frsize
    ok = size >= 64 << 20
    return Finding("shared memory", ok, f"{size / GIB:.2f} GiB in /dev/shm",
                   "" if ok else "in a container: docker run --shm-size=1g")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ok = soft >= 1024
    return Finding("open files", ok, f"at most {soft} (can be raised to {hard})", "" if ok else "ulimit -n 4096")


def _cgroup() -> Finding:
    limit, version = _memory_limit()
    words = "no memory limit" if limit is None else f"memory limit {limit / GIB:.1f} GiB"
    if not version:
        return Finding("cgroups", None, "none on this system: out-of-memory kills cannot be limited to one node")
    ok = limit is None or limit >= 2 * GIB
    return Finding("cgroups", ok, f"{version}, {words}", "" if ok else "raise this container's memory limit to 2 GiB")


def _memory_limit() -> tuple[int | None, str]:
    """The smallest memory limit above this process, and the cgroup version in words."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        own = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
        folders = [root / own, *(root / own).parents]
        files, version = [each / "memory.max" for each in folders if each.is_relative_to(root)], "v2"
    else:
        files, version = [root / "memory/memory.limit_in_bytes"], "v1" if (root / "memory").is_dir() else ""
    texts = [file.read_text().strip() for file in files if file.exists()]
    limits = [int(text) for text in texts if text.isdigit() and int(text) < 1 << 60]
    return min(limits, default=None), version


def _gpus() -> Finding:
    if not shutil.which("nvidia-smi"):
        return Finding("gpus", None, "none (no nvidia-smi): training runs on the CPU with gloo")
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=0.5)
    names = [line for line in done.stdout.splitlines() if line.startswith("GPU")]
    return Finding("gpus", None, f"{len(names)} listed by nvidia-smi" if names else "nvidia-smi lists none",
                   "" if names else "check the driver: nvidia-smi -L")


# ---- what the embedded cluster stands on -------------------------------------------------------------------


def _ports() -> Finding:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Finding("ports", True, f"127.0.0.1 gives free ones (just now {probe.getsockname()[1]})")


def _loopback() -> Finding:
    name, address = "node addresses", "127.0.77.1"
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
        return Finding(name, True, f"each node can have its own 127.0.x.y ({address} tried)")
    except OSError as error:
        hint = "macOS: sudo ifconfig lo0 alias 127.0.x.y for each node; until then no partition between nodes"
        return Finding(name, False, f"{address} cannot be bound: {error.strerror}", hint)


def _fork() -> Finding:
    ok = hasattr(os, "fork")
    return Finding("fork", ok, "workers start from a warm fork server" if ok else "this system has no fork",
                   "" if ok else "use Linux, or WSL 2 on Windows")


def _packet_filters() -> Finding:
    reason = available()
    return Finding("packet filters", None if reason else True,
                   reason or "partitions work: packets of a socket can be dropped and let pass again",
                   "the partition fault needs them; `hang` is silent too, and Docker nodes need none" if reason else "")


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket file."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=0.5)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def _docker() -> Finding:
    name = "docker"
    files = [each for each in SOCKETS if each.exists()]
    if not files:
        program = shutil.which("docker")
        detail = "the docker program is here, but no engine runs" if program else "not installed"
        hint = "as root: dockerd &, or service docker start" if program else "Debian: apt install docker.io"
        return Finding(name, None, f"{detail} (optional: nodes are processes by default)", hint)
    try:
        return Finding(name, True, f"the engine answers on {files[0]} (API {_ping(str(files[0]))})")
    except PermissionError:
        return Finding(name, None, f"{files[0]} refuses this user", "join the group `docker`, then log in again")
    except (OSError, http.client.HTTPException) as error:
        return Finding(name, None, f"{files[0]} is there, but nobody answers: {error}", "start the engine: dockerd &")


def _containers() -> Finding:
    """Whether nodes can be containers here, and which faults the engine could not do to them."""
    name = "containers"
    found = _docker()
    if found.ok is not True:
        return Finding(name, None, "nodes cannot be containers: see docker", found.hint)
    if _version("docker") is None:
        return Finding(name, None, "the docker package is not installed", 'pip install "ftlab[docker]"')
    reason = possible()
    if reason:
        return Finding(name, None, reason, "ftlab image build; or cluster/compose.yaml, where the controller is a "
                       "container too")
    info = json.loads(_ask_engine(next(str(each) for each in SOCKETS if each.exists()), "/info")[1])
    lacks = [words for key, words in (("MemoryLimit", "oom (no memory limits)"), ("CpuCfsQuota", "straggler (no CPU "
                                      "quota)")) if info.get(key) is False]
    detail = f"backend='docker' works, without a build: {info['NCPU']} CPUs, {info['MemTotal'] / GIB:.1f} GiB"
    detail += f"; the engine cannot do {', '.join(lacks)}" if lacks else ""
    return Finding(name, None if lacks else True, detail,
                   "mount the memory and cpu cgroups, then start the engine again" if lacks else "")


def _faults() -> list[Finding]:
    """The faults that cannot be done here, to nodes of each kind: the same tries as before an injection."""
    kinds = [("processes", "process"), *([("containers", "docker")] if _docker().ok else [])]
    return [Finding(f"faults of {nodes}", None if found else True,
                    f"not here: {'; '.join(found)}" if found else "all of them can be done")
            for nodes, backend in kinds for found in [gaps(backend)]]


def _ping(path: str) -> str:
    return _ask_engine(path, "/_ping")[0]


def _ask_engine(path: str, what: str) -> tuple[str, bytes]:
    """The engine's API version, and what it answers."""
    connection = _UnixConnection(path)
    try:
        connection.request("GET", what)
        answer = connection.getresponse()
        if answer.status != 200:
            raise http.client.HTTPException(f"{what} says {answer.status} {answer.reason}")
        return answer.getheader("Api-Version") or "unknown", answer.read()
    finally:
        connection.close()


def _leftovers() -> Finding:
    name = "leftovers"
    try:
        from ftlab.cluster.runs import find_leftovers
    except ImportError as error:
        return Finding(name, None, f"cannot be looked for: {error}")
    found = find_leftovers()
    if not found:
        return Finding(name, True, "no earlier run left anything behind")
    words = "; ".join(each.describe() for each in found[:3]) + (f"; and {len(found) - 3} more" if found[3:] else "")
    return Finding(name, False, words, "ftlab reap")


CHECKS: tuple[Callable[[], Finding | list[Finding]], ...] = (
    _python, _torch, _cpus, _memory, _disk, _shared_memory, _open_files, _ports, _loopback, _fork, _packet_filters,
    _cgroup, _gpus, _docker, _containers, _faults, _notebooks, _chromium, _leftovers,
)
