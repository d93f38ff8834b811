"""What `cluster.submit` is given, checked and sorted before anything is sent: settings of the job, and arguments of the
train function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftlab.checkpoint.storage import is_local
from ftlab.config import DISK, CheckpointConfig, ClusterConfig, JobConfig, checkpoint_dir
from ftlab.errors import ConfigError, NotPicklable
from ftlab.train.own import is_manager
from ftlab.validation import check, suggest


def read_settings(config: JobConfig | None, options: dict[str, Any], cluster: ClusterConfig) -> JobConfig:
    """The job's settings, taken out of the options; what is left there is for the train function."""
    given = {name: options.pop(name) for name in list(options) if name in JobConfig.__dataclass_fields__}
    check("config", config, JobConfig | None)
    if config is not None and given:
        raise ConfigError(f"{', '.join(given)} and config= cannot both be given: one of them would be ignored",
                          hint="put it into the JobConfig")
    settings = _absolute(config or JobConfig(**given), cluster)
    if settings.min_nodes is not None and settings.min_nodes > cluster.nodes:
        raise ConfigError(f"min_nodes={settings.min_nodes} is more than the cluster's {cluster.nodes} nodes")
    return settings


def own_manager(options: dict[str, Any], cluster: ClusterConfig) -> Any:
    """The manager that stands where checkpoint settings may stand, taken out of the options; None if there is none."""
    found = options.get("checkpoint")
    if found is None or isinstance(found, CheckpointConfig):
        return None
    del options["checkpoint"]
    if isinstance(found, type) and is_manager(found):
        _check_reach(checkpoint_dir(), cluster)
        found = found(checkpoint_dir())
    if not is_manager(found) or isinstance(found, type):
        raise ConfigError(f"checkpoint must be a CheckpointConfig or a checkpoint manager (got {found!r})",
                          hint="a manager has save_checkpoint and load_checkpoint")
    return found


def check_call(train: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Whether `train(ctx, *args, **options)` can be called; raises ConfigError that tells why not."""
    if not callable(train):
        raise NotPicklable(f"a train function must be callable, got {train!r}", hint="def train(ctx): ...")
    try:
        signature = inspect.signature(train)
    except (TypeError, ValueError):  # some that are written in C do not tell
        return
    try:
        signature.bind(None, *args, **options)
    except TypeError as error:
        name = getattr(train, "__name__", type(train).__name__)
        wrong = next((each for each in options if each not in signature.parameters), "")
        known = [*list(signature.parameters)[1:], *JobConfig.__dataclass_fields__]
        hint = suggest(wrong, known) if wrong else f"it is called as {name}(ctx, ...): def {name}(ctx): ..."
        raise ConfigError(f"{name}{signature} cannot be called so: {error}", hint=hint) from None


def _absolute(config: JobConfig, cluster: ClusterConfig) -> JobConfig:
    """The same, with a folder for checkpoints that means the same on every node."""
    if config.checkpoint is None:
        return config
    url = config.checkpoint.url()
    if url.startswith("memory:"):
        raise ConfigError(f"{url} is private to each process: nodes cannot share it", hint="use a folder or s3://")
    _check_reach(url, cluster)
    if "://" not in url:
        url = str(Path(url).expanduser().absolute())
        seen = [*cluster.share, *([DISK] if cluster.disk_mb else [])]
        if cluster.backend == "docker" and not any(Path(url).is_relative_to(each) for each in seen):
            raise ConfigError(f"the containers of this cluster do not see {url}", hint=f"Cluster(share=['{url}'], ...)")
    return replace(config, checkpoint=replace(config.checkpoint, directory=url))


def _check_reach(url: str, cluster: ClusterConfig) -> None:
    if cluster.network == "private" and "://" in url and not is_local(url):
        raise ConfigError(f"{url} cannot be reached from this cluster: its network is private and ends on this machine",
                          hint="save to a folder, or Cluster(network='host'); `ftlab doctor` tells what that lacks")
