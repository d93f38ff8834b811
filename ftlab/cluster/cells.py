"""Which cell of a notebook made which cluster: a cell that is run again ends the clusters of its earlier run.

A notebook keeps whatever it was given (`_`, `Out`, tracebacks), so that a cluster whose variable was taken by the next
one would run until the kernel ends. Clusters of other cells, and several of one run of a cell, stay. Outside of IPython
there are no cells, and nothing is done.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from dataclasses import dataclass
from typing import Any, Protocol


class Closable(Protocol):
    """A cluster, as far as it matters here."""

    name: str

    @property
    def running(self) -> bool:
        """Whether it is up."""

    def close(self) -> None:
        """End it."""


@dataclass(frozen=True)
class Cell:
    """One execution of one cell."""

    key: str  # the notebook's id of the cell, or a digest of its source where there is none
    execution: str  # another one each time that it is run


_made: list[tuple[Cell, weakref.ref[Any]]] = []


def running_cell() -> Cell | None:
    """The cell that is being executed; None outside of IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:
        return None
    kernel = getattr(shell, "kernel", None)
    if kernel is None:  # IPython in a terminal
        return Cell(_digest(shell.history_manager.input_hist_raw[-1]), str(shell.execution_count))
    request = kernel.get_parent("shell")
    key = request.get("metadata", {}).get("cellId") or _digest(request.get("content", {}).get("code", ""))
    return Cell(str(key), str(request.get("header", {}).get("msg_id", "")))


def remember(cell: Cell | None, cluster: Closable) -> None:
    """Note who made a cluster."""
    if cell is not None:
        _made.append((cell, weakref.ref(cluster)))


def close_earlier(cell: Cell | None) -> list[str]:
    """Close what earlier executions of the same cell made and nobody has closed; the names of those clusters."""
    closed = []
    for made in [made for made in _made if cell is not None and _is_earlier(made[0], cell)]:
        _made.remove(made)
        cluster = made[1]()
        if cluster is not None and cluster.running:
            cluster.close()
            closed.append(cluster.name)
    return closed


def _is_earlier(made: Cell, now: Cell) -> bool:
    return made.key == now.key and made.execution != now.execution


def _digest(source: str) -> str:
    return hashlib.sha256(source.strip().encode()).hexdigest()
