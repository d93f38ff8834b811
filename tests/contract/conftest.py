"""Storages for the contract tests, among them a real S3 client with a server of our own on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import require
from tests.limits import SOON_S, START_S

_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


class Server:
    """A moto server in a process of its own."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        with log.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(self.port), "-H",
                                             "127.0.0.1"], stdout=out, stderr=out, env={**os.environ, **_CREDENTIALS})
        deadline = time.monotonic() + START_S
        while not self._answers():
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.close()
                pytest.fail(f"moto does not answer: {log.read_text()[-500:]}", pytrace=False)
            time.sleep(0.05)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.url, timeout=SOON_S).close()
        except OSError:
            return False
        return True


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all contract tests."""
    yield from serve_s3(tmp_path_factory)


def serve_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that is found through the environment, as anybody's own S3 would be. Clients that were made before talk
    to another one, so none of them is used again."""
    require("s3", bool(find_spec("s3fs") and find_spec("moto")), "s3fs or moto is not installed")
    server = Server(tmp_path_factory.mktemp("moto") / "log")
    patch = pytest.MonkeyPatch()
    for name, value in {**_CREDENTIALS, "AWS_ENDPOINT_URL": server.url}.items():
        patch.setenv(name, value)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        patch.delenv(name, raising=False)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    yield server
    s3fs.S3FileSystem.clear_instance_cache()
    patch.undo()
    server.close()


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh place in each kind of storage."""
    fresh = f"{tmp_path.name}-{os.getpid()}"
    if request.param == "s3":
        request.getfixturevalue("s3_server")
        return f"s3://ftlab-tests/{fresh}"
    return str(tmp_path) if request.param == "folder" else f"memory://ftlab-tests/{fresh}"
