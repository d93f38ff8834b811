"""`ftlab up`, `status`, `down` and `reap`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from typing import Any

from ftlab.cluster.cluster import Cluster
from ftlab.cluster.connect import connect
from ftlab.cluster.runs import is_running, read_cards
from ftlab.cluster.runs import reap as reap_leftovers
from ftlab.cluster.view import role_text
from ftlab.errors import ClusterError


def up(arguments: argparse.Namespace) -> int:
    """Start a cluster and leave it running."""
    cluster = Cluster(arguments.nodes, arguments.spares, arguments.procs_per_node, backend=arguments.backend,
                      port=arguments.port, network=arguments.network, detached=True, echo=None)
    cluster.detach()
    card = {"cluster": cluster.name, "url": cluster.url, "nodes": arguments.nodes, "spares": arguments.spares}
    _answer(arguments, card, f"{cluster.name} is up at {cluster.url}\n"
            f"  in Python:  cluster = ftlab.connect(\"{cluster.name}\")\n  to end it:  ftlab down {cluster.name}")
    return 0


def status(arguments: argparse.Namespace) -> int:
    """Show the clusters that are up."""
    found = []
    for card in read_cards():
        with_status: dict[str, Any] = {key: card[key] for key in ("cluster", "url", "detached")}
        cluster = Cluster.connect(card)
        try:
            found.append({**with_status, **cluster.status()})
        finally:
            cluster.close()
    lines = [line for each in found for line in _describe(each)] or ["no cluster is up"]
    _answer(arguments, {"clusters": found}, "\n".join(lines))
    return 0


def down(arguments: argparse.Namespace) -> int:
    """End a cluster."""
    cluster = connect(arguments.name)
    pid = next(card["launcher_pid"] for card in read_cards() if card["cluster"] == cluster.name)
    cluster.close()
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while is_running(pid, cluster.name):
        if time.monotonic() > deadline:
            raise ClusterError(f"{cluster.name} did not end within 10 s", hint="ftlab reap")
        time.sleep(0.02)
    _answer(arguments, {"cluster": cluster.name, "down": True}, f"{cluster.name} is down")
    return 0


def reap(arguments: argparse.Namespace) -> int:
    """Remove leftovers."""
    removed = reap_leftovers()
    rows = [{"cluster": each.cluster, "pids": list(each.pids), "folder": str(each.folder or ""),
             "containers": each.things.containers if each.things else [],
             "networks": each.things.networks if each.things else [],
             "volumes": each.things.volumes if each.things else []} for each in removed]
    _answer(arguments, {"reaped": rows}, "\n".join(each.describe() for each in removed) or "nothing to remove")
    return 0


def _describe(cluster: dict[str, Any]) -> list[str]:
    job = cluster["job"]
    doing = f"job {job['name']} {job['status']}, step {job['step']}" if job else "no job yet"
    lines = [f"{cluster['cluster']}  {cluster['url']}  generation {cluster['generation']}  {doing}"]
    for node in cluster["nodes"]:
        lines.append(f"  {node['name']:<9} {node['address']:<13} {node['verdict']:<8} {role_text(node)}")
    return lines


def _answer(arguments: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    sys.stdout.write((json.dumps(data) if arguments.json else text) + "\n")
