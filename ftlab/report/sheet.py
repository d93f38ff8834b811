"""A bench as one self-contained HTML file: its picture, its table, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ftlab.report.canvas import FONT


def sheet(title: str, picture: str, rows: Sequence[Sequence[str]], words: Sequence[str]) -> str:
    """The file's text; the first of `rows` is the table's head."""
    head, *body = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
                   for tag, row in zip(["th", *["td"] * (len(rows) - 1)], rows, strict=True))
    table = "".join(f"<tr>{row}</tr>" for row in body)
    told = "".join(f"<p>{escape(line)}</p>" for line in words)
    return (f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}</title>'
            f"<style>{_STYLE}</style></head><body><main>{picture}{told}"
            f"<table><thead><tr>{head}</tr></thead><tbody>{table}</tbody></table></main></body></html>")


_STYLE = f"""
body{{margin:0;padding:24px 16px;background:#f1f3f5;color:#22262b;font:14px/1.5 {FONT}}}
main{{box-sizing:border-box;max-width:1018px;margin:0 auto;padding:24px 28px;background:#fff;border:1px solid #e0e4e8;
 border-radius:8px}}
table{{width:100%;margin:16px 0;border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}}
th,td{{padding:7px 16px 7px 0;border-bottom:1px solid #e6e9ec;text-align:right}}
th{{font-size:12px;font-weight:400;color:#5d6670}}
p{{margin:4px 0 0;color:#5d6670;font-size:13px}}
"""
