"""A drill as pictures: the timeline of the whole run, the moments around its faults, and the recovery waterfall.

The overview answers who was there, when it broke, and for how long nothing was committed. A recovery is a sliver of
a run, so each of the first faults gets its own close-up in milliseconds, drawn with the same pencils.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ftlab.detection import Fault
from ftlab.events import Event
from ftlab.report.canvas import FAINT, INSET, SOFT, Scale, document, duration, glyph, line, text, text_width
from ftlab.report.frame import WIDE
from ftlab.report.labels import Symbol, legend, paragraph
from ftlab.report.panel import Panel
from ftlab.report.story import Story, read_story
from ftlab.report.waterfall import waterfall_svg

__all__ = ["timeline_svg", "waterfall_svg"]

_MOST_CLOSE_UPS = 3
_LEGEND = {"fault": "fault", "heal": "healed", "suspect": "SUSPECT", "dead": "DEAD",
           "failed": "worker failed", "restarted": "restarted", "found": "found by the monitor"}


@dataclass(frozen=True, kw_only=True)
class CloseUp:
    """A window of time around one fault, or around several that struck while it was healing."""

    begin: float
    end: float
    faults: tuple[Fault, ...]


def timeline_svg(events: Sequence[Event], *, width: int = WIDE) -> str:
    """The run as swimlanes, one per node, with a close-up in milliseconds around each of the first three faults."""
    story = read_story(events)
    if not story.lanes:
        return document(width, 44, [text(INSET, 27, "no nodes in this log", fill=SOFT)], label="empty timeline")
    parts, y = _overview(story, width)
    for window in close_ups(story):
        drawn, y = _close_up(story, window, y + 30, width)
        parts += drawn
    return document(width, y + 12, parts, label="Timeline of the run", told=_told(story))


def _told(story: Story) -> str:
    """The picture in words, for those who do not see it."""
    told = [f"{len(story.lanes)} nodes, {duration(story.end - story.start)}."]
    for fault in story.faults:
        seen = "not detected" if fault.detection_s is None else f"detected after {duration(fault.detection_s)}"
        stall = "" if fault.stall_s is None else f", training went on after {duration(fault.stall_s)}"
        told.append(f"{fault.name} at {duration(fault.at - story.start)}: {seen}{stall}.")
    return " ".join(told)


def close_ups(story: Story) -> list[CloseUp]:
    """The windows to enlarge; a fault inside the previous window widens that one instead."""
    windows: list[CloseUp] = []
    for fault in story.faults[:_MOST_CLOSE_UPS]:
        begin, end = fault.at, _settled_at(story, fault)
        room = max(end - begin, 0.03)
        until = min(end + 0.25 * room, story.end)
        for other in story.faults[fault.number:]:  # stop short of the next fault, unless it struck before this was over
            until = min(until, other.at - 0.02 * room) if other.at > end else until
        window = CloseUp(begin=max(begin - 0.2 * room, story.start), end=max(end, until), faults=(fault,))
        if windows and fault.at < windows[-1].end:
            last = windows.pop()
            window = CloseUp(begin=last.begin, end=max(last.end, window.end), faults=(*last.faults, fault))
        windows.append(window)
    return windows


def _settled_at(story: Story, fault: Fault) -> float:
    """When the run was whole again after a fault, as far as the log tells."""
    if fault.stalled_until is not None:
        return fault.stalled_until
    if fault.recovery is not None:
        return story.end
    back = [mark.at for mark in story.controller.marks if mark.kind == "restarted" and mark.at > fault.at]
    if fault.event.data.get("target") == "controller" and back:
        return back[0]
    return min(fault.healed_at or fault.at + 0.5, story.end)


def _gutter(story: Story, width: int) -> float:
    """Pixels left of time zero, for the lanes' names."""
    names = [lane.name for lane in (story.controller, *story.lanes)]
    return max(92.0 if width >= WIDE else 0.0, *(text_width(name) + 18 for name in names))


def _overview(story: Story, width: int) -> tuple[list[str], float]:
    scale = Scale(begin=story.start, end=story.end, left=_gutter(story, width), right=width - 16)
    panel = Panel(story=story, scale=scale, y=8, zero=story.start)
    panel.generations()
    panel.lanes()
    panel.stalls()
    panel.rate()
    panel.axis(unit=1.0, name="s")
    symbols, y = legend(_symbols(story), panel.y + 20, width, right=width >= WIDE)
    return [*panel.drawn(), *symbols], y - 10


def _close_up(story: Story, window: CloseUp, y: float, width: int) -> tuple[list[str], float]:
    names = " and ".join(f"#{fault.number} {fault.name}" for fault in window.faults)
    title = f"Close-up: {names}"
    where = f"{duration(window.end - window.begin)} of the run, from {window.begin - story.start:.2f} s"
    header, below = paragraph(y + 23, title, width, bold=True, size=12)
    if text_width(title, bold=True, size=12) + text_width(where) + 24 <= width:
        header.append(text(width - INSET, y + 23, where, fill=SOFT, anchor="end"))
    else:
        more, below = paragraph(below, where, width, fill=SOFT)
        header += more
    scale = Scale(begin=window.begin, end=window.end, left=_gutter(story, width), right=width - 16)
    panel = Panel(story=story, scale=scale, y=below - 5, zero=window.faults[0].at, close=True)
    panel.generations()
    panel.lanes()
    panel.stalls()
    panel.commits()
    panel.axis(unit=0.001, name="ms")
    return [line(INSET, y, width - INSET, y, stroke=FAINT), *header, *panel.drawn()], panel.y


def _symbols(story: Story) -> list[tuple[Symbol, str]]:
    """The symbols that this run used, and what they mean."""
    used = {mark.kind for lane in (story.controller, *story.lanes) for mark in lane.marks if mark.at >= story.start}
    return [(partial(glyph, kind), label) for kind, label in _LEGEND.items() if kind in used]
