"""Curves over steps: a loss, a limit, the memory that is used. A value that is no number leaves a gap, and a cross.

    draw({"with my monitor": losses, "without": others}, "The loss of two runs", unit="loss")

In a notebook that is shown as the last expression of a cell, or by `display`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ftlab.report.canvas import FAINT, GENERATIONS, INSET, RED, SOFT, Scale, document, line, tag, text
from ftlab.report.frame import WIDE, Picture
from ftlab.report.labels import Symbol, heading

__all__ = ["Picture", "curves_svg", "draw"]

_GUTTER, _DEPTH = 64, 180  # pixels left of the plot, and from its top to its floor


def draw(curves: Mapping[str, Sequence[float]], title: str, unit: str = "") -> Picture:
    """Curves as a picture for a notebook."""
    return Picture(lambda width: curves_svg(curves, title, unit, width))


def curves_svg(curves: Mapping[str, Sequence[float]], title: str, unit: str = "", width: int = WIDE) -> str:
    """One line per name over the numbers 0, 1, 2, ...; the vertical axis begins at 0, or below if values do."""
    numbers = [value for curve in curves.values() for value in curve if math.isfinite(value)]
    longest = max((len(curve) for curve in curves.values()), default=0)
    if not numbers:
        return document(width, 44, [text(INSET, 27, "there is nothing to draw", fill=SOFT)], label="empty picture")
    colours = {name: GENERATIONS[index % len(GENERATIONS)] for index, name in enumerate(curves)}
    entries: list[tuple[Symbol, str]] = [(partial(_disc, fill=colour), name) for name, colour in colours.items()]
    parts, y = heading(title, entries, width)
    plot = _Plot(across=Scale(begin=0, end=max(longest - 1, 1), left=_GUTTER, right=width - 16), floor=y + 14 + _DEPTH,
                 up=Scale(begin=min(0.0, *numbers), end=max(*numbers, 1e-9), left=0, right=_DEPTH))
    parts += [text(INSET, y, unit, fill=SOFT)] if unit else []
    for value in (plot.up.begin, (plot.up.begin + plot.up.end) / 2, plot.up.end):
        parts += [line(_GUTTER, plot.y(value), width - 16, plot.y(value)),
                  text(_GUTTER - 8, plot.y(value) + 4, f"{value:.3g}", fill=SOFT, anchor="end")]
    for x, label in plot.across.ticks(0, 1):
        parts += [line(x, plot.floor, x, plot.floor + 5, stroke=FAINT),
                  text(x, plot.floor + 18, label, fill=SOFT, anchor="middle")]
    for name, curve in curves.items():
        parts += _curve(curve, plot, colours[name])
    return document(width, plot.floor + 30, parts, label=f"{title}: {', '.join(curves)}")


@dataclass(frozen=True, kw_only=True)
class _Plot:
    """Where steps and values lie."""

    across: Scale
    up: Scale
    floor: float

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return self.floor - self.up(value)


def _disc(x: float, y: float, *, fill: str) -> str:
    return tag("circle", cx=x, cy=y, r=4, fill=fill)


def _curve(curve: Sequence[float], plot: _Plot, colour: str) -> list[str]:
    """The line, broken where a value is no number; a red cross on the axis marks these."""
    outline, crosses, joined = "", [], False
    for step, value in enumerate(curve):
        x = plot.across(step)
        if math.isfinite(value):
            outline += f"{'L' if joined else 'M'}{x:.1f} {plot.y(value):.1f}"
        else:
            cross = f"M{x - 3:.1f} {plot.floor - 3:.1f}l6 6m0 -6l-6 6"
            crosses.append(tag("path", d=cross, stroke=RED, stroke_width=1.6))
        joined = math.isfinite(value)
    return [tag("path", d=outline, stroke=colour, stroke_width=1.8, fill="none", stroke_linejoin="round"), *crosses]
