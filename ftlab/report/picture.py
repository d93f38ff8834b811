"""A drill as pictures: the timeline of the whole run, the moments around its faults, and the recovery waterfall.

The overview answers who was there, when it broke, and for how long nothing was committed. A recovery is a sliver of
a run, so each of the first faults gets its own close-up in milliseconds, drawn with the same pencils.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftlab.events import Event
from ftlab.report.canvas import FAINT, INK, INSET, SOFT, Scale, document, duration, glyph, line, text, text_width
from ftlab.report.panel import GUTTER, Panel
from ftlab.report.story import Fault, Story, read_story
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


def timeline_svg(events: Sequence[Event], *, width: int = 960) -> str:
    """The run as swimlanes, one per node, with a close-up in milliseconds around each of the first three faults."""
    story = read_story(events)
    if not story.lanes:
        return document(width, 44, [text(INSET, 27, "no nodes in this log", fill=SOFT)], label="empty timeline")
    parts, y = _overview(story, width)
    for window in close_ups(story):
        drawn, y = _close_up(story, window, y + 30, width)
        parts += drawn
    return document(width, y + 12, parts, label="timeline of the run")


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


def _overview(story: Story, width: int) -> tuple[list[str], float]:
    scale = Scale(begin=story.start, end=story.end, left=GUTTER, right=width - 16)
    panel = Panel(story=story, scale=scale, y=8, zero=story.start)
    panel.generations()
    panel.lanes()
    panel.stalls()
    panel.rate()
    panel.axis(unit=1.0, name="s")
    legend = _legend(story, panel.y + 20, width)
    return [*panel.drawn(), *legend], panel.y + 26


def _close_up(story: Story, window: CloseUp, y: float, width: int) -> tuple[list[str], float]:
    zero = window.faults[0].at
    names = " and ".join(f"#{fault.number} {fault.name}" for fault in window.faults)
    header = [
        line(INSET, y, width - INSET, y, stroke=FAINT),
        text(INSET, y + 23, f"Close-up: {names}", bold=True, size=12),
        text(width - INSET, y + 23, f"{duration(window.end - window.begin)} of the run, "
             f"from {window.begin - story.start:.2f} s", fill=SOFT, anchor="end"),
    ]
    scale = Scale(begin=window.begin, end=window.end, left=GUTTER, right=width - 16)
    panel = Panel(story=story, scale=scale, y=y + 34, zero=zero, close=True)
    panel.generations()
    panel.lanes()
    panel.stalls()
    panel.commits()
    panel.axis(unit=0.001, name="ms")
    return [*header, *panel.drawn()], panel.y


def _legend(story: Story, y: float, width: float) -> list[str]:
    """The symbols that this run used, right-aligned under the axis."""
    used = {mark.kind for lane in (story.controller, *story.lanes) for mark in lane.marks if mark.at >= story.start}
    parts, x = [], width - 16.0
    for kind, label in reversed(_LEGEND.items()):
        if kind in used:
            x -= text_width(label)
            parts += [text(x, y, label, fill=INK), glyph(kind, x - 10, y - 4)]
            x -= 34
    return parts
