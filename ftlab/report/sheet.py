"""A bench as one self-contained HTML file: its picture, its table, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ftlab.report.frame import Draw, framed
from ftlab.report.page import whole_page


def sheet(title: str, draw: Draw, rows: Sequence[Sequence[str]], words: Sequence[str]) -> str:
    """The file's text; the first of `rows` is the table's head."""
    names, *body = rows
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = "".join(f"<tr>{_cells(names, row)}</tr>" for row in body)
    told = "".join(f'<p class="soft">{escape(line)}</p>' for line in words)
    return whole_page(title, f'<section class="ftlab-card">{framed(draw)}{told}<table class="numbers folds">'
                             f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></section>")


def _cells(names: Sequence[str], row: Sequence[str]) -> str:
    return "".join(f'<td data-name="{escape(name)}">{escape(cell)}</td>'
                   for name, cell in zip(names, row, strict=True))
