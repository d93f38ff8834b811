"""A container for untrusted code, made without building an image (way a of `image.py`).

The server is its first process, so no signal from inside reaches it, and talks through the container's own stdin and
stdout: the engine's attach stream, which no file in the container leads to. (The docker program would give us real
pipes, but is one more thing to be installed, and the rest of ftlab reaches the engine without it.) When the grader
dies, the stream breaks, the server reads the end of its stdin, and the engine removes the container. It carries the
labels of all our containers, and `ftlab reap` finds it.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Any, cast

from ftlab.cluster import engine
from ftlab.cluster.image import ensure_empty, possible
from ftlab.cluster.recipe import NOBODY
from ftlab.cluster.sandbox import DESK, ROOM, DiskWatch, Limits, Sandbox, environment, own_user, readable, replaced
from ftlab.errors import ClusterError

_PERIOD_US = 100_000
_GONE_S = 20.0  # for the engine to remove a container
_STDERR = 2  # in the header of a frame


def why_not() -> str:
    """Empty if containers of this kind can be had here, else the reason."""
    return possible() or engine.available()


def sandbox(limits: Limits) -> Sandbox:
    """The sandbox that this module offers; raises ClusterError if there is no engine."""
    reason = why_not()
    if reason:
        raise ClusterError(f"no container for untrusted code: {reason}", hint="--sandbox auto takes what there is")
    return Sandbox("container", lambda argv, work, log: Confined(argv, work, log, limits))


class Confined:
    """A running container, with the part of Popen's surface that a stage uses."""

    user: int | None
    wiped: tuple[str, ...] = ("/tmp", "/dev/shm")

    def __init__(self, argv: list[str], work: Path, log: Any, limits: Limits) -> None:
        self.name = f"ftlab-sandbox-{secrets.token_hex(4)}"
        self.user = user = own_user()
        self._log = os.fdopen(os.dup(log.fileno()), "wb", buffering=0)
        self._client = engine.connect()
        self._ended = False
        if user != os.getuid():
            os.chown(work / ROOM, user, -1)
        os.chmod(work / DESK, 0o755)
        try:
            self._id = self._create(argv, work, limits)
            self._socket = self._attach()
            self._client.start(self._id)
        except BaseException:
            self._remove()
            raise
        self.stdin: IO[bytes] | None = cast(IO[bytes], _Input(self._socket))
        reading, self._writing = os.pipe()
        self.stdout: IO[bytes] | None = os.fdopen(reading, "rb", buffering=0)
        self._pump = threading.Thread(target=self._forward, name="ftlab-sandbox-output", daemon=True)
        self._pump.start()
        self._watch = DiskWatch(work / ROOM, limits.disk_mb, self._stop)
        self._watch.start()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the container's end and its removal; raises subprocess.TimeoutExpired."""
        self._pump.join(timeout)
        if self._pump.is_alive():
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        self._remove()
        return 0

    def kill(self) -> None:
        """Remove the container with everything in it."""
        self._remove()

    def _create(self, argv: list[str], work: Path, limits: Limits) -> str:
        client, memory = self._client, limits.memory_mb << 20
        instead = replaced(work)
        binds = {each: {"bind": each, "mode": "ro"} for each in [*readable(), str(work / DESK)] if each not in instead}
        binds |= {folder: {"bind": path, "mode": "ro"} for path, folder in instead.items()}
        binds[str(work / ROOM)] = {"bind": str(work / ROOM), "mode": "rw"}
        host = client.create_host_config(
            binds=binds, network_mode="none", read_only=True, cap_drop=["ALL"], security_opt=["no-new-privileges"],
            tmpfs={"/tmp": f"size={limits.tmp_mb}m,mode=1777"}, shm_size=memory // 2, mem_limit=memory,
            memswap_limit=memory, cpu_period=_PERIOD_US, cpu_quota=round(limits.cpus * _PERIOD_US),
            pids_limit=limits.pids, auto_remove=True, log_config={"Type": "none"},
            ulimits=[{"Name": "core", "Soft": 0, "Hard": 0},
                     {"Name": "fsize", "Soft": limits.disk_mb << 20, "Hard": limits.disk_mb << 20}])
        made = client.create_container(
            ensure_empty(client), argv, name=self.name, hostname="sandbox", working_dir="/", stdin_open=True,
            user=f"{self.user}:{os.getgid() or NOBODY}", labels=engine.labels(self.name, work),
            environment=environment(self.name, work), host_config=host)
        return str(made["Id"])

    def _attach(self) -> socket.socket:
        """The stream to its stdin and from its stdout; opened before the start, so that nothing is missed."""
        stream = self._client.attach_socket(self._id, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        self._stream = stream  # keeps the connection
        found: socket.socket = getattr(stream, "_sock", stream)
        found.settimeout(None)
        return found

    def _forward(self) -> None:
        """Take the stream apart: frames with a header of eight bytes, which says where each belongs and how long."""
        with contextlib.suppress(OSError), self._socket.makefile("rb") as frames:
            while len(head := frames.read(8)) == 8:
                kind, size = struct.unpack(">BxxxL", head)
                _write(self._log.fileno() if kind == _STDERR else self._writing, frames.read(size))
        self._watch.over.set()
        os.close(self._writing)
        self._log.close()

    def _stop(self, reason: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._log.write(f"{reason}\n".encode())
        self._remove()

    def _remove(self) -> None:
        """Have the engine remove it, and wait until it is gone; may be called twice."""
        if self._ended:
            return
        deadline = time.monotonic() + _GONE_S
        with contextlib.closing(engine.connect()) as client:
            engine.remove(client, engine.Owned(self.name, Path(), [self.name]))
            while client.containers(all=True, filters={"name": self.name}):
                if time.monotonic() > deadline:
                    raise ClusterError(f"{self.name} is still there {_GONE_S:g} s after its removal was asked for",
                                       hint="docker ps -a; ftlab reap")
                time.sleep(0.02)
        self._ended = True
        self._client.close()


class _Input(io.RawIOBase):
    """The stdin of the container: what is written goes to the stream, closing it ends only this direction."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, raw: Any) -> int:
        """Send all of it."""
        self._stream.sendall(raw)
        return len(raw)

    def close(self) -> None:
        """Tell the server that no more will come."""
        if not self.closed:
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_WR)
        super().close()


def _write(number: int, raw: bytes) -> None:
    while raw:
        raw = raw[os.write(number, raw):]
