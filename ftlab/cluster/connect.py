"""Finding a cluster that `ftlab up` left running."""

from __future__ import annotations

from ftlab.cluster.cluster import Cluster
from ftlab.cluster.runs import read_cards
from ftlab.errors import ClusterError


def connect(name: str | None = None) -> Cluster:
    """The running cluster of that name, or the only one there is."""
    cards = [card for card in read_cards() if card["detached"] or card["cluster"] == name]
    chosen = [card for card in cards if name in (None, card["cluster"])]
    if len(chosen) == 1:
        return Cluster.connect(chosen[0])
    running = ", ".join(card["cluster"] for card in cards) or "none"
    if not chosen:
        raise ClusterError("no such cluster is running" if name else "no cluster is running",
                           seen=f"running: {running}", hint="start one with `ftlab up`")
    raise ClusterError("several clusters are running", seen=running, hint="name one of them")
