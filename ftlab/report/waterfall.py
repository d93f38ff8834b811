"""The recovery waterfall: where the milliseconds between a fault and the next committed step went.

One row per recovery step, grouped by the three phases. When several ranks report a step, the pale bar reaches from
the first to begin to the last to end, and one thin line per rank inside it shows who was slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftlab.messages import PHASES
from ftlab.report.canvas import (
    FAINT,
    HAIR,
    INK,
    INSET,
    PAPER,
    PHASE_COLOURS,
    SOFT,
    Scale,
    Squeezed,
    bar,
    document,
    duration,
    line,
    tag,
    text,
    text_width,
)
from ftlab.report.frame import WIDE

ROW, HEAD, GUTTER, MARGIN = 20, 30, 110, 100
_MOST_RANK_LINES = 7  # more would be thinner than a pixel
_TOO_LONG = 0.6  # share of the recovery from which on `detect` is drawn with a broken axis


@dataclass(frozen=True, kw_only=True)
class Row:
    """One recovery step: its envelope, and the spans in it."""

    phase: str
    name: str
    begin: float
    end: float
    spans: tuple[tuple[float, float, str], ...]  # begin, end, by


def waterfall_svg(spans: Sequence[Mapping[str, Any]], *, width: int = WIDE) -> str:
    """The waterfall of one recovery, in milliseconds; `spans` are those of a `Recovery`, the first begins at zero."""
    rows = waterfall_rows(spans)
    if not rows:
        empty = text(INSET, 27, "no recovery steps were recorded", fill=SOFT)
        return document(width, 44, [empty], label="empty waterfall")
    zero = min(row.begin for row in rows)
    end = max(row.end for row in rows)
    scale = _scale(rows, zero, end, width)
    parts: list[str] = []
    y = 8.0
    for phase in dict.fromkeys(row.phase for row in rows):
        members = [row for row in rows if row.phase == phase]
        parts += _phase(members, scale, y, width)
        y += HEAD + ROW * len(members)
    total = _total(scale, zero, end, y, width)
    told = ", ".join(f"{row.name} {duration(row.end - row.begin)}" for row in rows)
    return document(width, y + 74, [_grid(scale, zero, y + 6), *parts, *total], label="Recovery waterfall", told=told)


def waterfall_rows(spans: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The steps that happened, in the protocol's order; steps it does not know come last in their phase."""
    grouped: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for span in spans:
        begin, end = float(span["begin"]), float(span["end"])
        key = str(span.get("phase", "")), str(span["name"])
        grouped.setdefault(key, []).append((begin, max(begin, end), str(span.get("by", ""))))
    rows = [
        Row(phase=phase, name=name, begin=min(one[0] for one in found), end=max(one[1] for one in found),
            spans=tuple(sorted(found, key=lambda one: one[2])))
        for (phase, name), found in grouped.items()
    ]
    return sorted(rows, key=_protocol_order)


def _scale(rows: Sequence[Row], zero: float, end: float, width: float) -> Scale:
    """True to scale, unless waiting for the verdict took most of the time: then that part is cut short, visibly."""
    left, right = GUTTER, width - (MARGIN if width >= WIDE else 62)  # in a narrow one nobody is named
    detected = next((row.end for row in rows if row.name == "detect"), zero)
    if detected < end and detected - zero > _TOO_LONG * (end - zero):
        return Squeezed(begin=zero, end=end, left=left, right=right, cut=detected, room=min(130, 0.4 * (right - left)))
    return Scale(begin=zero, end=end, left=left, right=right)


def _break(scale: Scale, y: float) -> str:
    """Two slashes across a line that was cut short."""
    if not isinstance(scale, Squeezed):
        return ""
    x = scale.left + scale.room / 2
    gap = tag("path", d=f"M{x - 6:.1f} {y + 9:.1f}l6 -18h6l-6 18z", fill=PAPER)
    return gap + line(x - 6, y + 9, x, y - 9, stroke=SOFT) + line(x, y + 9, x + 6, y - 9, stroke=SOFT)


def _protocol_order(row: Row) -> tuple[int, int, float]:
    phases = list(PHASES)
    steps = PHASES.get(row.phase, ())
    phase = phases.index(row.phase) if row.phase in phases else len(phases)
    return phase, steps.index(row.name) if row.name in steps else len(steps), row.begin


def _phase(rows: Sequence[Row], scale: Scale, y: float, width: float) -> list[str]:
    """A heading with the phase's length, a bracket over its time, and its rows."""
    colour = PHASE_COLOURS.get(rows[0].phase, SOFT)
    begin, end = min(row.begin for row in rows), max(row.end for row in rows)
    heading = rows[0].phase or "other"
    parts = [
        text(INSET, y + 20, heading, fill=colour, bold=True),
        text(width - INSET, y + 20, duration(end - begin), fill=colour, bold=True, anchor="end"),
    ]
    x0, x1 = scale(begin), max(scale(end), scale(begin) + 1)
    x0_free = max(x0, INSET + text_width(heading, bold=True) + 12)
    if x0_free < x1:  # the bracket makes way for the heading
        parts.append(line(x0_free, y + 16, x1, y + 16, stroke=colour, width=1.5))
        parts.append(_break(scale, y + 16) if rows[0].name == "detect" else "")
    for index, row in enumerate(rows):
        parts += _row(row, scale, y + HEAD + index * ROW, colour, width)
    return parts


def _row(row: Row, scale: Scale, y: float, colour: str, width: float) -> list[str]:
    x0, x1 = scale(row.begin), max(scale(row.end), scale(row.begin) + 1.5)
    who = row.spans[0][2] if len(row.spans) == 1 else f"{len(row.spans)} ranks"
    slowest = max(row.spans, key=lambda span: span[1])
    hint = f"{row.name}: {duration(row.end - row.begin)} ({who})"
    if len(row.spans) > 1:
        hint += f", last to end: {slowest[2]}"
    return [
        text(GUTTER - 12, y + 12, row.name, anchor="end"),
        *_bars(row, scale, x0, x1, y + 2, colour, hint),
        _break(scale, y + 8.5) if row.name == "detect" else "",
        _value(duration(row.end - row.begin), x0, x1, y + 12, scale),
        text(width - INSET, y + 12, who, fill=SOFT, anchor="end") if width >= WIDE else "",
    ]


def _bars(row: Row, scale: Scale, x0: float, x1: float, y: float, colour: str, hint: str) -> list[str]:
    if len(row.spans) == 1:
        return [bar(x0, x1, y, 13, fill=colour, hint=hint)]
    parts = [bar(x0, x1, y, 13, fill=colour, fill_opacity=0.28)]
    if len(row.spans) <= _MOST_RANK_LINES:
        pitch = 13 / len(row.spans)
        parts += [bar(scale(begin), scale(end), y + index * pitch + pitch * 0.2, pitch * 0.6, fill=colour, radius=0)
                  for index, (begin, end, _) in enumerate(row.spans)]
    else:
        parts += [line(scale(end), y, scale(end), y + 13, stroke=colour, width=0.8) for _, end, _ in row.spans]
    return [tag("g", *parts, hint=hint)]


def _value(label: str, x0: float, x1: float, y: float, scale: Scale) -> str:
    """The length beside its bar: on the right, or on the left where the right has no room, or at its end."""
    reach = text_width(label) + 8
    if x1 + reach <= scale.right + 6:
        return text(x1 + 6, y, label, halo=True)
    beside = x0 - 6 if x0 - reach > scale.left else x1 - 4
    return text(beside, y, label, anchor="end", halo=True)


def _grid(scale: Scale, zero: float, bottom: float) -> str:
    return "".join(line(x, 12, x, bottom) for x, _ in scale.ticks(zero, 0.001))


def _total(scale: Scale, zero: float, end: float, y: float, width: float) -> list[str]:
    """The axis, and one line under it from zero to the end: the whole recovery."""
    parts = [line(scale.left, y + 6, scale.right, y + 6, stroke=FAINT)]
    for x, label in scale.ticks(zero, 0.001):
        parts.append(text(x, y + 22, label, fill=SOFT, anchor="middle"))
    parts += [_break(scale, y + 6), text(GUTTER - 26, y + 22, "ms", fill=SOFT, anchor="end")]
    parts += [
        line(INSET, y + 34, width - INSET, y + 34, stroke=HAIR),
        text(GUTTER - 12, y + 56, "total", anchor="end", bold=True),
        line(scale.left, y + 52, scale.right, y + 52, stroke=INK, width=1.5),
        line(scale.left, y + 48, scale.left, y + 56, stroke=INK, width=1.5),
        line(scale.right, y + 48, scale.right, y + 56, stroke=INK, width=1.5),
        _break(scale, y + 52),
        text(width - INSET, y + 56, duration(end - zero), anchor="end", bold=True),
    ]
    return parts
