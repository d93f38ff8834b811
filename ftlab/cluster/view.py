"""A cluster at a glance: one line of text, or a small table for a notebook. Only reads."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from ftlab.errors import FtlabError

if TYPE_CHECKING:
    from ftlab.cluster.cluster import Cluster

_COLOURS = {"ALIVE": "#2e7d32", "SUSPECT": "#b26a00", "DEAD": "#c62828"}


def cluster_text(cluster: Cluster) -> str:
    """`<Cluster ft-1a2b 4 nodes + 1 spare, generation 2, step 310>`."""
    config = cluster.config
    spares = f" + {config.spares} spare{'s' if config.spares != 1 else ''}" if config.spares else ""
    head = f"<Cluster {cluster.name} {config.nodes} node{'s' if config.nodes != 1 else ''}{spares}"
    if not cluster.running:
        return f"{head}, closed>"
    generations = [event.generation for event in cluster.events if event.kind == "membership.changed"]
    steps = [event.step for event in cluster.events if event.kind == "step.committed"]
    more = (f", generation {generations[-1]}" if generations else "") + (f", step {steps[-1]}" if steps else "")
    return f"{head}{more}>"


def cluster_html(cluster: Cluster) -> str:
    """The nodes as a table."""
    if not cluster.running:
        return f"<p>{escape(cluster_text(cluster))}</p>"
    try:
        status = cluster.status()
    except FtlabError as error:
        return f"<p>{escape(cluster_text(cluster))}: {escape(error.message)}</p>"
    rows = "".join(_row(node) for node in status["nodes"])
    head = "".join(f'<th style="text-align:left;padding:2px 12px">{name}</th>'
                   for name in ("node", "address", "verdict", "role", "ranks", "step"))
    return (f'<div style="font-family:system-ui,sans-serif;background:#fff;color:#222;padding:10px 14px;'
            f'border:1px solid #ddd;border-radius:6px;display:inline-block">'
            f'<div style="font-weight:600;margin-bottom:6px">{escape(cluster_text(cluster)[1:-1])}</div>'
            f'<table style="border-collapse:collapse;font-size:13px"><thead><tr>{head}</tr></thead>'
            f'<tbody>{rows}</tbody></table></div>')


def _row(node: dict[str, Any]) -> str:
    steps = [worker["step"] for worker in node["workers"].values()]
    verdict = node["verdict"] if node["joined"] else "starting"
    cells = [escape(node["name"]), escape(node["address"]),
             f'<span style="color:{_COLOURS.get(verdict, "#555")};font-weight:600">{escape(verdict)}</span>',
             escape(node["role"]), escape(", ".join(map(str, node["ranks"])) or "–"), str(max(steps, default="–"))]
    return "<tr>" + "".join(f'<td style="text-align:left;padding:2px 12px">{cell}</td>' for cell in cells) + "</tr>"
