"""Finding a cluster that runs already: one that `ftlab up` left running, or one behind a URL."""

from __future__ import annotations

from ftlab.cluster.client import ApiClient
from ftlab.cluster.cluster import Cluster
from ftlab.cluster.runs import read_cards
from ftlab.errors import ClusterError
from ftlab.validation import check

_ANSWER_S = 5.0  # a controller behind a URL may just be starting, or nobody is there


def connect(name: str | None = None, token: str = "") -> Cluster:
    """The running cluster of that name, or the only one there is; with a URL and a token, the one that listens there,
    such as one that `docker compose up` started. Raises ClusterError, or BadToken."""
    check("name", name, str | None)
    check("token", token, str)
    if name and name.startswith(("http://", "https://")):
        return _connect_url(name.rstrip("/"), token)
    cards = [card for card in read_cards() if card["detached"] or card["cluster"] == name]
    chosen = [card for card in cards if name in (None, card["cluster"])]
    if len(chosen) == 1:
        return Cluster.connect(chosen[0])
    running = ", ".join(card["cluster"] for card in cards) or "none"
    if not chosen:
        raise ClusterError(f"no cluster {name!r} is running" if name else "no cluster is running",
                           seen=f"running: {running}", hint="start one with `ftlab up`")
    raise ClusterError("several clusters are running", seen=running, hint="name one of them")


def _connect_url(url: str, token: str) -> Cluster:
    api = ApiClient(url, token, None)
    api.away_s = _ANSWER_S
    config = api.get("/api/status")["config"]
    return Cluster.connect({"cluster": url.partition("://")[2], "config": config, "folder": "", "url": url,
                            "token": token})
