"""The cost of a run against its checkpoint interval: the predicted curve, what was measured, and the best interval.

The interval's axis is logarithmic, because half and twice the best interval cost about the same. The picture takes
plain numbers, whoever computed them. Where the curve rises far above everything else it leaves through the top, so
that the bowl around the best interval can be read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from ftlab.report.canvas import (
    AMBER,
    FAINT,
    GENERATIONS,
    INK,
    INSET,
    PAPER,
    SOFT,
    Scale,
    document,
    line,
    tag,
    text,
    text_width,
)
from ftlab.report.frame import WIDE
from ftlab.report.labels import Symbol, apart, heading

Point = tuple[float, float]  # interval in seconds, share of the run lost

GUTTER, _DEPTH = 56, 254  # pixels left of the axis, and from the top of the plot to its floor
_CURVE = GENERATIONS[0]
_BOWL = 5  # the curve is drawn up to so many times its lowest value
_NARROWEST = 5.0  # the axis spans at least this factor, and so holds two round numbers or more


@dataclass(frozen=True, kw_only=True)
class Plane:
    """Where an interval and a share lie in the picture; what lies outside lands on its edge."""

    decades: Scale  # powers of ten of a second to pixels from the left
    shares: Scale  # shares to pixels above the axis
    top: float

    @property
    def floor(self) -> float:
        """Where the axis lies."""
        return self.top + _DEPTH

    def x(self, interval_s: float) -> float:
        """Pixels from the picture's left."""
        return self.decades(math.log10(interval_s))

    def y(self, share: float) -> float:
        """Pixels from the picture's top."""
        return self.floor - self.shares(share)


def interval_svg(
    curve: Sequence[Point], measured: Sequence[Point], best: float, title: str, *, width: int = WIDE,
) -> str:
    """The predicted share lost at each interval as a curve, measured runs as dots, the best interval marked.

    Points are (interval in seconds, share of the run lost); those that cannot be drawn are left out.
    """
    curve, measured = _drawable(curve), _drawable(measured)
    if not curve and not measured:
        empty = text(INSET, 27, "no interval was measured or predicted", fill=SOFT)
        return document(width, 44, [empty], label="empty interval picture")
    parts, y = heading(title, _entries(bool(curve), bool(measured)), width)
    plane = _plane(curve, measured, best, width, y + 42)
    parts += [
        text(INSET, y, "share of the run lost", fill=SOFT), *_grid(plane), *_best(curve, best, plane),
        *_line_of(curve, plane), *_ring(curve, best, plane), *(_dot(point, plane) for point in measured),
    ]
    told = f"Share of the run lost against the checkpoint interval; the best is {_number(best)} seconds."
    return document(width, plane.floor + 54, parts, label=title, told=told)


def _drawable(points: Sequence[Point]) -> list[Point]:
    return sorted((interval, share) for interval, share in points if _is_interval(interval) and math.isfinite(share))


def _is_interval(seconds: float) -> bool:
    return 0 < seconds < math.inf


def _plane(curve: Sequence[Point], measured: Sequence[Point], best: float, width: float, top: float) -> Plane:
    decades = [math.log10(interval) for interval, _ in (*curve, *measured, (best, 0.0)) if _is_interval(interval)]
    begin, end = min(decades), max(decades)
    short = max(0.0, math.log10(_NARROWEST) - (end - begin)) / 2
    return Plane(
        decades=Scale(begin=begin - short, end=end + short, left=GUTTER, right=width - 20),
        shares=Scale(begin=0.0, end=_highest(curve, measured), left=0.0, right=_DEPTH), top=top,
    )


def _highest(curve: Sequence[Point], measured: Sequence[Point]) -> float:
    """The share at the top of the picture: above all measured points, and above the bowl of the curve."""
    shares = [share for _, share in curve]
    bowl = min(max(shares), _BOWL * max(min(shares), 0.0)) if shares else 0.0
    return 1.12 * max(bowl, 0.001, *(share for _, share in measured))


def _entries(predicted: bool, measured: bool) -> list[tuple[Symbol, str]]:
    """What the line and the dots are."""
    curve: Symbol = lambda x, y: line(x - 6, y, x + 7, y, stroke=_CURVE, width=2.4)  # noqa: E731
    dots: Symbol = partial(_circle, fill=INK)
    return [*([(curve, "predicted")] if predicted else []), *([(dots, "measured")] if measured else [])]


def _grid(plane: Plane) -> list[str]:
    """Hairlines, round intervals below, shares on the left, and what the axes are."""
    left, right = plane.decades.left, plane.decades.right
    parts: list[str] = []
    for above, label in plane.shares.ticks(0.0, 0.01, spacing=44):
        y = plane.floor - above
        parts += [line(left, y, right, y), text(GUTTER - 10, y + 4, f"{label}%", fill=SOFT, anchor="end")]
    for x, label in _decade_ticks(plane.decades):
        parts += [line(x, plane.floor, x, plane.floor + 5, stroke=FAINT),
                  text(x, plane.floor + 19, label, fill=SOFT, anchor="middle")]
    words = "seconds of training between two checkpoints"
    return [*parts, line(left, plane.floor, right, plane.floor, stroke=FAINT),
            text((left + right) / 2, plane.floor + 40, words, fill=SOFT, anchor="middle")]


def _decade_ticks(decades: Scale) -> list[tuple[float, str]]:
    """1, 2 and 5 of each power of ten; only the powers where that would be crowded."""
    leads = (1, 2, 5) if decades.end - decades.begin <= 4.5 else (1,)
    powers = range(math.floor(decades.begin), math.ceil(decades.end) + 1)
    values = [lead * 10.0**power for power in powers for lead in leads]
    inside = [value for value in values if decades.begin - 1e-9 <= math.log10(value) <= decades.end + 1e-9]
    return apart([(decades(math.log10(value)), _number(value)) for value in inside])


def _best(curve: Sequence[Point], best: float, plane: Plane) -> list[str]:
    """A dashed line at the best interval, with its value on top, and what it costs."""
    if not _is_interval(best):
        return []
    x, share = plane.x(best), _share_at(curve, best)
    label = f"best {_number(best)} s" + ("" if share is None else f" \N{MIDDLE DOT} {_percent(share)} lost")
    half = text_width(label, bold=True) / 2
    middle = min(max(x, plane.decades.left + half), plane.decades.right - half)
    return [line(x, plane.top - 12, x, plane.floor, stroke=AMBER, width=1.4, dash="4 3"),
            text(middle, plane.top - 17, label, fill=AMBER, anchor="middle", bold=True)]


def _line_of(curve: Sequence[Point], plane: Plane) -> list[str]:
    """The prediction; its parts above the picture are cut off where they leave it."""
    outline: list[str] = []
    for sooner, later in pairwise(curve):
        part = _below(sooner, later, plane.shares.end)
        if part:
            begin, end = (f"{plane.x(interval):.1f} {plane.y(share):.1f}" for interval, share in part)
            joined = bool(outline) and outline[-1] == f"L{begin}"
            outline += [f"L{end}"] if joined else [f"M{begin}", f"L{end}"]
    look = {"stroke_linejoin": "round", "stroke_linecap": "round"}
    return [tag("path", d="".join(outline), stroke=_CURVE, stroke_width=2.4, fill="none", **look)] if outline else []


def _below(sooner: Point, later: Point, top: float) -> tuple[Point, Point] | None:
    """The part of a straight piece (on the logarithmic axis) that is not above `top`."""
    if sooner[1] > top and later[1] > top:
        return None
    if sooner[1] <= top and later[1] <= top:
        return sooner, later
    crossing = sooner[0] * (later[0] / sooner[0]) ** ((top - sooner[1]) / (later[1] - sooner[1])), top
    return (crossing, later) if sooner[1] > top else (sooner, crossing)


def _ring(curve: Sequence[Point], best: float, plane: Plane) -> list[str]:
    """The place on the curve where the best interval lies."""
    share = _share_at(curve, best)
    if share is None or share > plane.shares.end:
        return []
    return [tag("circle", cx=plane.x(best), cy=plane.y(share), r=6, fill=PAPER, stroke=AMBER, stroke_width=2.4)]


def _share_at(curve: Sequence[Point], interval_s: float) -> float | None:
    """The curve's share at an interval between two of its points."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= interval_s <= x1:
            return y0 if x0 == x1 else y0 + (y1 - y0) * math.log(interval_s / x0) / math.log(x1 / x0)
    return None


def _dot(point: Point, plane: Plane) -> str:
    interval, share = point
    hint = f"measured: {_percent(share)} lost with a checkpoint every {_number(interval)} s"
    return _circle(plane.x(interval), plane.y(share), fill=INK, hint=hint)


def _circle(x: float, y: float, *, fill: str, hint: str = "") -> str:
    return tag("circle", hint=hint, cx=x, cy=y, r=4.2, fill=fill, stroke=PAPER, stroke_width=1.4)


def _number(value: float) -> str:
    """Three digits at most, and no exponent for what an axis of seconds holds."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.01 else f"{share * 100:.2g}%"
