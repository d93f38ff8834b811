"""Socket files: Unix sockets in a cluster's private folder, which only the owner of the folder can open.

The kernel takes no name for them that is longer than about a hundred bytes. A folder that lies deeper is reached
through its descriptor, `/proc/self/fd/N/NAME`, on Linux; elsewhere that is an error that says so.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ftlab.errors import ConfigError

SCHEME = "unix://"  # before the path, where an address is wanted
_LONGEST = 107 if sys.platform == "linux" else 103  # bytes


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """A name for a socket file that the kernel takes, for as long as the context lasts; raises ConfigError."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    if sys.platform != "linux":
        raise ConfigError(f"the folder of this cluster lies too deep: a socket file's path may take {_LONGEST} bytes",
                          seen=str(path), hint="set TMPDIR or FTLAB_RUNS to a shorter one, such as /tmp/ftlab")
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket file."""

    def __init__(self, file: Path, host: str = "localhost", *, timeout: float) -> None:
        super().__init__(host, timeout=timeout)
        self.file = file

    def connect(self) -> None:
        """Connect to the file, whatever the host is called."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        with reachable(self.file) as name:
            self.sock.connect(name)


class UnixHandler(urllib.request.HTTPHandler):
    """Has a urllib opener send all that is http:// to a socket file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """Open a request, as urllib calls it."""
        return self.do_open(partial(UnixConnection, self.file), request)
