"""`make lab` as a student meets it: a real server, its terminal, its kernel, and the page that it serves."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from tests.limits import SOON_S, START_S

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
HEADERS = {"Authorization": "token only-for-this-test"}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """A server without our programs on its PATH, of a user whose own files set the PATH anew."""
    home = tmp_path_factory.mktemp("home")
    for name in (".bashrc", ".bash_profile", ".profile"):
        (home / name).write_text("PATH=/usr/bin:/bin\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**{name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")},
                   "HOME": str(home), "PATH": "/usr/bin:/bin", "SHELL": "/bin/bash"}
    with (home / "log").open("wb") as log:
        process = subprocess.Popen([BIN / "ftlab", "lab", "--", "--no-browser", f"--port={port}",
                                    "--ServerApp.port_retries=0", "--IdentityProvider.token=only-for-this-test"],
                                   cwd=ROOT, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not _answers(url):
            assert process.poll() is None and time.monotonic() < deadline, (home / "log").read_text()
            time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(SOON_S)
    left = sorted(each.name for each in home.iterdir())
    assert ".jupyter" not in left, f"settings in the user's home: {left}"


def _answers(url: str) -> bool:
    try:
        _ask(f"{url}/api/status")
    except OSError:
        return False
    return True


def _ask(url: str, data: Any = None) -> bytes:
    body = None if data is None else json.dumps(data).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, HEADERS), timeout=SOON_S) as answer:
        return bytes(answer.read())


async def _talk(url: str, message: Any, until: str) -> str:
    """What a WebSocket says after a message, as far as the wanted text."""
    link = await websocket_connect(HTTPRequest(url.replace("http", "ws", 1), headers=HEADERS))
    await link.write_message(json.dumps(message))
    heard = ""
    while not re.search(until, heard):
        heard += str(await asyncio.wait_for(link.read_message(), START_S))
    link.close()
    return heard


def test_a_terminal_finds_ftlab_though_the_users_files_set_the_path_anew(server):
    name = json.loads(_ask(f"{server}/api/terminals", {}))["name"]
    command = "command -v ftlab; ftlab --version; echo PATH-$((1+1))\r"
    heard = asyncio.run(_talk(f"{server}/terminals/websocket/{name}", ["stdin", command], "PATH-2"))
    assert str(BIN / "ftlab") in heard and re.search(r"ftlab \d+\.\d+", heard), heard


def test_a_kernel_finds_ftlab(server):
    kernel = json.loads(_ask(f"{server}/api/kernels", {"name": "python3"}))["id"]
    header = {"msg_id": "1", "msg_type": "execute_request", "username": "", "session": "s", "version": "5.3"}
    request = {"header": header, "parent_header": {}, "metadata": {}, "channel": "shell", "buffers": [],
               "content": {"code": "!command -v ftlab; echo KERNEL-$((1+1))", "silent": False}}
    heard = asyncio.run(_talk(f"{server}/api/kernels/{kernel}/channels", request, "KERNEL-2"))
    assert str(BIN / "ftlab") in heard, heard


def test_the_page_leaves_out_the_instructors_sidebar_and_the_news(server):
    page = _ask(f"{server}/lab").decode()
    found = re.search(r'id="jupyter-config-data"[^>]*>(.*?)</script>', page, re.S)
    assert found
    off = json.loads(found[1])["disabledExtensions"]
    assert {"@jupyter/nbgrader", "@jupyterlab/apputils-extension:announcements"} <= set(off), off
