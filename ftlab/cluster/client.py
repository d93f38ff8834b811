"""How a notebook, a command or a test talks to a cluster: HTTP for questions, a stream for what happens. Its address is
a socket file (unix://PATH), or a port (http://HOST:PORT).

`Follower` keeps a copy of the event log up to date in a background thread, and comes back by itself when the controller
was restarted. Nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from tornado.httpclient import HTTPRequest
from tornado.netutil import Resolver
from tornado.websocket import WebSocketClientConnection, websocket_connect

from ftlab.cluster.launcher_settings import SOCKET
from ftlab.cluster.socket_file import SCHEME, UnixHandler, reachable
from ftlab.errors import BadToken, ClusterClosed, FaultUnavailable, FtlabError, from_dict
from ftlab.events import LONGEST, Event, compact

_AWAY_S = 15.0  # how long a controller may be away before a question fails
_FAR_AWAY_S = 60.0  # the same where its whole container may be being restarted
_NO_PROXY = urllib.request.ProxyHandler({})
_MAX_FRAME_BYTES = 64 << 20  # of events that go together


class ApiClient:
    """Questions to the controller, and orders to the launcher."""

    def __init__(self, url: str, token: str, folder: Path | None) -> None:
        self.url, self.token, self.folder = url, token, folder  # no folder: no launcher of ours runs this cluster
        self.away_s = _AWAY_S if folder else _FAR_AWAY_S
        self._base, file = _web_address(url)
        handlers = [UnixHandler(file)] if file else []
        self._opener = urllib.request.build_opener(_NO_PROXY, *handlers)

    def get(self, path: str) -> dict[str, Any]:
        """GET a JSON object."""
        return self._call(urllib.request.Request(self._base + path))

    def post(self, path: str, body: Any = None, **headers: str) -> dict[str, Any]:
        """POST JSON data, or bytes with headers."""
        raw = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return self._call(urllib.request.Request(self._base + path, data=raw, method="POST", headers=named))

    def order(self, **request: Any) -> dict[str, Any]:
        """Have the launcher do something to the cluster's processes."""
        if self.folder is None:
            raise FaultUnavailable(
                f"the cluster at {self.url} has no launcher: its nodes belong to whoever started them",
                hint="break them yourself: docker kill, docker pause, docker network disconnect")
        try:
            with reachable(self.folder / SOCKET) as name, \
                    Client(name, "AF_UNIX", authkey=self.token.encode()) as link:
                link.send_bytes(json.dumps(request).encode())
                answer: dict[str, Any] = json.loads(link.recv_bytes())
        except AuthenticationError:
            raise BadToken("wrong token: the launcher of this cluster obeys only those who hold it") from None
        except (OSError, EOFError) as error:
            raise ClusterClosed("the cluster is gone", seen=str(error), hint="start a new Cluster") from None
        if "failed" in answer:
            raise from_dict(answer["failed"])
        return answer

    def _call(self, request: urllib.request.Request) -> dict[str, Any]:
        request.add_header("Authorization", f"Bearer {self.token}")
        deadline = time.monotonic() + self.away_s
        while True:
            try:
                with self._opener.open(request, timeout=_AWAY_S) as answer:
                    return dict(json.loads(answer.read()))
            except urllib.error.HTTPError as error:
                raise self._refusal(error) from None
            except (OSError, ValueError) as error:  # the controller is being restarted, or gone
                gone = self.folder is not None and not self.folder.exists()
                if gone or time.monotonic() > deadline:
                    raise ClusterClosed(f"the controller at {self.url} does not answer", seen=str(error)) from None
                time.sleep(0.05)

    def _refusal(self, error: urllib.error.HTTPError) -> FtlabError:
        try:
            return from_dict(json.loads(error.read()))
        except ValueError:
            return FtlabError(f"the controller answered {error.code}")


class Follower:
    """A live copy of a cluster's event log, and its workers' output."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token
        self.events: list[Event] = []  # a long log is made shorter here, too
        self.seq = 0  # of the newest event
        self.output: deque[tuple[str, list[Any]]] = deque(maxlen=5000)
        self.changed = threading.Condition()
        self._limit = LONGEST
        self._away_since: float | None = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ftlab-follower", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def close(self) -> None:
        """Stop following; may be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(5)

    @property
    def lost(self) -> bool:
        """Whether the controller has been away for too long."""
        return self._away_since is not None and time.monotonic() - self._away_since > _FAR_AWAY_S

    def wait_for(self, seq: int, timeout: float = _AWAY_S) -> None:
        """Block until the copy holds the event with this number; raises ClusterClosed if it does not come."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.seq >= seq, timeout):
                raise ClusterClosed(f"event {seq} did not arrive within {timeout:g} s", seen=f"{self.seq} did")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._follow())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _follow(self) -> None:
        while True:
            try:
                link = await self._open_stream()
                self._away_since = None
                try:
                    while (raw := await link.read_message()) is not None:
                        self._take(json.loads(raw))  # several frames that belong together
                finally:
                    self._away_since = time.monotonic()
                    link.close()
                    if link.protocol is not None and link.protocol.stream is not None:
                        link.protocol.stream.close()  # now: the loop may have no time for a farewell
            except (TimeoutError, OSError, RuntimeError):
                pass
            except Exception as error:
                if isinstance(error, asyncio.CancelledError):
                    raise
            await asyncio.sleep(0.03)

    async def _open_stream(self) -> WebSocketClientConnection:
        base, file = _web_address(self.url)
        request = HTTPRequest(f"{base.replace('http', 'ws', 1)}/api/stream?after={self.seq}",
                              headers={"Authorization": f"Bearer {self.token}"}, connect_timeout=1.0)
        if file is None:
            return await websocket_connect(request, max_message_size=_MAX_FRAME_BYTES)
        with reachable(file) as name:
            return await websocket_connect(request, max_message_size=_MAX_FRAME_BYTES, resolver=_FileResolver(name))

    def _take(self, frames: list[dict[str, Any]]) -> None:
        with self.changed:
            for frame in frames:
                if "event" not in frame:
                    self.output.extend((frame["node"], line) for line in frame["output"])
                elif frame["event"]["seq"] > self.seq:  # else it was already known
                    self.events.append(Event(**frame["event"]))
                    self.seq = self.events[-1].seq
            if len(self.events) > self._limit:
                self.events = compact(self.events, LONGEST)
                self._limit = max(LONGEST, 2 * len(self.events))
            self.changed.notify_all()


class _FileResolver(Resolver):
    """Whatever name is looked for, it is found at a socket file."""

    def initialize(self, name: str) -> None:
        self.name = name

    async def resolve(self, host: str, port: int, family: socket.AddressFamily = socket.AF_UNSPEC
                      ) -> list[tuple[int, Any]]:
        return [(socket.AF_UNIX, self.name)]


def _web_address(url: str) -> tuple[str, Path | None]:
    """What to ask for in HTTP's terms, and the socket file to ask at, if it is one."""
    return ("http://localhost", Path(url.removeprefix(SCHEME))) if url.startswith(SCHEME) else (url, None)
