"""Labs as pages to look at: the student's view with the outputs of the reference, pictures included."""

from __future__ import annotations

import copy
import re
from pathlib import Path

from nbconvert import HTMLExporter
from nbformat import NotebookNode

from ftlab.grading.course import cells

_SCRIPT = re.compile(r"<script\b.*?</script>", re.DOTALL)


def render(released: NotebookNode, executed: NotebookNode, title: str) -> str:
    """One self-contained page: the cells as students get them, with what the solved notebook put out.

    Of hidden checks and of stubs nothing is shown but their released text. Widgets are left out: they would need the
    network; each of our views has a static twin.
    """
    outputs = {cell.id: cell.outputs for cell in executed.cells if cell.cell_type == "code"}
    shown = copy.deepcopy(released)
    for cell in shown.cells:
        if cell.cell_type == "code" and not cells.hidden(cell) and cells.kind(cell) != "stub":
            cell.outputs = [_static(output) for output in outputs.get(cell.id, [])]
    shown.metadata.pop("widgets", None)
    exporter = HTMLExporter(template_name="classic", embed_images=True)
    page, _ = exporter.from_notebook_node(shown, resources={"metadata": {"name": title}})
    return _SCRIPT.sub("", str(page))  # the template fetches scripts from the network that no page of ours needs


def write(page: str, folder: Path, lab: str) -> Path:
    """To `folder/lab.html`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{lab}.html"
    file.write_text(page, encoding="utf-8")
    return file


def _static(output: NotebookNode) -> NotebookNode:
    """An output without widgets and scripts; of lines that were written over, the last version."""
    kept = copy.deepcopy(output)
    if kept.output_type == "stream":
        kept.text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in kept.text.split("\n"))
    for kind in [name for name in kept.get("data", {}) if "widget" in name or "javascript" in name]:
        del kept.data[kind]
    return kept
