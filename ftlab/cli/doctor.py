"""What this machine can run, and what to do about each gap.

Everything is tried rather than guessed: addresses are bound, packets are dropped on a real socket, in a network of its
own too, the Docker engine is asked. Nothing heavy is imported, nothing is changed, and no check can raise or take
longer than about half a second: a check that fails in an unforeseen way becomes a finding that says so.
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
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ftlab.cluster.abilities import gaps, no_packet_loss
from ftlab.cluster.engine import SOCKETS
from ftlab.cluster.image import possible
from ftlab.cluster.packets import available
from ftlab.cluster.private_network import choose_network
from ftlab.cluster.private_network import why_not as private_network_missing
from ftlab.cluster.socket_file import UnixConnection
from ftlab.config import runs_dir, temporary_dir
from ftlab.errors import ConfigError, FtlabError

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


def render(findings: Sequence[Finding], columns: int = 80) -> str:
    """The findings as a table for people, no line wider than `columns`; every gap is followed by what to do."""
    width = max((len(each.name) for each in findings), default=0)
    indent = width + 4 if columns - width >= _READABLE else 4  # a narrow screen: details stand below their name
    lines: list[str] = []
    for each in findings:
        head = f"{_MARKS[each.ok]} {each.name:<{width}}  "
        told = _wrap(each.detail, columns, indent) + (_wrap(f"try: {each.hint}", columns, indent) if each.hint else [])
        lines += [head + told[0].lstrip(), *told[1:]] if indent == len(head) else [head.rstrip()[:columns], *told]
    missing = [each.name for each in findings if each.ok is False]
    verdict = f"missing: {', '.join(missing)}" if missing else "everything the embedded cluster needs is here"
    return "\n".join([*lines, "", *_wrap(verdict, columns, 0)])


_MARKS = {True: "✓", False: "✗", None: "·"}
_READABLE = 44  # columns, without those of the names


def _wrap(text: str, columns: int, indent: int) -> list[str]:
    space = " " * indent
    return textwrap.wrap(text, max(columns, indent + 10), initial_indent=space, subsequent_indent=space,
                         break_on_hyphens=False) or [space]


def _columns() -> int:
    """The width of the screen; 80 where there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 80


def run(arguments: argparse.Namespace) -> int:
    """`ftlab doctor`: 0 if nothing that the embedded cluster needs is missing."""
    findings = examine()
    missing = [each.name for each in findings if each.ok is False]
    if arguments.json:
        body = {"ok": not missing, "missing": missing, "findings": [asdict(each) for each in findings]}
        sys.stdout.write(json.dumps(body) + "\n")
    else:
        sys.stdout.write(render(findings, _columns()) + "\n")
    return 1 if missing else 0


def _run(check: Callable[[], Finding | list[Finding]]) -> list[Finding]:
    name = check.__name__.removeprefix("_").replace("_", " ")
    try:
        found = check()
    except FtlabError as error:
        return [Finding(name, None, error.message, error.hint)]
    except Exception as error:  # the outer edge: doctor must report on broken machines, of all things
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
    folder = temporary_dir()
    free = shutil.disk_usage(folder).free
    ok = free >= GIB
    return Finding("disk", ok, f"{free / GIB:.1f} GiB free in {folder}",
                   "" if ok else "free some space, or point TMPDIR somewhere else")


def _run_folder() -> Finding:
    """Where running clusters keep their sockets, journals and logs."""
    try:
        return Finding("run folder", True, str(runs_dir()))
    except ConfigError as error:
        return Finding("run folder", False, error.message, error.hint)


def _shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", None, "no /dev/shm on this system")
    if not os.access("/dev/shm", os.W_OK):
        return Finding("shared memory", None, "/dev/shm cannot be written to: the cluster works, but a DataLoader with "
                       "workers does not", "as root: chmod 1777 /dev/shm")
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


def _network() -> list[Finding]:
    """How partitions are made between processes here, and who else can reach a cluster's store and gloo."""
    if choose_network("auto") == "private":
        return [Finding("partitions", True, f"in a private network (on the host's, {available()})"),
                Finding("other users", True, "cannot reach a cluster: its network is private. Downloads and storage "
                        "behind a URL need Cluster(network='host'), which has no partitions")]
    lost = no_packet_loss()
    hint = "the `hang` fault is silent too, and Docker nodes need none of this" if lost else ""
    way = f"none: {lost}" if lost else "by socket filters, on the host's network"
    return [Finding("partitions", None if lost else True, way, hint), _other_users()]


def _other_users() -> Finding:
    """What is open on the host's network: the controller asks everybody for its token, store and gloo cannot."""
    reason = private_network_missing()
    hint = "Cluster(network='private') closes them, and the way out of the cluster with them"
    return Finding("other users", None, "of this machine can connect to a cluster's store and gloo: they know no token",
                   f"not Cluster(network='private'): {reason}" if reason else hint)


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
    connection = UnixConnection(Path(path), timeout=0.5)
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
    _python, _torch, _cpus, _memory, _disk, _run_folder, _shared_memory, _open_files, _ports, _loopback, _fork,
    _network, _cgroup, _gpus, _docker, _containers, _faults, _notebooks, _chromium, _leftovers,
)
