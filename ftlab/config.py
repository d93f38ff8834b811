"""Settings, checked when they are made, each with the reason why a value cannot work.

Environment variables are read here and nowhere else.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ftlab.errors import ConfigError
from ftlab.validation import Checked

CLUSTER_LABEL = "FTLAB_CLUSTER"  # every process of a cluster carries it in its environment
FOLDER_LABEL = "FTLAB_FOLDER"  # and this: the cluster's folder
BACKENDS = ("process", "docker")
NETWORKS = ("auto", "host", "private")
DISK = "/disk"  # where containers see the small disk that they share, if there is one
QUIET: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
                            "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
MAX_MESSAGE_BYTES = 4 << 20  # one message on a link
MAX_CODE_BYTES = 256 << 20  # one pickled train function

DEFAULT_BUDGETS: Mapping[str, int] = {"node": 8, "crash": 3, "stall": 3, "link": 8, "oom": 8, "numbers": 8,
                                      "straggler": 2}
_TIMES = ("heartbeat_s", "suspect_s", "dead_s", "crowd_s", "lease_s", "stall_floor_s", "stall_factor",
          "outside_limit_s", "first_step_limit_s", "start_timeout_s", "restore_limit_s", "reclaim_s")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Checked):
    """How a cluster is built and how it watches its nodes."""

    nodes: int = 4  # nodes that train
    spares: int = 1  # warm nodes that wait for a rank
    procs_per_node: int = 1  # workers on each node
    backend: str = "process"  # what a node is: a process group, or a container ("docker")
    memory_mb: int | None = None  # what each container may take; None: as much as the machine has
    cpus: float | None = None  # cores that each container may use; None: all
    gpus: int | None = None  # GPUs that each container is given, by the engine's device requests
    share: tuple[str, ...] = ()  # folders that containers see under the same name, and may write to
    disk_mb: int | None = None  # a small disk that all containers share, at /disk, and that can fill up; None: none
    image: str = ""  # of the containers; empty: none is built, they see this environment read-only (Linux)
    port: int | None = None  # of the controller, on 127.0.0.1; 0: a free one; None: none, only this user reaches it
    network: str = "auto"  # of processes: the "host"'s, or a "private" one; "auto": private if only there packets drop
    replace: bool = True  # start a new node when no spare is left; else the job shrinks
    replenish: bool = True  # after a spare was promoted, start a new one behind the job's back
    heartbeat_s: float = 0.3  # a node reports at least so often; while it trains, every 0.25 s with its steps
    suspect_s: float = 0.6  # silence after which a node is SUSPECT
    dead_s: float = 0.7  # silence after which a node is DEAD
    detector: str = "timeout"  # "timeout": by the two times above; "phi": by their rhythm; "own": the owner's
    crowd_s: float = 2.5  # the same while most nodes are silent at once: a busy machine is likelier than so many deaths
    lease_s: float = 5.0  # a node that has not heard the controller for so long stops training by itself
    stall_floor_s: float = 1.0  # a step is never called stalled before this
    stall_factor: float = 8.0  # a step is stalled after so many typical step times
    outside_limit_s: float = 60.0  # the same limit for work between two steps
    first_step_limit_s: float = 300.0  # the same limit before the step time is known
    start_timeout_s: float = 120.0  # for all nodes to come up; five imports of torch at once take a busy machine long
    restore_limit_s: float = 120.0  # from new seats to the first step; then the group is built again
    reclaim_s: float = 10.0  # a DEAD node that has not come back by then is removed

    def __post_init__(self) -> None:
        self.check_types()
        self.require(self.nodes >= 1, f"nodes must be at least 1: somebody has to train (got {self.nodes})")
        self.require(self.spares >= 0, f"spares must not be negative (got {self.spares})")
        self.require(self.procs_per_node >= 1, f"procs_per_node must be at least 1: a node without a worker cannot "
                                               f"train (got {self.procs_per_node})")
        self.require(self.nodes + self.spares <= 200, "nodes + spares must be at most 200: one machine holds them all")
        self.require(self.port is None or 0 <= self.port < 65536, f"port must be between 0 and 65535, or None (got "
                                                                  f"{self.port})")
        self.require(self.network in NETWORKS, f"network must be one of {', '.join(NETWORKS)} (got {self.network!r})")
        self.require(self.backend == "process" or self.network == "auto", "network is for processes: containers have a "
                                                                          "network of their own")
        self._check_containers()
        self.require_positive(*_TIMES)
        self.require(2 * self.heartbeat_s <= self.suspect_s < self.dead_s,
                     "need 2 * heartbeat_s <= suspect_s < dead_s: one late heartbeat is no evidence")
        self.require(self.detector in ("timeout", "phi", "own"), f"detector must be \"timeout\", \"phi\", or a class "
                                                                 f"of your own (got {self.detector!r})")
        self.require(self.lease_s > self.dead_s, "lease_s must exceed dead_s: a node must not give up before it is "
                                                 "given up")

    def _check_containers(self) -> None:
        self.require(self.backend in BACKENDS, f"backend {self.backend!r} is not available: it is one of "
                                               f"{', '.join(BACKENDS)}")
        for name in ("memory_mb", "cpus", "gpus", "share", "disk_mb", "image"):
            self.require(self.backend == "docker" or not getattr(self, name), f"{name} needs backend='docker': "
                         f"processes share this machine's memory, cores and files")
        self.require(self.memory_mb is None or self.memory_mb >= 256, f"memory_mb must be at least 256: torch alone "
                                                                      f"takes about 200 (got {self.memory_mb})")
        self.require(self.cpus is None or self.cpus >= 0.05, f"cpus must be at least 0.05: heartbeats would come too "
                                                             f"late (got {self.cpus})")
        self.require(self.gpus is None or self.gpus >= 1, f"gpus must be at least 1, or None (got {self.gpus})")
        self.require(self.disk_mb is None or self.disk_mb >= 1, f"disk_mb must be at least 1, or None (got "
                                                                f"{self.disk_mb})")
        relative = [each for each in self.share if not Path(each).is_absolute()]
        self.require(not relative, f"share must hold absolute paths: nodes see them under the same name (got "
                                   f"{relative})")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Checked):
    """Where checkpoints go and how often they are taken."""

    directory: str = ""  # a folder or any fsspec URL; empty: CHECKPOINT_DIR from the environment
    every: int | str = "auto"  # 50: every 50 steps; "30s": every 30 seconds; "auto": by the cost model
    keep_last_n: int = 3  # good checkpoints that stay
    resume: bool | int = True  # True: from the newest good one; False: from scratch; a number: from that step
    timeout_s: float = 60.0  # how long ranks wait for each other's part of a checkpoint

    def __post_init__(self) -> None:
        every_steps(self.every)
        self.check_types()
        self.require(self.keep_last_n >= 1, f"keep_last_n must be at least 1: without a checkpoint there is nothing to "
                                            f"come back to (got {self.keep_last_n})")
        self.require(self.resume >= 0, f"resume must be True, False or the number of a step (got {self.resume})")
        self.require_positive("timeout_s")

    def url(self) -> str:
        """The folder or URL; raises ConfigError if there is none."""
        return checkpoint_dir(self.directory)


def every_steps(every: int | str) -> int | None:
    """The interval in steps, or None if it is given in seconds or found by the cost model."""
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return every
    if every == "auto" or (isinstance(every, str) and every_seconds(every) is not None):
        return None
    raise ConfigError(f"every must be a number of steps, seconds like \"30s\", or \"auto\" (got {every!r})")


def every_seconds(every: int | str) -> float | None:
    """The interval in seconds, or None if it is not given so."""
    if not isinstance(every, str) or not every.endswith("s"):
        return None
    try:
        seconds = float(every.removesuffix("s"))
    except ValueError:
        return None
    return seconds if seconds > 0 else None


def checkpoint_dir(directory: str = "") -> str:
    """Where checkpoints go: the folder or URL that is given, else CHECKPOINT_DIR from the environment."""
    found = directory or os.environ.get("CHECKPOINT_DIR", "")
    if not found:
        raise ConfigError("no folder for checkpoints is given",
                          hint="name one (a path or a URL such as s3://bucket/run), or set CHECKPOINT_DIR")
    return found


@dataclass(frozen=True, kw_only=True)
class HealthConfig(Checked):
    """What the health monitor calls bad."""

    numbers: bool = True  # NaN and Inf in the loss or the gradients
    loss_spike: float | None = None  # a loss so many typical deviations above the usual is bad; None: not looked at
    grad_spike: float | None = None  # the same for the norm of the gradients
    history: int = 50  # steps that say what is usual
    settle: int = 10  # steps before anything is called a spike
    memory_warn: float = 0.9  # the share of the memory limit above which a warning is given
    straggler_factor: float = 1.5  # a rank so many times slower than the others' median holds them up
    straggler_steps: int = 40  # for so many steps in a row
    replace_stragglers: bool = False  # the policy may give their seats to spares

    @property
    def spikes(self) -> bool:
        """Whether anything is called a spike."""
        return self.loss_spike is not None or self.grad_spike is not None

    def __post_init__(self) -> None:
        self.check_types()
        for name in ("loss_spike", "grad_spike"):
            value = getattr(self, name)
            self.require(value is None or value > 1, f"{name} must exceed 1: usual steps would be called bad "
                                                     f"(got {value})")
        self.require(self.settle >= 5, f"settle must be at least 5: fewer steps do not say what is usual (got "
                                       f"{self.settle})")
        self.require(self.history >= self.settle, "history must be at least settle")
        self.require(0.5 < self.memory_warn < 1, f"memory_warn must lie between 0.5 and 1: below, a healthy run is "
                                                 f"warned all the time (got {self.memory_warn})")
        self.require(self.straggler_factor > 1, f"straggler_factor must exceed 1: somebody is always the slowest (got "
                                                f"{self.straggler_factor})")
        self.require(self.straggler_steps >= 3, "straggler_steps must be at least 3: one slow step is noise")


@dataclass(frozen=True, kw_only=True)
class JobConfig(Checked):
    """How one job trains and what it may survive."""

    min_nodes: int | None = None  # the smallest world the job accepts when nodes cannot be replaced; None: all
    seed: int = 0  # of every random number in the train function
    exact: bool = False  # identical bits even when the world changes size; needs `shards`
    shards: int | None = None  # virtual shards of the global batch with exact=True; None: the first world size
    budgets: Mapping[str, int] = field(default_factory=dict)  # recoveries per cause, over the defaults
    refill_steps: int = 100  # a cause's budget is full again after so many steps without it
    record_samples: bool = False  # write the sample ids of every step to the event log
    start_timeout_s: float = 300.0  # for all workers to reach their first step
    checkpoint: CheckpointConfig | None = None  # None: nothing is saved, and losing all nodes loses all
    save_every: int = 20  # steps between two saves when `submit` is given a checkpoint manager of one's own
    health: HealthConfig = field(default_factory=HealthConfig)  # what is called bad while all nodes are up
    rehearse: bool = True  # run one of the first steps twice: a loop that cannot be replayed is found early

    def __post_init__(self) -> None:
        self.check_types()
        self.require(self.save_every >= 1, f"save_every must be at least 1 (got {self.save_every})")
        self.require(self.min_nodes is None or self.min_nodes >= 1, "min_nodes must be at least 1")
        self.require(self.shards is None or self.exact, "shards is only used with exact=True")
        self.require(self.shards is None or self.shards >= 1, "shards must be at least 1")
        unknown = sorted(set(self.budgets) - set(DEFAULT_BUDGETS))
        self.require(not unknown, f"unknown budget {unknown}: causes are {sorted(DEFAULT_BUDGETS)}")
        negative = sorted(cause for cause, count in self.budgets.items() if count < 0)
        self.require(not negative, f"budgets must not be negative: 0 is no recovery at all (got {negative})")
        self.require(self.refill_steps >= 1, f"refill_steps must be at least 1 (got {self.refill_steps})")
        self.require_positive("start_timeout_s")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> JobConfig:
        """The settings that `to_dict` described."""
        saved, health = data.get("checkpoint"), data.get("health")
        return cls(**{**data, "checkpoint": CheckpointConfig(**saved) if saved else None,
                      "health": HealthConfig(**health) if health else HealthConfig()})

    def all_budgets(self) -> dict[str, int]:
        """The budget of every cause, the defaults included."""
        return {**DEFAULT_BUDGETS, **self.budgets}


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Checked):
    """A controller or a node in a container that somebody else owns, such as compose."""

    token: str  # FTLAB_TOKEN: what everybody must show who talks to the controller
    controller: str = "http://controller:7070"  # FTLAB_CONTROLLER: where nodes find it
    port: int = 7070  # FTLAB_PORT: where the controller listens, at its container's address
    nodes: int = 2  # FTLAB_NODES: how many train; all others are spares
    procs_per_node: int = 1  # FTLAB_PROCS: workers on each node
    state: str = "/state"  # FTLAB_STATE: where the controller keeps its journal
    share: str = "/checkpoints"  # FTLAB_SHARE: the folder that all nodes share
    dead_s: float = 2.0  # FTLAB_DEAD_S: silence after which a node is DEAD; nobody else tells of its end

    def __post_init__(self) -> None:
        self.check_types()
        self.require(len(self.token) >= 16, "FTLAB_TOKEN must hold at least 16 characters: whoever guesses it runs "
                                            "code on the nodes")
        self.require(self.controller.startswith(("http://", "https://")), f"FTLAB_CONTROLLER must be a URL (got "
                                                                          f"{self.controller!r})")
        self.require(0.5 <= self.dead_s <= 20, f"FTLAB_DEAD_S must be between 0.5 and 20: nodes stop by themselves "
                                               f"after 30 s without a controller (got {self.dead_s})")
        self.require(0 < self.port < 65536, f"FTLAB_PORT must be between 1 and 65535 (got {self.port})")

    @classmethod
    def from_environment(cls) -> Self:
        """The settings of this container; takes the token out of the environment, so that workers do not inherit it."""
        names = {"token": "FTLAB_TOKEN", "controller": "FTLAB_CONTROLLER", "port": "FTLAB_PORT", "nodes": "FTLAB_NODES",
                 "procs_per_node": "FTLAB_PROCS", "state": "FTLAB_STATE", "share": "FTLAB_SHARE",
                 "dead_s": "FTLAB_DEAD_S"}
        given: dict[str, Any] = {key: os.environ[name] for key, name in names.items() if os.environ.get(name)}
        os.environ.pop("FTLAB_TOKEN", None)
        kinds = {"port": int, "nodes": int, "procs_per_node": int, "dead_s": float}
        for key in set(kinds) & set(given):
            try:
                given[key] = kinds[key](given[key])
            except ValueError:
                what = "whole number" if kinds[key] is int else "number"
                raise ConfigError(f"{names[key]} must be a {what} (got {given[key]!r})") from None
        return cls(**{"token": "", **given})


def runs_dir() -> Path:
    """The folder, private to this user, that holds one folder per running cluster; it need not be there yet.

    Whoever may write to the temporary folder can take our name there: another user, or root before a user namespace
    mapped us to root. Then it is the next name that is ours, or free.
    """
    given = os.environ.get("FTLAB_RUNS")
    candidates = [Path(given)] if given else [temporary_dir() / name for name in _run_names()]
    usable = [path for path in candidates if is_private(path) or not os.path.lexists(path)]
    if not usable:
        taken = f"{candidates[0]} is" if given else f"{candidates[0]} and {len(candidates) - 1} more names are"
        raise ConfigError(f"there is no folder for running clusters: {taken} not a folder of this user (uid "
                          f"{os.getuid()}) that can be written to",
                          hint="export FTLAB_RUNS=/a/private/folder, or TMPDIR")
    return next(filter(is_private, usable), usable[0])


def is_private(path: Path) -> bool:
    """Whether this is a real folder, no link, that belongs to this user and can be written to."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and os.access(path, os.R_OK | os.W_OK | os.X_OK)


def temporary_dir() -> Path:
    """The temporary folder; raises ConfigError where nothing can be written at all."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(f"no temporary folder can be written to: {error.strerror}",
                          hint="export TMPDIR=/a/folder/of/yours") from None


def _run_names() -> list[str]:
    own = f"ftlab-{os.getuid()}"
    return [own, *(f"{own}-{number}" for number in range(1, 10))]


def own_programs_first() -> None:
    """Have programs of this Python environment found before others, also when it is not activated: nbgrader calls
    `alembic` by its bare name."""
    folder = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if path[0] != folder:
        os.environ["PATH"] = os.pathsep.join([folder, *path])


def lab_environment(settings: Path) -> dict[str, str]:
    """The environment of a Jupyter server: programs of this Python environment first, a folder of settings of ours."""
    own_programs_first()
    paths = [str(settings), *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])]
    return {**os.environ, "FTLAB_BIN": str(Path(sys.executable).parent), "JUPYTER_CONFIG_PATH": os.pathsep.join(paths)}


def login_shell() -> str:
    """The shell that this user likes."""
    return os.environ.get("SHELL") or "/bin/sh"


def child_environment(cluster: str, folder: Path) -> dict[str, str]:
    """The environment of a cluster's launcher: this process's own, and the cluster's."""
    return {**os.environ, **quiet_environment(cluster, folder)}


def template_environment(places: Mapping[str, str]) -> dict[str, str]:
    """The environment of a launcher template: this process's own, with places for labels in the stead of labels."""
    own = {name: value for name, value in os.environ.items() if name not in (CLUSTER_LABEL, FOLDER_LABEL)}
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    return {**own, **QUIET, **places, "PYTHONPATH": os.pathsep.join(path)}


def import_settings() -> dict[str, str]:
    """What the environment says that matters when programs start and modules are imported."""
    return {name: value for name, value in os.environ.items()
            if name.startswith(("PYTHON", "LD_", "TORCH", "PYTORCH", "OMP_", "MKL_", "KMP_", "CUDA_", "GLOO_"))}


def be_started_with(environment: Mapping[str, str]) -> None:
    """In a forked process: take over the environment that it would have been started with."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is looked up anew


def quiet_environment(cluster: str, folder: Path) -> dict[str, str]:
    """What every process of a cluster is given: labels, and one thread until a worker decides otherwise."""
    return {**QUIET, CLUSTER_LABEL: cluster, FOLDER_LABEL: str(folder)}


def stage_environment(folder: Path, temporary: Path) -> dict[str, str]:
    """The environment of the process that runs a student's checks: this process's own, a label, and a place for all
    temporary files, clusters included, that goes with it."""
    return {**os.environ, CLUSTER_LABEL: folder.name, FOLDER_LABEL: str(folder), "TMPDIR": str(temporary),
            "FTLAB_RUNS": str(temporary / "runs")}


def docker_host() -> str:
    """Where the Docker engine is said to listen; empty: at its usual place."""
    return os.environ.get("DOCKER_HOST", "")
