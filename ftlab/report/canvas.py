"""The pencils: small pure functions that return SVG text, in the colours of `theme`.

Nothing here knows about training. Every string that comes from outside is escaped in `tag` or `text`; no element
has an id, so any number of pictures can stand on one page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ftlab.messages import PHASES
from ftlab.report.theme import FONT, colour

INK, SOFT, TICK, FAINT, HAIR, PAPER, AREA, QUIET, HATCH = map(
    colour, ("ink", "soft", "tick", "faint", "hair", "paper", "area", "quiet", "hatch"))
RED, GREEN, AMBER = map(colour, ("red", "green", "amber"))
GENERATIONS = tuple(colour(f"generation-{number}") for number in range(1, 6))
PHASE_COLOURS = {phase: colour(f"phase-{number}") for number, phase in enumerate(PHASES, 1)}
INSET = 4  # pixels between a picture's edge and its outermost marks


def generation_colour(generation: int | None) -> str:
    """The colour of a generation; the palette starts again after its last colour."""
    return GENERATIONS[((generation or 1) - 1) % len(GENERATIONS)]


def tag(name: str, *inside: str, hint: str = "", **attributes: str | float) -> str:
    """One SVG element; `inside` is markup already, `hint` becomes the native tooltip, `a_b=` becomes `a-b=`."""
    head = "".join(f' {key.replace("_", "-")}="{escape(_plain(value))}"' for key, value in attributes.items())
    body = (f"<title>{escape(hint)}</title>" if hint else "") + "".join(inside)
    return f"<{name}{head}>{body}</{name}>" if body else f"<{name}{head}/>"


def text(
    x: float, y: float, content: str, *, fill: str = INK, anchor: str = "start", size: float = 11, bold: bool = False,
    halo: bool = False, hint: str = "",
) -> str:
    """A line of text on its baseline; a halo keeps it readable on top of lines."""
    look = {"font_weight": "600"} if bold else {}
    if halo:
        look |= {"stroke": PAPER, "stroke_width": "3", "stroke_linejoin": "round", "paint_order": "stroke"}
    return tag("text", escape(content), hint=hint, x=x, y=y, fill=fill, text_anchor=anchor, font_size=size, **look)


def line(x0: float, y0: float, x1: float, y1: float, *, stroke: str = HAIR, width: float = 1, dash: str = "") -> str:
    """A straight line."""
    look = {"stroke_dasharray": dash} if dash else {}
    return tag("line", x1=x0, y1=y0, x2=x1, y2=y1, stroke=stroke, stroke_width=width, **look)


def bar(
    x0: float, x1: float, y: float, height: float, *, fill: str, hint: str = "", radius: float = 2,
    **look: str | float,
) -> str:
    """A horizontal bar, never thinner than one pixel so that nothing that happened disappears."""
    return tag("rect", hint=hint, x=x0, y=y, width=max(x1 - x0, 1.0), height=height, rx=radius, fill=fill, **look)


def hatch(x0: float, x1: float, y: float, height: float, *, stroke: str = FAINT) -> str:
    """Diagonal strokes between x0 and x1, as one path (a pattern would need an id)."""
    count = int((x1 - x0 - height) // 7) + 1
    strokes = [f"M{x0 + 7 * index:.1f} {y + height:.1f}l{height:.1f} {-height:.1f}" for index in range(max(count, 0))]
    return tag("path", d="".join(strokes), stroke=stroke, stroke_width=0.8, fill="none") if strokes else ""


def glyph(kind: str, x: float, y: float, *, hint: str = "") -> str:
    """The symbol of a mark, about 10 pixels wide, centred on (x, y)."""
    if kind == "fault":
        return tag("path", hint=hint, d=f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z", fill=RED, stroke=PAPER)
    if kind == "heal":
        hollow = f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"
        return tag("path", hint=hint, d=hollow, fill=PAPER, stroke=GREEN, stroke_width=1.8)
    if kind == "suspect":
        return tag("path", hint=hint, d=f"M{x:.1f} {y - 5:.1f}l5.5 9.5h-11z", fill=AMBER, stroke=PAPER)
    if kind == "dead":
        cross = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
        under = tag("path", d=cross, stroke=PAPER, stroke_width=5)
        return tag("g", under, tag("path", d=cross, stroke=INK, stroke_width=2.4), hint=hint, stroke_linecap="round")
    if kind == "found":
        return tag("rect", hint=hint, x=x - 4, y=y - 4, width=8, height=8, fill=AMBER, stroke=PAPER)
    if kind == "failed":
        return tag("rect", hint=hint, x=x - 4, y=y - 4, width=8, height=8, fill=RED, stroke=PAPER)
    return tag("circle", hint=hint, cx=x, cy=y, r=4.5, fill=GREEN, stroke=PAPER)


def document(width: float, height: float, parts: Sequence[str], *, label: str, told: str = "") -> str:
    """A complete `<svg>` on its own paper; `label` and `told` are what a screen reader says of it."""
    paper = tag("rect", width=width, height=height, fill=PAPER, rx=4)
    words = tag("desc", escape(told)) if told else ""
    return tag(
        "svg", words, paper, *parts, hint=label, xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_plain(width)} {_plain(height)}", width=width, height=height, font_family=FONT, font_size=11,
        role="img", aria_label=f"{label}. {told}" if told else label, style="max-width:100%;height:auto;display:block",
    )


def text_width(content: str, *, bold: bool = False, size: float = 11) -> float:
    """How wide a line of text is, on the generous side: fonts differ, and of the common ones DejaVu Sans is widest."""
    em = sum(_NARROW_EM if letter in _NARROW else _WIDE_EM if letter in _WIDE or letter.isupper() else _EM
             for letter in content)
    return em * size * (1.12 if bold else 1.0)


_NARROW, _NARROW_EM = frozenset(" .,:;!'|()[]{}ijlrtfI/-\N{MIDDLE DOT}"), 0.42
_WIDE, _WIDE_EM = frozenset("mw%@+=<>~#\N{RIGHTWARDS ARROW}\N{MINUS SIGN}"), 0.88
_EM = 0.645


def duration(seconds: float) -> str:
    """A length of time as people say it: `3.2 ms`, `312 ms`, `4.15 s`."""
    ms = seconds * 1000
    if 0 < ms < 0.1:
        return "<0.1 ms"
    if ms < 99.95:
        return f"{ms:.1f} ms"
    return f"{ms:.0f} ms" if ms < 9999.5 else f"{seconds:.1f} s"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Time to pixels; times outside the window land on its edge."""

    begin: float
    end: float
    left: float
    right: float

    def __call__(self, at: float) -> float:
        """Where a moment lies."""
        share = (at - self.begin) / max(self.end - self.begin, 1e-9)
        return self.left + min(max(share, 0.0), 1.0) * (self.right - self.left)

    def ticks(self, origin: float, unit: float, *, spacing: float = 90) -> list[tuple[float, str]]:
        """Round times as (pixel, label), counted from `origin` in `unit` seconds (0.001 counts milliseconds)."""
        step = _round_step((self.end - self.begin) / unit * spacing / max(self.right - self.left, 1))
        first = math.ceil((self.begin - origin) / unit / step - 1e-9)
        last = math.floor((self.end - origin) / unit / step + 1e-9)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        return [
            (self(origin + index * step * unit), f"{index * step:.{digits}f}".replace("-", "\N{MINUS SIGN}"))
            for index in range(first, last + 1)
        ]


@dataclass(frozen=True, kw_only=True)
class Squeezed(Scale):
    """A broken axis: all times before `cut` share the first `room` pixels, so that what comes after can be read."""

    cut: float
    room: float

    def __call__(self, at: float) -> float:
        """Where a moment lies."""
        if at < self.cut:
            return Scale(begin=self.begin, end=self.cut, left=self.left, right=self.left + self.room)(at)
        return self._after()(at)

    def ticks(self, origin: float, unit: float, *, spacing: float = 90) -> list[tuple[float, str]]:
        """Zero, and the round times behind the cut."""
        return [(self(origin), "0"), *self._after().ticks(origin, unit, spacing=spacing)]

    def _after(self) -> Scale:
        return Scale(begin=self.cut, end=self.end, left=self.left + self.room, right=self.right)


def _plain(value: str | float) -> str:
    """A number with at most one decimal, or the string itself."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def _round_step(rough: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(max(rough, 1e-9)))
    return next(power * lead for lead in (1, 2, 5, 10) if power * lead >= rough * (1 - 1e-9))
