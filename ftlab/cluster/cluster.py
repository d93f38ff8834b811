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
import os
import secrets
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TextIO

import cloudpickle

from ftlab.cluster import abilities, runs
from ftlab.cluster.client import ApiClient, Follower
from ftlab.cluster.job import Job
from ftlab.cluster.launcher_settings import DETECTOR, SETTINGS
from ftlab.cluster.progress import Progress
from ftlab.cluster.shipping import pack_own, ship
from ftlab.cluster.view import cluster_html, cluster_text
from ftlab.config import DISK, CheckpointConfig, ClusterConfig, JobConfig, checkpoint_dir, child_environment
from ftlab.errors import ClusterClosed, ClusterError, ConfigError, NodeStartTimeout, from_dict
from ftlab.events import Event
from ftlab.train.own import is_manager

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
        backend = choose_backend(backend)
        if detector == "own":
            raise ConfigError("a detector of your own is handed in itself", hint="Cluster(detector=MyDetector)")
        kind, own = (detector, b"") if isinstance(detector, str) else ("own", pack_own("detector", detector))
        try:
            self.config = ClusterConfig(nodes=nodes, spares=spares, procs_per_node=procs_per_node, backend=backend,
                                        detector=kind, **settings)
        except TypeError as error:
            raise ConfigError(f"unknown setting: {error}", hint="see ftlab.ClusterConfig") from None
        self.name = f"ft-{secrets.token_hex(4)}"
        self.backend = backend
        self._policy, self._echo = policy, sys.stdout if echo is _ECHO else echo
        token = secrets.token_urlsafe(24)
        folder = runs.make_folder(self.name)
        self._folder: Path | None = folder
        if own:
            (folder / DETECTOR).write_bytes(own)
        self._launcher: subprocess.Popen[bytes] | None
        self._owner: Connection | None
        self._launcher, self._owner = self._start_launcher(folder, token, detached)
        self._finalizer: Callable[[], Any] | None = weakref.finalize(
            self, _end_launcher, self._launcher, self._owner, folder)
        line = Progress(progress)
        try:
            url = self._await_launcher(line)
            self._attach(url, token)
            self._await_nodes(line)
        except BaseException:
            self.close()
            raise
        line.done(f"{self!r} is up")

    @classmethod
    def connect(cls, card: dict[str, Any], echo: TextIO | None = None) -> Cluster:
        """A cluster that another command started, from its card; without a folder if no launcher of ours runs it."""
        self = cls.__new__(cls)
        self.name, self.config = card["cluster"], ClusterConfig.from_dict(card["config"])
        self.backend = self.config.backend
        self._folder, self._policy, self._echo = Path(card["folder"]) if card["folder"] else None, None, echo
        self._launcher = self._owner = None
        self._finalizer = None
        self._attach(card["url"], card["token"])
        return self

    # ---- what a notebook does with it ----------------------------------------------------------------------

    def submit(self, train: Callable[..., Any], *args: Any, policy: Callable[..., Any] | None = None,
               config: JobConfig | None = None, **options: Any) -> Job:
        """Start a job: `train(ctx, *args)` on every rank. `options` are JobConfig's fields, or the function's own.

        `checkpoint` may also be a checkpoint manager of your own, `MyManager(folder)`: see `ftlab.train.own`.
        """
        fields = JobConfig.__dataclass_fields__
        manager = _own_manager(options)
        settings = {name: options.pop(name) for name in list(options) if name in fields}
        job_config = _absolute(config or JobConfig(**settings), self.config)
        if job_config.min_nodes is not None and job_config.min_nodes > self.config.nodes:
            raise ConfigError(f"min_nodes={job_config.min_nodes} is more than the cluster's {self.config.nodes} nodes")
        chosen = policy or self._policy
        code = ship(train, args, options, chosen, manager)
        extra = cloudpickle.dumps(chosen) if chosen else b""
        first = len(self.events)
        name = getattr(train, "__name__", type(train).__name__)
        head = {"job": secrets.token_hex(6), "name": name, "config": job_config.to_dict(), "path": sys.path,
                "policy_bytes": len(extra)}
        answer = self.api.post("/api/jobs", code + extra, X_Ftlab_Job=json.dumps(head))
        return Job(self, answer["job"], name, first)

    def inject(self, fault: Injectable) -> Any:
        """Do a fault now, or when its time comes; its receipt."""
        return fault.inject(self)

    def status(self) -> dict[str, Any]:
        """What the controller holds of its nodes and its job."""
        return self.api.get("/api/status")

    @property
    def events(self) -> list[Event]:
        """The event log so far."""
        return self.follower.events

    @property
    def running(self) -> bool:
        """Whether the cluster is up."""
        if self._launcher is not None:
            return self._launcher.poll() is None
        return self._folder.exists() if self._folder else not self.follower.lost

    def logs(self, node: str, local_rank: int = 0) -> str:
        """All that a node's worker has printed, also what was not shown."""
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
        if hasattr(self, "follower"):
            self.follower.close()
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Cluster:
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
        return self.api.order(**request)

    def record(self, kind: str, **fields: Any) -> None:
        """Put a fault's receipt into the event log, and see it there."""
        answer = self.api.post("/api/events", {"kind": kind, "id": secrets.token_hex(8), **fields})
        self.follower.wait_for(answer["seq"])

    def missing(self, needs: Collection[str]) -> str:
        """Why a fault with these needs cannot be done here, before anything is done; empty if it can."""
        return abilities.missing(needs, self.config)

    def expect_step(self, step: int) -> None:
        """Have this step reported at once, not with the next heartbeat."""
        self.api.post("/api/watch", {"step": step})

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

    def _start_launcher(self, folder: Path, token: str, detached: bool) -> tuple[subprocess.Popen[bytes], Connection]:
        settings = {"cluster": self.name, "token": token, "config": self.config.to_dict(), "detached": detached}
        path = folder / SETTINGS
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            json.dump(settings, file)
        mine, theirs = Pipe()
        environment = child_environment(self.name, folder)
        environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        with (folder / "launcher.log").open("wb") as log:
            launcher = subprocess.Popen(
                [sys.executable, "-m", "ftlab.cluster.launcher", str(folder), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(theirs.fileno(),),
                start_new_session=True, env=environment)
        theirs.close()
        runs.write_pid(folder, launcher.pid)
        return launcher, mine

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


def _own_manager(options: dict[str, Any]) -> Any:
    """The manager that stands where checkpoint settings may stand, taken out of the options; None if there is none."""
    found = options.get("checkpoint")
    if found is None or isinstance(found, CheckpointConfig):
        return None
    del options["checkpoint"]
    if isinstance(found, type):
        found = found(checkpoint_dir())
    if not is_manager(found):
        raise ConfigError(f"checkpoint must be a CheckpointConfig or a checkpoint manager (got {type(found).__name__})",
                          hint="a manager has save_checkpoint and load_checkpoint")
    return found


def _absolute(config: JobConfig, cluster: ClusterConfig) -> JobConfig:
    """The same, with a folder for checkpoints that means the same on every node."""
    if config.checkpoint is None:
        return config
    url = config.checkpoint.url()
    if url.startswith("memory:"):
        raise ConfigError(f"{url} is private to each process: nodes cannot share it", hint="use a folder or s3://")
    if "://" not in url:
        url = str(Path(url).expanduser().absolute())
        seen = [*cluster.share, *([DISK] if cluster.disk_mb else [])]
        if cluster.backend == "docker" and not any(Path(url).is_relative_to(each) for each in seen):
            raise ConfigError(f"the containers of this cluster do not see {url}", hint=f"Cluster(share=['{url}'], ...)")
    return replace(config, checkpoint=replace(config.checkpoint, directory=url))


def _end_launcher(launcher: subprocess.Popen[bytes], owner: Connection, folder: Path) -> None:
    """Close the owner's end; the launcher takes that as the end of the cluster."""
    owner.close()
    try:
        launcher.wait(10)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
    shutil.rmtree(folder, ignore_errors=True)
