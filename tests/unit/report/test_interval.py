"""The picture of the cost against the checkpoint interval."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from ftlab.report.interval import interval_svg

SVG = "{http://www.w3.org/2000/svg}"
CURVE = [(10 ** (power / 20), 0.4 / 10 ** (power / 20) + 10 ** (power / 20) / 1200) for power in range(-20, 61)]
BEST = math.sqrt(0.4 * 1200)


def words(svg: str) -> list[str]:
    """All visible texts of a picture."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def dots(svg: str) -> list[tuple[float, float]]:
    """The places of the measured points: the circles with a hint."""
    circles = [one for one in ElementTree.fromstring(svg).iter(f"{SVG}circle") if one.find(f"{SVG}title") is not None]
    return [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in circles]


def test_the_picture_names_the_best_interval_and_what_it_costs():
    said = words(interval_svg(CURVE, [(10.0, 0.05)], BEST, "Interval & cost"))
    assert "best 21.9 s \N{MIDDLE DOT} 3.7% lost" in said
    assert {"Interval & cost", "predicted", "measured", "share of the run lost"} <= set(said)
    assert {"0.1", "1", "10", "100", "1,000", "0%"} <= set(said)


def test_measured_points_lie_on_a_logarithmic_axis():
    (x0, y0), (x1, y1), (x2, y2) = dots(interval_svg(CURVE, [(1.0, 0.1), (10.0, 0.05), (100.0, 0.1)], BEST, "t"))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2), "a decade is a decade"
    assert y0 == y2 < y1, "what loses more stands higher"


def test_the_curve_leaves_through_the_top_and_nothing_is_drawn_above_it():
    steep = [(1.0, 1.0), (10.0, 0.02), (100.0, 0.03), (1000.0, 1.0), (2000.0, 1.0)]
    svg = interval_svg(steep, [], 10.0, "t")
    (path,) = ElementTree.fromstring(svg).iter(f"{SVG}path")
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path.attrib["d"])]
    assert path.attrib["d"].count("M") == 1 and len(heights) == 4
    assert heights[0] == heights[-1] == min(heights), "it is cut off at the top"
    assert all(heights[0] < y < heights[0] + 254 for y in heights[1:-1])


@pytest.mark.parametrize(("curve", "measured", "best", "label"), [
    (CURVE, [], BEST, "best 21.9 s \N{MIDDLE DOT} 3.7% lost"),
    ([], [(12.0, 0.05), (14.0, 0.048)], 12.0, "best 12 s"),
    ([], [(12.0, 0.0)], 5000.0, "best 5,000 s"),
    ([(5.0, 0.0), (6.0, 0.0)], [], 5.0, "best 5 s \N{MIDDLE DOT} 0% lost"),
    ([(0.001, 0.002), (0.01, 0.004)], [(0.0, 0.1), (math.nan, 0.1), (1.0, math.inf)], 0.001,
     "best 0.001 s \N{MIDDLE DOT} 0.2% lost"),
], ids=["nothing measured", "nothing predicted", "best far away", "nothing lost", "points that cannot be drawn"])
def test_unusual_data_is_drawn_too(
    curve: list[tuple[float, float]], measured: list[tuple[float, float]], best: float, label: str,
):
    assert label in words(interval_svg(curve, measured, best, "t"))


def test_without_data_or_without_a_best_interval_it_says_so_or_leaves_it_out():
    assert words(interval_svg([], [], 10.0, "t")) == ["no interval was measured or predicted"]
    assert not any(word.startswith("best") for word in words(interval_svg(CURVE, [], math.inf, "t")))


def test_a_title_from_outside_is_escaped_and_nothing_has_an_id():
    svg = interval_svg(CURVE, [(10.0, 0.05)], BEST, "<script>")
    assert "<script" not in svg and " id=" not in svg
    assert "<script>" in words(svg)
