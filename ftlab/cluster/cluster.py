"""The cluster a notebook works with: real nodes on this machine, started in seconds and gone without a trace.

    with ftlab.Cluster(nodes=4, spares=1) as cluster:
        job = cluster.submit(train)
        job.wait_for_step(50)
        cluster.inject(faults.kill("node-2"))
        report = job.result()

The processes belong to a launcher that ends with this object, with this process, or with `close`, whichever is first.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TextIO

import cloudpickle

from ftlab.cluster import abilities, cells, runs, warm_start
from ftlab.cluster.client import ApiClient, Follower
from ftlab.cluster.interrupts import deferred, told
from ftlab.cluster.job import Job
from ftlab.cluster.job_options import check_call, own_manager, read_settings
from ftlab.cluster.launcher_process import LauncherProcess, end_launcher, start_launcher
from ftlab.cluster.launcher_settings import DETECTOR
from ftlab.cluster.private_network import choose_network
from ftlab.cluster.progress import Progress
from ftlab.cluster.shipping import pack_own, ship
from ftlab.cluster.twin import Shipment
from ftlab.cluster.view import cluster_html, cluster_text
from ftlab.config import ClusterConfig, JobConfig
from ftlab.errors import (
    BadMessage,
    ClusterClosed,
    ClusterError,
    ConfigError,
    FaultError,
    JobRunning,
    NodeStartTimeout,
    StepPassed,
    UnknownNode,
    WaitInterrupted,
    from_dict,
)
from ftlab.events import Event
from ftlab.validation import check, check_least

_ECHO: Any = object()  # the notebook's standard output, as it is when the cluster is made
_LAST_WORDS_S = 2.0  # from a node's end to what it said in the launcher's log


class Injectable(Protocol):
    """Something that can be done to a cluster, such as a fault."""

    def inject(self, cluster: Any) -> Any:
        """Do it, or arrange for it; a receipt."""


class Cluster:
    """Nodes, spares and a controller on this machine, for as long as this object lives."""

    def __init__(self, nodes: int = 4, spares: int = 1, procs_per_node: int = 1, *, backend: str = "process",
                 policy: Callable[..., Any] | None = None, detector: str | Callable[[], Any] = "timeout",
                 echo: TextIO | None = _ECHO, progress: TextIO | None = None, detached: bool = False,
                 **settings: Any) -> None:
        check("policy", policy, Callable | None)
        check("progress", progress, TextIO | None)
        check("echo", None if echo is _ECHO else echo, TextIO | None)
        check("detached", detached, bool)
        self.backend = choose_backend(backend)
        if isinstance(detector, str) and detector == "own":
            raise ConfigError("a detector of your own is handed in itself", hint="Cluster(detector=MyDetector)")
        kind, own = (detector, b"") if isinstance(detector, str) else ("own", pack_own("detector", detector))
        config = ClusterConfig(nodes=nodes, spares=spares, procs_per_node=procs_per_node, backend=self.backend,
                               detector=kind, **settings)
        network = choose_network(config.network) if self.backend == "process" else config.network
        self.config = replace(config, network=network)
        self.name = f"ft-{secrets.token_hex(4)}"
        self._policy, self._echo = policy, sys.stdout if echo is _ECHO else echo
        self._job: Job | None = None  # the last one
        self._closed = False
        self._folder: Path | None = None
        self._launcher: LauncherProcess | None = None
        self._owner: Connection | None = None
        self._finalizer: Callable[[], Any] | None = None
        self._start(Progress(progress), secrets.token_urlsafe(24), own, detached)

    @classmethod
    def connect(cls, card: dict[str, Any], echo: TextIO | None = None) -> Cluster:
        """A cluster that another command started, from its card; without a folder if no launcher of ours runs it."""
        self = cls.__new__(cls)
        self.name, self.config = card["cluster"], ClusterConfig.from_dict(card["config"])
        self.backend = self.config.backend
        self._folder, self._policy, self._echo = Path(card["folder"]) if card["folder"] else None, None, echo
        self._launcher = self._owner = None
        self._finalizer = self._job = None
        self._closed = False
        self._attach(card["url"], card["token"])
        self.follower.wait_for(self.status()["events"])  # else what was before would count as the next job's
        return self

    # ---- what a notebook does with it ----------------------------------------------------------------------

    def submit(self, train: Callable[..., Any], *args: Any, policy: Callable[..., Any] | None = None,
               config: JobConfig | None = None, **options: Any) -> Job:
        """Start a job: `train(ctx, *args)` on every rank. `options` are JobConfig's fields, or the function's own.

        `checkpoint` may also be a checkpoint manager of your own, `MyManager(folder)`: see `ftlab.train.own`.
        """
        self.must_be_open()
        with told("stopped before the job was sent: nothing was started"):
            manager = own_manager(options, self.config)
            job_config = read_settings(config, options, self.config)
            check_call(train, args, options)
            chosen = check("policy", policy, Callable | None) or self._policy
            code = ship(train, args, options, chosen, manager)
            extra = cloudpickle.dumps(chosen) if chosen else b""
            sent = Shipment(getattr(train, "__name__", type(train).__name__), code, extra, job_config)
            again = replace(sent, code=ship(train, args, options, chosen)) if manager is not None else sent
        job = self.send(sent)
        job.sent = again
        return job

    def send(self, sent: Shipment) -> Job:
        """Start a job from its bytes."""
        self._make_way()
        first = self.follower.seq
        number = secrets.token_hex(6)
        head = {"job": number, "name": sent.name, "config": sent.config.to_dict(), "path": sys.path,
                "policy_bytes": len(sent.policy)}
        self._job = job = Job(self, number, sent.name, first)
        job.abandoned = True  # if this does not end well, the controller may have it all the same
        with told(f"stopped while job {sent.name} was being sent: it may go on",
                  hint="cluster.close() ends everything; the next submit takes its place"):
            self.api.post("/api/jobs", sent.code + sent.policy, X_Ftlab_Job=json.dumps(head))
        job.abandoned = False
        return job

    def inject(self, fault: Injectable) -> Any:
        """Do a fault now, or when its time comes; its receipt."""
        if isinstance(fault, type) or not callable(getattr(fault, "inject", None)):
            raise FaultError(f"inject takes a fault, and {fault!r} is none",
                             hint="cluster.inject(faults.kill(\"node-1\")), with `from ftlab import faults`")
        self.must_be_open()
        try:
            return fault.inject(self)
        except KeyboardInterrupt:
            raise WaitInterrupted("stopped while a fault was being injected: it may have happened without a receipt",
                                  hint="look at the cluster, and start a new one if in doubt") from None

    def status(self) -> dict[str, Any]:
        """What the controller holds of its nodes and its job."""
        self.must_be_open()
        return self.api.get("/api/status")

    @property
    def events(self) -> list[Event]:
        """The event log so far."""
        return self.follower.events

    @property
    def running(self) -> bool:
        """Whether the cluster is up."""
        if self._closed:
            return False
        if self._launcher is not None:
            return self._launcher.poll() is None
        return self._folder.exists() if self._folder else not self.follower.lost

    def must_be_open(self, consequence: str = "") -> None:
        """Raise ClusterClosed unless the cluster is up."""
        if not self.running:
            how = "is closed" if self._closed else "is gone: its launcher has ended"
            raise ClusterClosed(f"cluster {self.name} {how}{f', and {consequence}' if consequence else ''}",
                                hint="make a new one: ftlab.Cluster(...)")

    def logs(self, node: str, local_rank: int = 0) -> str:
        """All that a node's worker has printed, also what was not shown."""
        self.must_be_open("its logs went with it")
        check_least("local_rank", local_rank, 0)
        known = list(dict.fromkeys(event.source for event in self.events if event.kind == "node.joined"))
        if node not in known:
            raise UnknownNode(f"no node is called {node!r}", seen=f"nodes are {', '.join(map(str, known))}")
        path = self._folder / "logs" / f"{node}-{local_rank}.log" if self._folder else None
        return path.read_text(errors="replace") if path and path.exists() else ""

    def detach(self) -> None:
        """Let go of a cluster made with detached=True: it goes on without this process, until `ftlab down`."""
        self.follower.close()
        if self._finalizer is not None:
            weakref.finalize.detach(self._finalizer)  # type: ignore[arg-type]
        if self._owner is not None:
            self._owner.close()
        self._finalizer = self._launcher = self._owner = None

    def close(self) -> None:
        """End all processes and remove every trace; may be called twice."""
        with told(f"stopped; cluster {self.name} is closed all the same"), deferred():
            if hasattr(self, "follower"):
                self.follower.close()
            if self._finalizer is not None:
                self._finalizer()
            self._closed = True

    def __enter__(self) -> Cluster:
        self.must_be_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return cluster_text(self)

    def _repr_html_(self) -> str:
        return cluster_html(self)

    # ---- what faults use -----------------------------------------------------------------------------------

    def order(self, **request: Any) -> dict[str, Any]:
        """Have the launcher do something to the cluster's processes."""
        self.must_be_open()
        return self.api.order(**request)

    def record(self, kind: str, **fields: Any) -> None:
        """Put a fault's receipt into the event log, and see it there."""
        self.must_be_open()
        answer = self.api.post("/api/events", {"kind": kind, "id": secrets.token_hex(8), **fields})
        self.follower.wait_for(answer["seq"])

    def missing(self, needs: Collection[str]) -> str:
        """Why a fault with these needs cannot be done here, before anything is done; empty if it can."""
        return abilities.missing(needs, self.config)

    def expect_step(self, step: int) -> None:
        """Have this step reported at once, not with the next heartbeat."""
        self.must_be_open()
        self.api.post("/api/watch", {"step": step})

    def hold(self, step: int) -> str:
        """Have training pause when so many steps are committed, in the job that runs or in the next one; a name for
        `release`. `hold.reached` tells when it does; raises StepPassed if the job is already beyond that step."""
        self.must_be_open()
        name = secrets.token_hex(6)
        passed = self.api.post("/api/holds", {"hold": name, "step": step})["passed"]
        if passed is not None:
            raise StepPassed(f"step {step} has passed: the job is at step {passed}", step=step, at=passed)
        return name

    def release(self, hold: str) -> None:
        """Let training go on."""
        self.must_be_open()
        self.api.post(f"/api/holds/{hold}/release")

    # ---- output --------------------------------------------------------------------------------------------

    def show_output(self) -> None:
        """Print what the workers printed since the last time, with node and rank in front."""
        output = self.follower.output
        while output:
            node, (_, rank, text) = output.popleft()
            if self._echo is not None:
                who = f"{node} rank={rank}" if rank >= 0 else node
                self._echo.write(f"[{who}] {text}\n")

    def last_words(self) -> str:
        """The end of the launcher's log."""
        if self._folder is None:
            return f"the controller at {self.url} does not answer"
        path = self._folder / "launcher.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-5:]) if path.exists() else "no log is left"

    # ---- starting ------------------------------------------------------------------------------------------

    def _make_way(self) -> None:
        """One job at a time: one that somebody stopped waiting for is ended, any other is an error."""
        job = self._job
        if job is None or job.done:
            return
        if not job.abandoned:
            raise JobRunning(f"job {job.name} is still running, at step {job.step}",
                             hint="job.result() waits for it, job.cancel() ends it")
        try:
            job.cancel()
        except BadMessage:  # the controller has no such job: it was never sent
            return
        job.wait_for_end()
        Progress().done(f"job {job.name} was still running, at step {job.step}: cancelled, the new one takes its place")

    def _start(self, line: Progress, token: str, detector: bytes, detached: bool) -> None:
        cell = None if detached else cells.running_cell()
        try:
            with deferred():
                closed = cells.close_earlier(cell)
            for name in closed:
                line.done(f"cluster {name}, which this cell made before, is closed")
            if not detached:
                warm_start.prepare(self.backend == "process", line.say, self.config.start_timeout_s)
            with deferred():
                self._launch(token, detector, detached)
            url = self._await_launcher(line)
            self._attach(url, token)
            self._await_nodes(line)
        except KeyboardInterrupt:
            with deferred():
                self._abort()
            line.done()
            raise WaitInterrupted("the start of the cluster was stopped, and nothing of it is left") from None
        except BaseException:
            self.close()
            raise
        cells.remember(cell, self)
        line.done(f"{self!r} is up")

    def _launch(self, token: str, detector: bytes, detached: bool) -> None:
        self._folder = folder = runs.make_folder(self.name)
        try:
            if detector:
                (folder / DETECTOR).write_bytes(detector)
            self._launcher, self._owner = start_launcher(self.name, self.config, folder, token, detached)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._finalizer = weakref.finalize(self, end_launcher, self._launcher, self._owner, folder)

    def _abort(self) -> None:
        """End a cluster that is just being started, without waiting for what its launcher does at the moment."""
        if self._launcher is not None:
            if self.backend == "process":
                self._launcher.kill()  # all that it has forked ends with it
            else:
                self._launcher.terminate()  # containers have to be removed
        self.close()

    def _await_launcher(self, line: Progress) -> str:
        assert self._owner is not None
        doing = f"starting {self.config.nodes} nodes and {self.config.spares} spares"
        deadline = time.monotonic() + self.config.start_timeout_s
        while time.monotonic() < deadline:
            line.say(doing)
            try:
                if not self._owner.poll(0.2):
                    continue
                news = json.loads(self._owner.recv_bytes())
            except (EOFError, OSError):
                raise ClusterError("the launcher died while starting", seen=self.last_words(),
                                   hint="run `ftlab doctor`") from None
            if "failed" in news:
                raise from_dict(news["failed"])
            if "ready" in news:
                return str(news["ready"])
            doing = str(news["progress"])
        raise NodeStartTimeout(f"the launcher was not ready after {self.config.start_timeout_s:g} s: still {doing}",
                               seen=self.last_words(), hint="run `ftlab doctor`; is the machine very busy?")

    def _attach(self, url: str, token: str) -> None:
        self.url, self.token = url, token
        self.api = ApiClient(url, token, self._folder)
        self.follower = Follower(url, token)
        self.follower.start()

    def _await_nodes(self, line: Progress) -> None:
        wanted, began = self.config.nodes + self.config.spares, time.monotonic()
        deadline = began + self.config.start_timeout_s
        while True:
            with self.follower.changed:
                joined = {event.source for event in self.events if event.kind == "node.joined"}
                died = {event.source: event.data["reason"] for event in self.events if event.kind == "node.died"}
                if len(joined) >= wanted:
                    return
                self.follower.changed.wait(0.2)
            line.say(f"{len(joined)}/{wanted} nodes are up")
            if died:  # nobody starts another one yet; a moment for its last words
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
            if not self.running:
                raise ClusterClosed("the launcher died while its nodes started", seen=self.last_words())
            if time.monotonic() > deadline:
                lost = "".join(f"; {name}: {reason}" for name, reason in died.items())
                took = time.monotonic() - began
                raise NodeStartTimeout(f"{len(joined)}/{wanted} nodes ready after {took:.1f} s{lost}",
                                       seen=self.last_words(), hint="fewer nodes, or `ftlab doctor`")


def choose_backend(name: str) -> str:
    """What `auto` means here: containers where an engine answers and needs no image to be built, else processes."""
    if name != "auto":
        return name
    from ftlab.cluster import engine, image

    return "process" if image.possible() or engine.available() else "docker"
