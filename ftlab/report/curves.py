"""Curves over steps: a loss, a limit, the memory that is used. A value that is no number leaves a gap, and a cross.

    draw({"with my monitor": losses, "without": others}, "The loss of two runs", unit="loss")

In a notebook that is shown as the last expression of a cell, or by `display`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ftlab.report.canvas import FAINT, GENERATIONS, INSET, RED, SOFT, Scale, document, line, tag, text, text_width

_GUTTER, _TOP, _FLOOR, _HEIGHT = 64, 44, 224, 262


class Picture:
    """SVG that a notebook shows."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def _repr_html_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<a picture of {len(self.svg)} bytes>"


def draw(curves: Mapping[str, Sequence[float]], title: str, unit: str = "", width: int = 820) -> Picture:
    """Curves as a picture for a notebook."""
    return Picture(curves_svg(curves, title, unit, width))


def curves_svg(curves: Mapping[str, Sequence[float]], title: str, unit: str = "", width: int = 820) -> str:
    """One line per name over the numbers 0, 1, 2, ...; the vertical axis begins at 0, or below if values do."""
    numbers = [value for curve in curves.values() for value in curve if math.isfinite(value)]
    longest = max((len(curve) for curve in curves.values()), default=0)
    if not numbers:
        return document(width, 44, [text(INSET, 27, "there is nothing to draw", fill=SOFT)], label="empty picture")
    across = Scale(begin=0, end=max(longest - 1, 1), left=_GUTTER, right=width - 16)
    up = Scale(begin=min(0.0, *numbers), end=max(*numbers, 1e-9), left=_FLOOR, right=_TOP)
    parts = [text(INSET, 18, title, bold=True, size=13), text(INSET, 34, unit, fill=SOFT)]
    parts += [line(_GUTTER, y, width - 16, y) + text(_GUTTER - 8, y + 4, f"{value:.3g}", fill=SOFT, anchor="end")
              for value in (up.begin, (up.begin + up.end) / 2, up.end) for y in [up(value)]]
    parts += [line(x, _FLOOR, x, _FLOOR + 5, stroke=FAINT) + text(x, _FLOOR + 18, label, fill=SOFT, anchor="middle")
              for x, label in across.ticks(0, 1)]
    right = width - 16.0
    for index, (name, curve) in enumerate(curves.items()):
        colour = GENERATIONS[index % len(GENERATIONS)]
        parts += _curve(curve, across, up, colour)
        right -= text_width(name) + 18
        parts += [text(right + 12, 18, name), tag("circle", cx=right + 4, cy=14, r=4, fill=colour)]
    return document(width, _HEIGHT, parts, label=f"{title}: {', '.join(curves)}")


def _curve(curve: Sequence[float], across: Scale, up: Scale, colour: str) -> list[str]:
    """The line, broken where a value is no number; a red cross on the axis marks these."""
    outline, crosses, joined = "", [], False
    for step, value in enumerate(curve):
        if math.isfinite(value):
            outline += f"{'L' if joined else 'M'}{across(step):.1f} {up(value):.1f}"
        else:
            x = across(step)
            crosses.append(tag("path", d=f"M{x - 3:.1f} {_FLOOR - 3}l6 6m0 -6l-6 6", stroke=RED, stroke_width=1.6))
        joined = math.isfinite(value)
    return [tag("path", d=outline, stroke=colour, stroke_width=1.8, fill="none", stroke_linejoin="round"), *crosses]
