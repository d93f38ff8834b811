"""What a container runs: nothing of its own (way a), or an image that was built (way b).

Way (a), Linux only: an empty image, and read-only binds of the host's runtime (`/usr`, `/lib`, ...), the interpreter
and exactly the environment that the notebook runs in. Nothing is built or pulled, and package versions cannot differ.
It needs the engine on this very machine: paths of the host are bound.
Way (b): an image made from `cluster/Dockerfile`, with an ftlab of its own: `Cluster(image="name")`, or `ftlab-node`
where way (a) cannot work. Functions travel as byte code, so such an image must hold the same minor version of Python.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import platform
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ftlab.config import docker_host
from ftlab.errors import ClusterError

log = logging.getLogger(__name__)
EMPTY = "ftlab-empty:1"
BUILT = "ftlab-node"  # what `ftlab image build` makes if no other name is given
IMAGE, PYTHON, SOURCE = "ftlab.image", "ftlab.python", "ftlab.source"  # labels of an image
RUNTIME = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ssl", "/etc/alternatives", "/etc/ld.so.cache",
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


def choose_image(client: Any, asked: str) -> str:
    """The image of a cluster's containers: the asked one; else none of its own where that works, else the built one.
    Raises ClusterError if there is none, or if it cannot fit."""
    if asked:
        check_image(client, asked)
        return asked
    reason = unbindable(client)
    if not reason:
        return ensure_empty(client)
    try:
        check_image(client, BUILT)
    except ClusterError as error:
        raise ClusterError(f"{reason}; and {error.message}", seen=error.seen, hint=error.hint) from None
    return BUILT


def unbindable(client: Any) -> str:
    """Empty if this engine can bind what way (a) needs, else why not."""
    if "docker desktop" in str(client.info().get("OperatingSystem", "")).lower():
        return "an image without a build needs the engine on this machine, and Docker Desktop runs in a virtual one"
    return possible() or _wrong_architecture(client.version().get("Arch", ""))


def check_image(client: Any, name: str) -> None:
    """Raise ClusterError if an image is not there or holds another Python; warn if it holds another ftlab."""
    from docker.errors import ImageNotFound

    again = f"ftlab image build --base BASE{'' if name == BUILT else f' --tag {name}'}"
    try:
        labels = client.inspect_image(name)["Config"].get("Labels") or {}
    except ImageNotFound:
        raise ClusterError(f"the engine has no image {name}", hint=again) from None
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if labels.get(PYTHON, here) != here:
        raise ClusterError(f"image {name} holds Python {labels[PYTHON]}, and this is Python {here}: train functions "
                           f"travel as byte code", hint=f"{again}, with a base that holds Python {here}")
    if labels.get(SOURCE) not in (None, source_digest()):
        log.warning("image %s was built from another version of ftlab; try: %s", name, again)


def source_digest(package: Path | None = None) -> str:
    """A digest of ftlab's source, by which an image that was built from another one is recognised."""
    folder, digest = package or Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def ensure_empty(client: Any) -> str:
    """The name of the empty image, made if it is not there; raises ClusterError where way (a) cannot work."""
    reason = unbindable(client)
    if reason:
        raise ClusterError(reason, hint="ftlab image build --base BASE")
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
    return outermost([*RUNTIME, *here, *(sys.path if path is None else path)])


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
