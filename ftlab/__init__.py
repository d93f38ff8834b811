"""ftlab: a teaching lab on how distributed training survives failures.

    import ftlab
    from ftlab import faults

    with ftlab.Cluster(nodes=4, spares=1) as cluster:
        job = cluster.submit(train)
        job.wait_for_step(50)
        cluster.inject(faults.kill("node-2"))
        report = job.result()

Importing this package loads nothing heavy; names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftlab import drill as drill
    from ftlab import faults as faults
    from ftlab.checkpoint.distributed import DistributedCheckpointManager as DistributedCheckpointManager
    from ftlab.checkpoint.manager import CheckpointManager as CheckpointManager
    from ftlab.cluster.cluster import Cluster as Cluster
    from ftlab.cluster.connect import connect as connect
    from ftlab.config import CheckpointConfig as CheckpointConfig
    from ftlab.config import ClusterConfig as ClusterConfig
    from ftlab.config import HealthConfig as HealthConfig
    from ftlab.config import JobConfig as JobConfig
    from ftlab.errors import FtlabError as FtlabError
    from ftlab.events import Event as Event
    from ftlab.health.monitor import HealthMonitor as HealthMonitor
    from ftlab.report.report import Report as Report
    from ftlab.train.autorecovery import train_with_auto_recovery as train_with_auto_recovery

__version__ = "0.1.0"

_HOMES = {
    "CheckpointConfig": "ftlab.config", "CheckpointManager": "ftlab.checkpoint.manager",
    "Cluster": "ftlab.cluster.cluster", "ClusterConfig": "ftlab.config",
    "DistributedCheckpointManager": "ftlab.checkpoint.distributed", "Event": "ftlab.events",
    "FtlabError": "ftlab.errors", "HealthConfig": "ftlab.config", "HealthMonitor": "ftlab.health.monitor",
    "JobConfig": "ftlab.config", "Report": "ftlab.report.report", "connect": "ftlab.cluster.connect", "drill": "",
    "faults": "", "train_with_auto_recovery": "ftlab.train.autorecovery",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ftlab' has no attribute {name!r}")
    home = _HOMES[name]
    found = getattr(importlib.import_module(home), name) if home else importlib.import_module(f"ftlab.{name}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
