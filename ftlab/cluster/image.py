"""What a container runs: nothing of its own (way a), or an image that was built (way b).

Way (a), Linux only: an empty image, and read-only binds of the host's runtime (`/usr`, `/lib`, ...), the interpreter
and exactly the environment that the notebook runs in. Nothing is built or pulled, and package versions cannot differ.
It needs the engine on this very machine: paths of the host are bound.
Way (b): `Cluster(image="name")`, an image made from `cluster/Dockerfile`, with an ftlab of its own.
"""

from __future__ import annotations

import io
import os
import platform
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ftlab.config import docker_host
from ftlab.errors import ClusterError

EMPTY = "ftlab-empty:1"
_RUNTIME = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ssl", "/etc/alternatives", "/etc/ld.so.cache",
            "/etc/localtime")
_OWN = ("/", "/tmp", "/proc", "/sys", "/dev", "/run", "/etc", "/var")  # the container has its own, or nobody's


def possible() -> str:
    """Empty if way (a) works here, else why not."""
    if sys.platform != "linux":
        return "an image without a build needs Linux: the host's own runtime is bound into the containers"
    host = docker_host()
    if host and not host.startswith("unix://"):
        return f"an image without a build needs the engine on this machine, and DOCKER_HOST is {host}"
    return ""


def ensure_empty(client: Any) -> str:
    """The name of the empty image, made if it is not there; raises ClusterError where way (a) cannot work."""
    reason = possible() or _wrong_architecture(client.version().get("Arch", ""))
    if reason:
        raise ClusterError(reason, hint="build cluster/Dockerfile and name it: Cluster(backend='docker', image=...)")
    if not client.images(EMPTY):
        nothing = io.BytesIO()
        tarfile.open(fileobj=nothing, mode="w").close()
        repository, tag = EMPTY.split(":")
        client.import_image_from_data(nothing.getvalue(), repository=repository, tag=tag,
                                      changes=["LABEL ftlab.image=1"])
    return EMPTY


def environment_binds(path: Sequence[str] | None = None) -> list[str]:
    """The folders of the host that a container of way (a) sees, read-only, under their own names."""
    here = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))),
            str(Path(__file__).parents[1])]
    return outermost([*_RUNTIME, *here, *(sys.path if path is None else path)])


def outermost(paths: Iterable[str]) -> list[str]:
    """The paths that exist, without those that lie in another one, and without those a container has itself."""
    there = sorted({os.path.abspath(each) for each in paths if each and os.path.exists(each)} - set(_OWN), key=len)
    kept: list[str] = []
    for each in there:
        if not any(each.startswith(f"{other}/") for other in kept):
            kept.append(each)
    return sorted(kept)


def _wrong_architecture(engine: str) -> str:
    names = {"x86_64": "amd64", "aarch64": "arm64"}
    here = names.get(platform.machine(), platform.machine())
    return "" if engine in ("", here) else f"the engine runs {engine} programs, and this Python is built for {here}"
