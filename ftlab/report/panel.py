"""One panel of a timeline: lanes from top to bottom over one window of time.

A panel grows downwards: each public method draws one band at `y` and moves `y` on. A lane is only as tall as its
labels need, so eight quiet nodes stay compact. Drawing goes to layers: behind the bars, the bars, the words on them,
and the marks in front.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ftlab.detection import Recovery
from ftlab.report.canvas import (
    AMBER,
    AREA,
    FAINT,
    GREEN,
    HAIR,
    HATCH,
    INK,
    PAPER,
    PHASE_COLOURS,
    QUIET,
    RED,
    SOFT,
    TICK,
    Scale,
    bar,
    duration,
    generation_colour,
    glyph,
    hatch,
    line,
    tag,
    text,
    text_width,
)
from ftlab.report.labels import Shelves, Spot, wrap
from ftlab.report.story import Lane, Mark, Spell, Story

BAR, GAP, SHELF, STRIP = 16, 7, 16, 32
_COLOURS = {"fault": RED, "heal": GREEN, "suspect": AMBER, "dead": INK, "failed": RED, "restarted": GREEN,
            "found": AMBER}


@dataclass(kw_only=True)
class Panel:
    """The bands of one window; with `close` every mark is labelled, else only faults carry words."""

    story: Story
    scale: Scale
    y: float  # where the next band begins
    zero: float  # the time that people see as 0
    close: bool = False
    lanes_top: float = 0.0
    nodes_top: float = 0.0
    boundaries: list[tuple[float, float, str]] = field(default_factory=list)  # x, top, colour of generation lines
    back: list[str] = field(default_factory=list)
    bars: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    front: list[str] = field(default_factory=list)

    def drawn(self) -> list[str]:
        """Everything so far, in painting order."""
        return [*self.back, *self.bars, *self.labels, *self.front]

    def generations(self) -> None:
        """The top band: where each generation begins, and its world."""
        shelves = Shelves(self.scale.left - 8, self.scale.right + 14)
        placed = []
        for at, generation, world in self._memberships():
            x, label = self.scale(at), f"gen {generation} \N{MIDDLE DOT} {world} ranks"
            reach = text_width(label, bold=True) + 8
            spot = shelves.put((x, x + reach), (x - reach, x))
            placed.append((x, label, generation_colour(generation), self._in_view(at), spot))
        self.y += len(shelves.taken) * SHELF + 8
        self.lanes_top = self.y
        for x, label, colour, begins, spot in placed:
            y = self.lanes_top - 6 - spot.shelf * SHELF
            dx, anchor = (-5, "end") if spot.side else (5 + spot.shift, "start")
            self.front.append(text(x + dx, y, label, fill=colour, bold=True, anchor=anchor, halo=True))
            if begins:
                self.boundaries.append((x, y - 9, colour))

    def lanes(self) -> None:
        """The controller's thin lane, then one lane per node; shades and generation lines cross them all."""
        self._controller()
        self.nodes_top = self.y - GAP / 2
        for lane in self.story.lanes:
            if self.close and not any(self._overlaps(spell.begin, spell.end) for spell in lane.spells):
                continue  # it was gone before, or came later
            y = self._open_lane(lane, BAR)
            for spell in lane.spells:
                if self._overlaps(spell.begin, spell.end):
                    self._spell(lane.name, spell, y)
        for x, top, colour in self.boundaries:
            self.bars.append(line(x, top, x, self.y, stroke=colour, width=1.2))

    def stalls(self) -> None:
        """Shades over the lanes while nothing was committed, with their lengths underneath."""
        shelves = Shelves(0, self.scale.right + 14)
        bottom = self.y
        for begin, end, ended in self.story.stalls():
            if not self._overlaps(begin, end):
                continue
            x0, x1 = self.scale(begin), max(self.scale(end), self.scale(begin) + 2)
            for layer, top in ((self.back, self.lanes_top), (self.bars, self.nodes_top)):  # the bars get a tint as well
                layer.append(bar(x0, x1, top, bottom - top, fill=RED, fill_opacity=0.06, radius=0))
            label = f"stalled {duration(end - begin)}" if ended else "never trained again"
            half, middle = text_width(label, bold=True) / 2 + 4, (x0 + x1) / 2
            spot = shelves.put((middle - half, middle + half))
            y = bottom + 13 + spot.shelf * SHELF
            self.bars.append(line(x0, bottom + 1, x1, bottom + 1, stroke=RED, width=2))
            self.front.append(text(middle + spot.shift, y, label, fill=RED, bold=True, anchor="middle", halo=True))
        self.y += len(shelves.taken) * SHELF + 8

    def rate(self) -> None:
        """Committed steps per second over the whole run, as an area; a stall is a hole in it."""
        pieces = self._rates()
        floor = self.y + STRIP
        self.front.append(text(self.scale.left - 12, floor - 2, "steps/s", anchor="end", fill=SOFT))
        if pieces:
            typical = sorted(rate for _, _, rate in pieces)
            most = typical[int(len(typical) * 0.95)] * 1.1  # a few hurried steps must not flatten all others
            outline = [f"M{pieces[0][0]:.1f} {floor:.1f}"]
            for x0, x1, rate in pieces:
                top = floor - min(rate / most, 1.0) * STRIP
                outline.append(f"L{x0:.1f} {top:.1f}L{x1:.1f} {top:.1f}")
            outline.append(f"L{pieces[-1][1]:.1f} {floor:.1f}z")
            middle = typical[len(typical) // 2]
            hint = f"{middle:.0f} steps/s in the middle of the range; last step {self.story.commits[-1][1]}"
            self.bars.append(tag("path", hint=hint, d="".join(outline), fill=AREA))
            self.front.append(text(self.scale.left - 12, floor - 16, f"{middle:.0f}", anchor="end", bold=True))
        self.y = floor

    def commits(self) -> None:
        """One tick per committed step; the last before a stall and the first after it are named."""
        self.front.append(text(self.scale.left - 12, self.y + 10, "steps", anchor="end", fill=SOFT))
        visible = [(at, step) for at, step in self.story.commits if self._in_view(at)]
        named: dict[float, int] = {}
        for begin, end, ended in self.story.stalls():
            if not self._in_view(begin):
                continue
            named |= dict([(at, step) for at, step in visible if at <= begin][-1:])
            named |= {at: step for at, step in visible if ended and at == end}
        for at, _ in visible:
            x = self.scale(at)
            self.bars.append(line(x, self.y, x, self.y + 12, stroke=INK if at in named else TICK, width=1.2))
        shelves = Shelves(self.scale.left - 4, self.scale.right + 14)
        for at, step in named.items():
            label = f"step {step}"
            x, reach = self.scale(at), text_width(label) + 6
            before, after = (x - reach, x + 2), (x - 2, x + reach)
            spot = shelves.put(before, after) if at < self.zero else shelves.put(after, before)
            left_of_it = (spot.side == 0) == (at < self.zero)
            dx, anchor = (2, "end") if left_of_it else (-2, "start")
            self.front.append(text(x + dx + spot.shift, self.y + 25 + spot.shelf * SHELF, label, anchor=anchor))
        self.y += 14 + SHELF * max(1, len(shelves.taken))

    def axis(self, unit: float, name: str) -> None:
        """Round times under everything, and hairlines up through the lanes."""
        self.y += 4
        ticks = self.scale.ticks(self.zero, unit)
        self.bars.append(line(self.scale.left, self.y, self.scale.right, self.y, stroke=FAINT))
        for x, label in ticks:
            self.back.append(line(x, self.lanes_top, x, self.y, stroke=HAIR))
            self.bars.append(text(x, self.y + 15, label, fill=SOFT, anchor="middle"))
        self.bars.append(text(self.scale.left - 26, self.y + 15, name, fill=SOFT, anchor="end"))
        self.y += 20

    def _in_view(self, at: float) -> bool:
        return self.scale.begin <= at <= self.scale.end

    def _overlaps(self, begin: float, end: float) -> bool:
        return begin < self.scale.end and end > self.scale.begin

    def _memberships(self) -> list[tuple[float, int, int]]:
        """Those that begin in view, and the one that holds when the view opens."""
        before = [one for one in self.story.memberships if one[0] < self.scale.begin]
        return [*before[-1:], *(one for one in self.story.memberships if self._in_view(one[0]))]

    def _controller(self) -> None:
        """The controller is a thin line; in a close-up the phases of a recovery lie on it."""
        recoveries = [one for one in self.story.recoveries if self._overlaps(one.began, one.end or self.story.end)]
        height = BAR if self.close and any(one.spans for one in recoveries) else 8
        y = self._open_lane(self.story.controller, height)
        for spell in self.story.controller.spells:
            if self._overlaps(spell.begin, spell.end):
                x0, x1 = self.scale(spell.begin), self.scale(spell.end)
                self.bars.append(bar(x0, x1, y + height / 2 - 1.5, 3, fill=FAINT, hint="the controller is up"))
        free = self.story.start  # one that was abandoned makes way for the next
        for recovery in recoveries:
            self.bars += self._recovery(recovery, y, height, free)
            free = recovery.end if recovery.end is not None else self.story.end

    def _recovery(self, recovery: Recovery, y: float, height: float, free: float) -> list[str]:
        """One bar per phase, each until the next begins; one plain bar where the phases are not known."""
        phases: list[tuple[float, float, str]] = []
        for phase in PHASE_COLOURS:
            spans = [span for span in recovery.spans if span.get("phase") == phase]
            if spans:
                begin, end = min(float(span["begin"]) for span in spans), max(float(span["end"]) for span in spans)
                phases.append((begin, end, phase))
        if not phases:
            end = recovery.end if recovery.end is not None else self.story.end
            word = "abandoned" if recovery.abandoned else "recovery"
            phases = [(recovery.began, end, f"{word} ({recovery.cause})")]
        parts = []
        for index, (begin, end, phase) in enumerate(phases):
            until = min(end, phases[index + 1][0]) if index + 1 < len(phases) else end
            x0, x1 = self.scale(max(begin, free)), self.scale(max(until, begin, free))
            hint = f"{phase}: {duration(end - begin)}"
            parts.append(bar(x0, x1 - 0.5, y, height, fill=PHASE_COLOURS.get(phase, SOFT), hint=hint))
            if height >= BAR:
                words = phase.split(" ")
                shorter = (" ".join(words[1:]), words[-1]) if phase in PHASE_COLOURS else (words[0],)
                parts.append(_inside(x0, x1, y, (phase, *shorter)))
        return parts

    def _spell(self, node: str, spell: Spell, y: float) -> None:
        x0, x1 = self.scale(spell.begin), self.scale(spell.end)
        colour, ranks = generation_colour(spell.generation), _ranks(spell.ranks)
        if spell.state == "member":
            hint = f"{node}: {ranks}, generation {spell.generation}"
            self.bars.append(bar(x0, x1 - 0.5, y, BAR, fill=colour, hint=hint))
            self.labels.append(_inside(x0, x1, y, (ranks, ranks.split(" ")[-1])))
        elif spell.state == "silent":
            self.bars.append(bar(x0 + 0.5, x1, y + 0.5, BAR - 1, fill=PAPER, stroke=colour, stroke_dasharray="3 2",
                                 hint=f"{node}: hit, not yet found dead"))
            self.labels.append(_inside(x0, x1, y, ("silent",), fill=SOFT))
        else:
            self.bars += [bar(x0 + 0.5, x1 - 1, y + 0.5, BAR - 1, fill=QUIET, stroke=FAINT,
                              hint=f"{node}: {spell.state}"),
                          hatch(x0 + 1, x1 - 1, y + 1, BAR - 2, stroke=HATCH)]
            self.labels.append(_inside(x0, x1, y, (spell.state,), fill=SOFT, halo=True))

    def _open_lane(self, lane: Lane, height: float) -> float:
        """Make room for a lane and draw its name and marks; returns the top of its bar."""
        shelves = Shelves(self.scale.left - 8, self.scale.right + 14)
        on_shelf, on_bar = [], []
        for mark in sorted(lane.marks, key=lambda mark: mark.kind != "fault"):
            if not self._in_view(mark.at):
                continue
            x, label = self.scale(mark.at), self._label(mark)
            quiet = not self.close and mark.kind not in ("fault", "heal")
            if quiet or not label:
                on_bar.append((mark, x, ""))
            elif self._fits_behind(lane, mark, label):
                on_bar.append((mark, x, label))
            else:
                reach = text_width(label, bold=True) + 12
                on_shelf.append((mark, x, label, shelves.put((x - 7, x + reach), (x - reach, x + 7))))
        y = self.y + len(shelves.taken) * SHELF
        for mark, x, label, spot in on_shelf:
            self.front += _flag(mark, x, y, label, height, spot)
        for mark, x, label in on_bar:
            self.front += [glyph(mark.kind, x, y + height / 2, hint=mark.detail)]
            if label:
                self.front.append(text(x + 9, y + height / 2 + 4, label, fill=_COLOURS[mark.kind], bold=True,
                                       halo=True))
        self.front.append(text(self.scale.left - 12, y + height / 2 + 4, lane.name, anchor="end"))
        self.y = y + height + GAP
        return y

    def _label(self, mark: Mark) -> str:
        """The mark's words; in a close-up with the time since the fault. Where they are too long for the lane, the last
        ones stay away: `detail` has them all."""
        late = self.close and mark.text and mark.at > self.zero
        words = f"{mark.text} +{duration(mark.at - self.zero)}" if late else mark.text
        room = self.scale.right - self.scale.left
        return wrap(words, room, bold=True)[0] if words else ""

    def _fits_behind(self, lane: Lane, mark: Mark, label: str) -> bool:
        """Whether the empty lane behind a DEAD mark has room for its words."""
        x = self.scale(mark.at)
        reach = x + 14 + text_width(label, bold=True)
        free = all(self.scale(spell.begin) > reach or spell.end <= mark.at for spell in lane.spells)
        alone = not any(x <= self.scale(other.at) <= reach for other in lane.marks if other is not mark)
        return mark.kind == "dead" and reach < self.scale.right + 14 and free and alone

    def _rates(self) -> list[tuple[float, float, float]]:
        """(from, to, steps per second) between commits, in pieces at least three pixels wide."""
        pieces, last, count = [], None, 0
        for at, _ in self.story.commits:
            if last is None:
                last = at
                continue
            count += 1
            if self.scale(at) - self.scale(last) >= 3:
                pieces.append((self.scale(last), self.scale(at), count / (at - last)))
                last, count = at, 0
        return pieces


def _flag(mark: Mark, x: float, y: float, label: str, height: float, spot: Spot) -> list[str]:
    """A mark above its bar: the symbol, its words beside it, and a stem down to the bar's foot."""
    at = y - SHELF / 2 - spot.shelf * SHELF
    dx, anchor = (-9, "end") if spot.side else (9 + spot.shift, "start")
    colour = _COLOURS[mark.kind]
    return [
        line(x, at, x, y + height, stroke=colour, width=1.4),
        glyph(mark.kind, x, at, hint=mark.detail),
        text(x + dx, at + 4, label, fill=colour, bold=True, anchor=anchor, halo=True),
    ]


def _inside(
    x0: float, x1: float, y: float, choices: tuple[str, ...], *, fill: str = PAPER, halo: bool = False,
) -> str:
    """The longest of the labels that fits into a bar, or nothing."""
    for label in choices:
        if text_width(label) + 10 <= x1 - x0:
            return text(x0 + 6, y + BAR / 2 + 4, label, fill=fill, halo=halo)
    return ""


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    together = ranks == tuple(range(ranks[0], ranks[-1] + 1)) if ranks else False
    return f"ranks {ranks[0]}\N{EN DASH}{ranks[-1]}" if together else "ranks " + ",".join(map(str, ranks))
