"""The controller's one port: node links (WebSocket), the client API (HTTP and JSON, and an event stream), /metrics.

Every link needs the cluster's token, except `/healthz` and `/metrics`, which tell nothing secret. It listens on the
loopback address only. A message that is garbage or too large ends that link with the reason, and nothing else.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tornado import web, websocket
from tornado.httpserver import HTTPServer

from ftlab import messages
from ftlab.config import MAX_CODE_BYTES, MAX_MESSAGE_BYTES, JobConfig
from ftlab.errors import BadMessage, FtlabError
from ftlab.events import Event
from ftlab.metrics import Exporter
from ftlab.policy import Policy, decide
from ftlab.recovery.controller import Controller
from ftlab.recovery.job import Job
from ftlab.recovery.watch import TICK_S

log = logging.getLogger(__name__)
_EVENTS_PER_FRAME = 500
_CODE = re.compile(r"^[0-9a-f]{8,32}$")


class ControlServer:
    """Serves one controller until `close`."""

    def __init__(self, controller: Controller, *, token: str, folder: Path, load_policy: Callable[[bytes], Policy],
                 shutdown: Callable[[], None]) -> None:
        self.controller, self.token, self.folder = controller, token, folder
        self.load_policy, self.shutdown = load_policy, shutdown
        self.metrics = Exporter()
        for event in controller.log.events:
            self.metrics.observe(event)
        controller.log.listeners += [self.metrics.observe, self._publish]
        controller.on_output = self._on_output
        self.streams: set[_Stream] = set()
        self._frames: list[str] = []
        (folder / "jobs").mkdir(exist_ok=True)

    def start(self, sockets: list[Any]) -> None:
        """Listen on sockets that are already bound, and begin to tick."""
        shared = {"server": self}
        app = web.Application([
            (r"/healthz", _Health, shared), (r"/metrics", _Metrics, shared), (r"/node", _NodeLink, shared),
            (r"/api/status", _Status, shared), (r"/api/jobs", _Jobs, shared),
            (r"/api/jobs/([0-9a-f]+)", _JobInfo, shared), (r"/api/jobs/([0-9a-f]+)/cancel", _JobCancel, shared),
            (r"/api/jobs/([0-9a-f]+)/code", _JobCode, shared), (r"/api/events", _Events, shared),
            (r"/api/watch", _WatchStep, shared), (r"/api/holds", _PlaceHold, shared),
            (r"/api/holds/([0-9a-f]+)/release", _ReleaseHold, shared), (r"/api/shutdown", _Shutdown, shared),
            (r"/api/stream", _Stream, shared),
        ], websocket_max_message_size=MAX_MESSAGE_BYTES, log_function=lambda handler: None,
            default_handler_class=_Unknown, default_handler_args=shared)
        HTTPServer(app, max_buffer_size=MAX_CODE_BYTES, max_body_size=MAX_CODE_BYTES).add_sockets(sockets)
        asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def policy_of(self, job: str) -> Policy:
        """The policy a job was submitted with."""
        path = self.folder / "jobs" / f"{job}.policy"
        return self.load_policy(path.read_bytes()) if path.exists() else decide

    def code_of(self, job: str) -> Path:
        """The file with a job's pickled train function."""
        return self.folder / "jobs" / f"{job}.code"

    def submit(self, job: Job, code: bytes, policy: bytes) -> None:
        """Keep a job's code for the nodes and start it."""
        self.code_of(job.id).write_bytes(code)
        if policy:
            (self.folder / "jobs" / f"{job.id}.policy").write_bytes(policy)
            job.policy = self.load_policy(policy)
        self.controller.submit(job)

    def _tick(self) -> None:
        again_in = TICK_S
        try:
            again_in = self.controller.tick()
        except Exception:
            log.exception("tick failed")
        asyncio.get_running_loop().call_later(again_in, self._tick)

    def _publish(self, event: Event) -> None:
        self._push(f'{{"event":{event.to_json()}}}')

    def _on_output(self, node: str, lines: list[list[Any]]) -> None:
        self._push(json.dumps({"output": lines, "node": node}))

    def _push(self, line: str) -> None:
        """Send to all streams, together with whatever else happens in this turn of the loop."""
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._push_frames)
        self._frames.append(line)

    def _push_frames(self) -> None:
        frames, self._frames = f"[{','.join(self._frames)}]", []
        for stream in list(self.streams):
            stream.push(frames)


class _Guarded:
    """What all handlers share: the token, and errors as JSON."""

    server: ControlServer
    request: Any

    def initialize(self, server: ControlServer) -> None:
        self.server = server

    def may_enter(self) -> bool:
        given = self.request.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self.server.token.encode())


class _Base(_Guarded, web.RequestHandler):
    open_to_all = False

    def prepare(self) -> None:
        if not self.open_to_all and not self.may_enter():
            self.fail(401, {"error": "BadToken", "message": "wrong or missing token",
                            "hint": "send 'Authorization: Bearer TOKEN' with the token of this cluster"})

    def fail(self, status: int, body: dict[str, Any]) -> None:
        self.set_status(status)
        self.finish(body)

    def write_error(self, status_code: int, **info: Any) -> None:
        error = info.get("exc_info", (None, None))[1]
        if isinstance(error, FtlabError):
            self.fail(400, error.to_dict())
        else:
            self.fail(status_code, {"error": "FtlabError", "message": f"{status_code}: {error}"})

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, FtlabError | web.HTTPError):
            log.error("%s failed", self.request.path, exc_info=(typ, value, tb))

    def json(self) -> dict[str, Any]:
        try:
            body = json.loads(self.request.body)
        except ValueError as error:
            raise BadMessage(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadMessage("the body must be a JSON object")
        return body

    def job(self, job: str) -> Job:
        found = self.server.controller.jobs.get(job)
        if found is None:
            raise BadMessage(f"there is no job {job}")
        return found


class _Unknown(_Base):
    def prepare(self) -> None:
        super().prepare()
        if not self._finished:
            self.fail(404, {"error": "BadMessage", "message": f"nothing is at {self.request.path}"})


class _Health(_Base):
    open_to_all = True

    def get(self) -> None:
        self.finish({"ok": True, "generation": self.server.controller.generation})


class _Metrics(_Base):
    open_to_all = True

    def get(self) -> None:
        kind, body = self.server.metrics.render()
        self.set_header("Content-Type", kind)
        self.finish(body)


class _Status(_Base):
    def get(self) -> None:
        self.finish(self.server.controller.status())


class _Jobs(_Base):
    def post(self) -> None:
        head = json.loads(self.request.headers.get("X-Ftlab-Job", "{}"))
        size = int(head.get("policy_bytes", 0))
        body = self.request.body
        if not _CODE.match(str(head.get("job", ""))) or not body:
            raise BadMessage("a job needs an id and its code")
        if head["job"] in self.server.controller.jobs:  # asked again, because the answer was lost
            self.finish({"job": head["job"]})
            return
        job = Job(id=head["job"], name=str(head.get("name", "train")), config=JobConfig.from_dict(head["config"]),
                  wanted=self.server.controller.config.nodes, path=list(head.get("path", [])))
        self.server.submit(job, body[:len(body) - size], body[len(body) - size:])
        self.finish({"job": job.id})


class _JobInfo(_Base):
    def get(self, job: str) -> None:
        self.finish(self.job(job).to_dict())


class _JobCancel(_Base):
    def post(self, job: str) -> None:
        self.server.controller.cancel(self.job(job))
        self.finish({"job": job})


class _JobCode(_Base):
    def get(self, job: str) -> None:
        self.job(job)
        self.set_header("Content-Type", "application/octet-stream")
        self.finish(self.server.code_of(job).read_bytes())


class _Events(_Base):
    def get(self) -> None:
        after = int(self.get_argument("after", "0"))
        self.finish({"events": [json.loads(event.to_json()) for event in self.server.controller.log.after(after)]})

    def post(self) -> None:
        body = self.json()
        kind = str(body.get("kind", ""))
        if not re.fullmatch(r"(fault|lab|drill)\.[a-z_]+", kind):
            raise BadMessage(f"clients may record fault.*, drill.* and lab.* events, not {kind!r}")
        log, key = self.server.controller.log, str(body.get("id", ""))
        known = next((event for event in reversed(log.events) if key and event.data.get("id") == key), None)
        event = known or log.record(kind, source=body.get("source"), at=body.get("at"), id=key or None,
                                    **dict(body.get("data") or {}))
        self.finish({"seq": event.seq})  # a client that lost the answer asks again: once is enough


class _WatchStep(_Base):
    def post(self) -> None:
        self.server.controller.watch_step(int(self.json().get("step", 0)))
        self.finish({})


class _PlaceHold(_Base):
    def post(self) -> None:
        body, controller = self.json(), self.server.controller
        if not _CODE.match(str(body.get("hold", ""))):
            raise BadMessage("a hold needs a name")
        self.finish({"passed": controller.holds.place(controller.job, str(body["hold"]), int(body.get("step", 0)))})


class _ReleaseHold(_Base):
    def post(self, hold: str) -> None:
        self.server.controller.holds.release(self.server.controller.job, hold)
        self.finish({})


class _Shutdown(_Base):
    def post(self) -> None:
        self.finish({})
        self.server.shutdown()


class _Socket(_Guarded, websocket.WebSocketHandler):
    def prepare(self) -> None:
        if not self.may_enter():
            self.set_status(401)
            self.finish({"error": "BadToken", "message": "wrong or missing token"})

    def push(self, line: str | bytes) -> None:
        try:
            future = self.write_message(line)
        except websocket.WebSocketClosedError:
            return
        future.add_done_callback(lambda done: done.exception())


class _NodeLink(_Socket):
    node = ""

    def on_message(self, raw: str | bytes) -> None:
        controller = self.server.controller
        try:
            message = messages.loads(raw)
            if self.node:
                controller.node_said(self.node, message)
                return
            if not isinstance(message, messages.Hello):
                raise BadMessage("the first message on a node link must be Hello")
            controller.node_hello(message, self._link, self._drop)
            self.node = message.node
        except (FtlabError, KeyError, TypeError, ValueError) as error:  # garbage in the message, or inside of it
            log.info("message refused", exc_info=True)
            controller.log.record("message.refused", node=self.node, reason=str(error)[:300])
            self.close(1002, str(error)[:100])

    def _link(self, message: messages.Message) -> None:
        self.push(messages.dumps(message))

    def _drop(self, reason: str) -> None:
        self.close(1001, reason[:100])

    def on_close(self) -> None:
        if self.node:
            self.server.controller.node_unlinked(self.node, self._link)
        elif self.close_code == 1009:
            self.server.controller.log.record("message.refused", node=self.node, reason="a message was too large")


class _Stream(_Socket):
    def open(self, *args: str, **kwargs: str) -> None:
        after = int(self.get_argument("after", "0"))
        known = self.server.controller.log.after(after)
        for first in range(0, len(known), _EVENTS_PER_FRAME):
            frames = (f'{{"event":{event.to_json()}}}' for event in known[first:first + _EVENTS_PER_FRAME])
            self.push(f"[{','.join(frames)}]")
        self.server.streams.add(self)

    def on_message(self, raw: str | bytes) -> None:
        pass

    def on_close(self) -> None:
        self.server.streams.discard(self)
