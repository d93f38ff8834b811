"""The image of a node, built once per session from the base that `.ci/run` makes (cluster/base.sh)."""

from __future__ import annotations

import contextlib
import functools

from ftlab.cluster import builder, engine
from ftlab.cluster.builder import Built
from ftlab.errors import ClusterError

BASE, TAG = "ftlab-base", "ftlab-node"


@functools.cache
def built() -> Built | str:
    """The image, or why there is none."""
    try:
        with contextlib.closing(engine.connect(timeout_s=600.0)) as client:
            return builder.build(client, base=BASE, tag=TAG, wheels=True, say=lambda text: None,
                                 detail=lambda text: None)
    except ClusterError as error:
        return str(error)
