"""A cluster at a glance: one line of text, or a small table for a notebook. Only reads."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from ftlab.errors import FtlabError
from ftlab.report.style import card_css

if TYPE_CHECKING:
    from ftlab.cluster.cluster import Cluster

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
    """The nodes as a table, and what the job is doing."""
    if not cluster.running:
        return f"<p>{escape(cluster_text(cluster))}</p>"
    try:
        status = cluster.status()
    except FtlabError as error:
        return f"<p>{escape(cluster_text(cluster))}: {escape(error.message)}</p>"
    return status_html(cluster_text(cluster)[1:-1], status)


def status_html(title: str, status: dict[str, Any]) -> str:
    """What a controller holds of its nodes and its job, as a card."""
    rows = "".join(_row(node) for node in status["nodes"])
    head = "".join(f"<th>{name}</th>" for name in ("node", "verdict", "role", "step", "address"))
    return (f'<div class="ftlab"><style>{card_css()}</style><section class="ftlab-card small"><b>{escape(title)}</b>'
            f'<p class="soft">{escape(job_text(status["job"]))}</p>'
            f'<table class="wraps"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></section></div>')


def job_text(job: dict[str, Any] | None) -> str:
    """`train is running, 40 steps committed`."""
    if job is None:
        return "no job yet"
    return f"{job['name']} {_DOING.get(job['status'], job['status'])}, {job['step']} steps committed"


def role_text(node: dict[str, Any]) -> str:
    """`rank 2` for a node that trains; else `ready` (gets a rank in the next job), `spare`, `starting` or `lost`."""
    ranks = ", ".join(map(str, node["ranks"]))
    return f"rank{'s' if len(node['ranks']) > 1 else ''} {ranks}" if ranks else str(node["role"])


_DOING = {"starting": "is starting", "running": "is running", "recovering": "is recovering",
          "restoring": "is recovering", "finished": "has finished", "failed": "has failed"}


def _row(node: dict[str, Any]) -> str:
    steps = [worker["step"] for worker in node["workers"].values()] if node["ranks"] else []
    verdict = node["verdict"] if node["joined"] else "starting"
    cells = [escape(node["name"]), f'<span class="{escape(verdict.lower())}">{escape(verdict)}</span>',
             escape(role_text(node)), str(max(steps, default="\N{EN DASH}")), escape(node["address"])]
    names = ["", "", "", "step ", ""]  # where the head is not shown
    return "<tr>" + "".join(f'<td data-name="{name}">{cell}</td>'
                            for name, cell in zip(names, cells, strict=True)) + "</tr>"
