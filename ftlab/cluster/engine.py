"""The Docker engine as ftlab uses it: reach it or say why not, and find or remove what carries our labels.

Every container, network and volume of a cluster carries three labels: the cluster's name, its folder, and the user who
owns it. Nothing without them is ever touched. The docker package is imported when an engine is first needed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ftlab.config import docker_host
from ftlab.errors import ClusterError

CLUSTER, FOLDER, USER = "ftlab.cluster", "ftlab.folder", "ftlab.user"
SOCKETS = (Path("/var/run/docker.sock"), Path.home() / ".docker/run/docker.sock")
_TIMEOUT_S = 60.0
_QUICK_S = 2.0  # for questions that a person waits for


@dataclass
class Owned:
    """What an engine holds of one cluster."""

    cluster: str
    folder: Path
    containers: list[str] = field(default_factory=list)  # their names
    networks: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.containers) + len(self.networks) + len(self.volumes)


def connect(timeout_s: float = _TIMEOUT_S) -> Any:
    """A client of the engine (docker.APIClient); raises ClusterError with the reason and what helps."""
    try:
        import docker
        from docker.utils import kwargs_from_env
    except ImportError:
        raise ClusterError("the docker package is not installed", hint='pip install "ftlab[docker]"') from None
    try:
        client = docker.APIClient(version="auto", timeout=timeout_s, **kwargs_from_env())
        client.ping()
    except Exception as error:  # docker's errors wrap requests' errors wrap urllib3's: the cause is at the bottom
        raise explain(error) from None
    return client


def available() -> str:
    """Empty if an engine answers, else why not."""
    try:
        connect(_QUICK_S).close()
    except ClusterError as error:
        return f"{error.message} (try: {error.hint})"
    return ""


def explain(error: BaseException) -> ClusterError:
    """The reason why an engine cannot be reached, in words, with the command that helps."""
    found = list(_chain(error))
    if any(isinstance(each, PermissionError) for each in found):
        return ClusterError("the Docker engine refuses this user", seen=str(found[-1]),
                            hint="sudo usermod -aG docker $USER, then log in again")
    if any(isinstance(each, FileNotFoundError | ConnectionRefusedError) for each in found):
        return ClusterError("no Docker engine runs here", seen=str(found[-1]),
                            hint="sudo service docker start (Debian: sudo apt install docker.io)")
    return ClusterError("the Docker engine does not answer", seen=str(error)[:300], hint="docker info; ftlab doctor")


def labels(cluster: str, folder: Path) -> dict[str, str]:
    """What everything of a cluster is marked with."""
    return {CLUSTER: cluster, FOLDER: str(folder), USER: str(os.getuid())}


def owned(client: Any, cluster: str = "") -> list[Owned]:
    """What this user's clusters (or one of them) have in the engine."""
    filters = {"label": [f"{USER}={os.getuid()}", f"{CLUSTER}={cluster}" if cluster else CLUSTER]}
    found: dict[str, Owned] = {}

    def entry(marks: dict[str, str]) -> Owned:
        return found.setdefault(marks[CLUSTER], Owned(marks[CLUSTER], Path(marks.get(FOLDER, ""))))

    for each in client.containers(all=True, filters=filters):
        entry(each["Labels"]).containers.append(each["Names"][0].lstrip("/") if each["Names"] else each["Id"])
    for each in client.networks(filters=filters):
        entry(each["Labels"]).networks.append(each["Name"])
    for each in client.volumes(filters=filters).get("Volumes") or []:
        entry(each["Labels"]).volumes.append(each["Name"])
    return [found[name] for name in sorted(found)]


def remove(client: Any, things: Owned) -> dict[str, Any]:
    """Remove containers, running or not, then networks and volumes; what is already gone is no problem."""
    together([partial(_remove_container, client, name) for name in things.containers])
    for name in things.networks:
        with _gone_already():
            client.remove_network(name)
    for name in things.volumes:
        with _gone_already():
            client.remove_volume(name)
    return {"removed": len(things)}


def create_disk(client: Any, name: str, labels: dict[str, str], size_mb: int) -> None:
    """A small file system in memory that all containers of a cluster can mount; gone with the last of them."""
    client.create_volume(name, driver="local", labels=labels, driver_opts={
        "type": "tmpfs", "device": "tmpfs", "o": f"size={size_mb}m,mode=1777"})


def look() -> list[Owned]:
    """What all clusters of this user have in the engine; nothing where no engine answers."""
    if not docker_host() and not any(path.exists() for path in SOCKETS):
        return []  # without importing docker
    try:
        client = connect(_QUICK_S)
        with contextlib.closing(client):
            return owned(client)
    except Exception:  # an engine in trouble must not keep anybody from looking after processes
        return []


def together(work: Iterable[Callable[[], Any]]) -> list[Any]:
    """Do several things at once; all have ended when this returns. The first error is raised."""
    todo = list(work)
    if not todo:
        return []
    with ThreadPoolExecutor(max_workers=min(16, len(todo))) as pool:
        return [future.result() for future in [pool.submit(each) for each in todo]]


def _remove_container(client: Any, name: str) -> None:
    with _gone_already():
        client.remove_container(name, force=True, v=True)


@contextlib.contextmanager
def _gone_already() -> Iterator[None]:
    from docker.errors import APIError, NotFound

    try:
        yield
    except NotFound:
        pass
    except APIError as error:
        if error.status_code != 409:  # somebody else removes it just now
            raise


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what caused it, and what its arguments hold: urllib3 keeps the real one there."""
    seen: list[BaseException] = []
    todo: list[Any] = [error]
    while todo:
        each = todo.pop(0)
        if isinstance(each, BaseException) and each not in seen:
            seen.append(each)
            yield each
            todo += [each.__cause__, each.__context__, *each.args]
