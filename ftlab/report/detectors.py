"""Failure detectors compared: how soon they notice a death against how often they cry wolf, one panel per condition.

Both axes are logarithmic. No alarm at all, which is what one wants to see, has a band of its own below the powers of
ten, with a lane for each detector so that they do not hide each other. Lower and further left is better. A thin line
runs from the median latency to the worst. The picture takes plain numbers, whoever computed them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from ftlab.report.canvas import (
    FAINT,
    GENERATIONS,
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

Place = tuple[float, float]  # x, y
Box = tuple[float, float, float, float]  # left, right, top, bottom

GUTTER = 56
_HEAD, _DECADES, _LANE = 26, 130, 20  # pixels of a panel: title, powers of ten, one lane of 0
_COLOURS = (GENERATIONS[0], GENERATIONS[1], GENERATIONS[2], GENERATIONS[4])
_NARROWEST = 5.0  # an axis spans at least this factor, and so holds two round numbers or more


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One setting of a detector."""

    median_s: float  # latency
    worst_s: float
    alarms: float  # false ones, per hour
    label: str  # the setting: "0.55 s", "phi 8"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One condition: the settings of each detector by its name, in rising order."""

    title: str
    curves: dict[str, Sequence[Mark]]


@dataclass(frozen=True, kw_only=True)
class Plane:
    """Where latencies and alarm rates lie in a panel."""

    latencies: Scale  # powers of ten of a second to pixels from the left
    rates: Scale  # powers of ten of alarms per hour to pixels above the lowest one
    top: float
    lanes: int  # of detectors without an alarm

    def x(self, seconds: float) -> float:
        """Pixels from the picture's left."""
        return self.latencies(math.log10(seconds))

    def y(self, alarms: float, lane: int = 0) -> float:
        """Pixels from the picture's top."""
        lowest = self.top + _HEAD + _DECADES
        return lowest - self.rates(math.log10(alarms)) if alarms > 0 else lowest + (lane + 1.2) * _LANE

    @property
    def floor(self) -> float:
        """The lower edge, below the last lane."""
        return self.y(0, self.lanes - 1) + _LANE / 2


def detectors_svg(panels: Sequence[Panel], title: str, *, width: int = WIDE) -> str:
    """Detection latency against false alarms per hour; settings that cannot be drawn are left out."""
    panels = [Panel(title=panel.title, curves={name: _drawable(curve) for name, curve in panel.curves.items()})
              for panel in panels]
    marks = [mark for panel in panels for curve in panel.curves.values() for mark in curve]
    if not marks:
        return document(width, 44, [text(INSET, 27, "no detector was measured", fill=SOFT)],
                        label="empty detector picture")
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    entries: list[tuple[Symbol, str]] = [(partial(_dot, colour=shade), name) for name, shade in colours.items()]
    parts, y = heading(title, entries, width)
    for panel in panels:
        plane = _plane(marks, y + 26, len(names), width)
        parts += _panel(panel, plane, colours)
        y = plane.floor + 40
    return document(width, y + 6, parts, label=title, told="Detection latency against false alarms per hour.")


def _drawable(curve: Iterable[Mark]) -> list[Mark]:
    return [mark for mark in curve if 0 < mark.median_s <= mark.worst_s < math.inf and 0 <= mark.alarms < math.inf]


def _plane(marks: Sequence[Mark], top: float, lanes: int, width: float) -> Plane:
    """The same axes for all panels, so that they compare."""
    latencies = [math.log10(seconds) for mark in marks for seconds in (mark.median_s, mark.worst_s)]
    rates = [math.log10(mark.alarms) for mark in marks if mark.alarms > 0] or [0.0, 1.0]
    short = max(0.0, math.log10(_NARROWEST) - (max(latencies) - min(latencies))) / 2
    low, high = math.floor(min(rates)), max(math.ceil(max(rates)), math.floor(min(rates)) + 1)
    return Plane(
        latencies=Scale(begin=min(latencies) - short, end=max(latencies) + short, left=GUTTER + 10, right=width - 30),
        rates=Scale(begin=low, end=high, left=0.0, right=_DECADES), top=top, lanes=lanes,
    )


def _panel(panel: Panel, plane: Plane, colours: dict[str, str]) -> list[str]:
    parts, words = _grid(panel.title, plane), list[str]()
    lanes = list(colours)
    places = {name: [(plane.x(mark.median_s), plane.y(mark.alarms, lanes.index(name))) for mark in curve]
              for name, curve in panel.curves.items()}
    taken = [box for name, curve in panel.curves.items() for box in _drawn(curve, places[name], plane)]
    taken.append((0.0, math.inf, plane.floor - 1, plane.floor + 1))
    for name, curve in panel.curves.items():
        parts += _curve(name, curve, places[name], plane, colours[name])
        words += _labels(curve, places[name], taken, colours[name])
    return parts + words


def _grid(title: str, plane: Plane) -> list[str]:
    """The condition's name, alarm rates on the left, latencies below."""
    left, right, beside = GUTTER, plane.latencies.right + 10, INSET + text_width(title, bold=True) + 10
    words = "false alarms per hour and node"
    below = beside + text_width(words) > right
    parts = [text(INSET, plane.top - (14 if below else 0), title, bold=True),
             text(INSET if below else beside, plane.top + 2 * below, words, fill=SOFT)]
    for power in range(round(plane.rates.begin), round(plane.rates.end) + 1):
        y = plane.y(10.0**power)
        parts += [line(left, y, right, y), text(GUTTER - 10, y + 4, f"{10.0**power:,g}", fill=SOFT, anchor="end")]
    middle = (plane.y(0, 0) + plane.y(0, plane.lanes - 1)) / 2
    parts += [text(GUTTER - 10, middle + 4, "0", fill=SOFT, anchor="end"),
              line(left, plane.floor, right, plane.floor, stroke=FAINT)]
    for x, label in _latency_ticks(plane.latencies):
        parts += [line(x, plane.floor, x, plane.floor + 5, stroke=FAINT),
                  text(x, plane.floor + 19, label, fill=SOFT, anchor="middle")]
    return [*parts, text(right, plane.floor + 36, "seconds from a death to the verdict", fill=SOFT, anchor="end")]


def _latency_ticks(latencies: Scale) -> list[tuple[float, str]]:
    powers = range(math.floor(latencies.begin), math.ceil(latencies.end) + 1)
    values = [lead * 10.0**power for power in powers for lead in (1, 2, 5)]
    inside = [value for value in values if latencies.begin - 1e-9 <= math.log10(value) <= latencies.end + 1e-9]
    return apart([(latencies(math.log10(value)), f"{value:.3g}") for value in inside])


def _curve(name: str, curve: Sequence[Mark], places: Sequence[Place], plane: Plane, colour: str) -> list[str]:
    """The settings, joined in their order; whiskers lie under the dots."""
    outline = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    joined = [tag("path", d=f"M{outline}", stroke=colour, stroke_width=1.6, fill="none", stroke_linejoin="round",
                  opacity="0.45")] if len(places) > 1 else []
    whiskers = [line(x, y, plane.x(mark.worst_s), y, stroke=colour, width=1)
                for mark, (x, y) in zip(curve, places, strict=True)]
    dots = [_dot(x, y, colour=colour, hint=_hint(name, mark)) for mark, (x, y) in zip(curve, places, strict=True)]
    return [*joined, *whiskers, *dots]


def _drawn(curve: Sequence[Mark], places: Sequence[Place], plane: Plane) -> list[Box]:
    """What a curve covers: its dots, its whiskers, and the lines between the dots, in small pieces."""
    boxes = [(x - 5, x + 5, y - 5, y + 5) for x, y in places]
    boxes += [(x, plane.x(mark.worst_s), y - 1, y + 1) for mark, (x, y) in zip(curve, places, strict=True)]
    for (x0, y0), (x1, y1) in pairwise(places):
        pieces = max(1, round(math.hypot(x1 - x0, y1 - y0) / 4))
        for piece in range(pieces + 1):
            x, y = x0 + (x1 - x0) * piece / pieces, y0 + (y1 - y0) * piece / pieces
            boxes.append((x - 1, x + 1, y - 1, y + 1))
    return boxes


def _labels(curve: Sequence[Mark], places: Sequence[Place], taken: list[Box], colour: str) -> list[str]:
    """Settings in words above their dots, or below, where they cover nothing that is drawn; those are added."""
    parts = []
    for mark, (x, y) in zip(curve, places, strict=True):
        half = text_width(mark.label, size=10) / 2 + 1
        for baseline in (y - 7, y + 14):
            box = (x - half, x + half, baseline - 9, baseline + 2)
            if box[0] > GUTTER and not any(_touch(box, other) for other in taken):
                taken.append(box)
                parts.append(text(x, baseline, mark.label, fill=colour, anchor="middle", size=10, halo=True))
                break
    return parts


def _touch(one: Box, other: Box) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def _hint(name: str, mark: Mark) -> str:
    return (f"{name}, {mark.label}: a death is noticed after {mark.median_s:.3g} s (at worst {mark.worst_s:.3g} s), "
            f"{mark.alarms:,.3g} false alarms per hour")


def _dot(x: float, y: float, *, colour: str, hint: str = "") -> str:
    return tag("circle", hint=hint, cx=x, cy=y, r=4.2, fill=colour, stroke=PAPER, stroke_width=1.4)
