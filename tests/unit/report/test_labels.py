"""No two labels of a picture touch, and none leaves it: computed from the widest common font, without a browser."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from ftlab.report.canvas import text_width
from ftlab.report.curves import curves_svg
from ftlab.report.detectors import Mark, Panel, detectors_svg
from ftlab.report.frame import NARROW, WIDE
from ftlab.report.interval import interval_svg
from ftlab.report.labels import heading, wrap
from ftlab.report.picture import timeline_svg, waterfall_svg
from ftlab.report.story import read_story
from tests.recorded import NAMES, load
from tests.unit.report.test_picture import SCENES

SVG = "{http://www.w3.org/2000/svg}"
WIDTHS = [NARROW, WIDE]
Box = tuple[str, float, float, float, float]


def boxes(svg: str) -> list[Box]:
    """(words, left, right, top, bottom) of every text."""
    found = []
    for each in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        size = float(each.get("font-size", 11))
        reach = text_width(each.text or "", bold=each.get("font-weight") == "600", size=size)
        left = float(each.attrib["x"]) - reach * {"start": 0.0, "middle": 0.5, "end": 1.0}[each.attrib["text-anchor"]]
        bottom = float(each.attrib["y"])
        found.append((each.text or "", left, left + reach, bottom - 0.72 * size, bottom))
    return found


def troubles(svg: str) -> list[str]:
    """Labels that touch each other, or leave the picture."""
    width = float(ElementTree.fromstring(svg).attrib["width"])
    found = boxes(svg)
    wrong = [f"{box[0]!r} leaves the picture: {box[1]:.0f} to {box[2]:.0f}" for box in found
             if box[1] < -3 or box[2] > width + 3]
    for number, one in enumerate(found):
        for other in found[number + 1:]:
            beside = min(one[2], other[2]) - max(one[1], other[1]) <= 2
            if not beside and min(one[4], other[4]) > max(one[3], other[3]):
                wrong.append(f"{one[0]!r} touches {other[0]!r}")
    return wrong


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_the_labels_of_recorded_drills_keep_apart(name: str, width: int) -> None:
    events = load(name)
    assert troubles(timeline_svg(events, width=width)) == []
    for recovery in read_story(events).recoveries:
        assert troubles(waterfall_svg(recovery.spans, width=width)) == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SCENES)
def test_the_labels_of_made_up_runs_keep_apart(name: str, width: int) -> None:
    events = SCENES[name]()
    assert troubles(timeline_svg(events, width=width)) == []
    for recovery in read_story(events).recoveries:
        assert troubles(waterfall_svg(recovery.spans, width=width)) == []


def crowded_panels() -> list[Panel]:
    """Detectors of which many settings lie close together."""
    times = {"fixed timeout": [0.12, 0.15, 0.2, 0.3, 0.4, 0.55, 0.8, 1.2, 2.0],
             "phi accrual": [0.132, 0.139, 0.148, 0.162, 0.183, 0.207, 0.244, 0.294, 0.367],
             "phi accrual + 0.3 s": [0.431, 0.439, 0.448, 0.462, 0.483, 0.507, 0.544, 0.594, 0.667]}
    return [Panel(title=title, curves={name: [
        Mark(median_s=at, worst_s=at * 1.4, alarms=max(0.0, most - 300 * index), label=f"phi {at}")
        for index, at in enumerate(row)] for name, row in times.items()})
        for title, most in (("idle", 0.0), ("loaded", 1500.0), ("paused now and then", 600.0))]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_labels_of_the_trade_off_keep_apart(width: int) -> None:
    svg = detectors_svg(crowded_panels(), "Failure detectors: how soon against how often wrongly", width=width)
    assert troubles(svg) == [] and len(boxes(svg)) > 30


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("best", [0.11, 22.0, 950.0])
def test_the_labels_of_intervals_and_curves_keep_apart(width: int, best: float) -> None:
    curve = [(10 ** (k / 10), 0.4 / 10 ** (k / 10) + 10 ** (k / 10) / 2400) for k in range(-10, 31)]
    title = "Checkpoint interval: predicted against measured, on a machine with a rather long name"
    assert troubles(interval_svg(curve, [(3.0, 0.14), (20.0, 0.04)], best, title, width=width)) == []
    curves = {f"a run with a long name, number {number}": [1.0, math.nan, 0.1 * number] for number in range(1, 5)}
    assert troubles(curves_svg(curves, title, "loss", width)) == []


def test_words_wrap_and_a_legend_goes_below_where_there_is_no_room() -> None:
    assert wrap("one two three", text_width("one two")) == ["one two", "three"]
    assert wrap("", 100) == [] and wrap("unbreakable", 10) == ["unbreakable"]
    entries = [(lambda x, y: "", "first"), (lambda x, y: "", "second")]
    assert heading("A title", entries, WIDE)[1] < heading("A title that is much longer than that", entries, NARROW)[1]
