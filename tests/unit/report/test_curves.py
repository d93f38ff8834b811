"""Curves over steps: what is no number leaves a gap and a mark."""

from __future__ import annotations

import math
import re

from ftlab.report.canvas import GENERATIONS, RED
from ftlab.report.curves import Picture, curves_svg, draw


def test_every_curve_is_a_line_with_its_name():
    svg = curves_svg({"mine": [3.0, 2.0, 1.0], "theirs": [1.0, 1.0]}, "Losses", "loss")
    assert svg.count("<path") == 2 and ">mine<" in svg and ">theirs<" in svg and ">Losses<" in svg


def test_a_nan_breaks_the_line_and_is_crossed():
    svg = curves_svg({"loss": [3.0, math.nan, 1.0, math.inf]}, "Losses")
    outline = re.search(r'd="(M[^"]*)" stroke="' + re.escape(GENERATIONS[0]), svg)
    assert outline and outline[1].count("M") == 2 and svg.count(RED) == 2


def test_names_are_escaped_and_nothing_to_draw_is_said():
    assert "<b>" not in curves_svg({"<b>": [1.0]}, "x")
    assert "nothing to draw" in curves_svg({"loss": [math.nan]}, "x")
    assert "nothing to draw" in curves_svg({}, "x")


def test_a_notebook_shows_the_picture():
    picture = draw({"loss": [1.0]}, "x")
    assert isinstance(picture, Picture) and picture._repr_html_().count("<svg") == 2, "for wide and narrow places"
    assert Picture(picture.svg)._repr_html_().count("<svg") == 1, "a drawing of somebody's own"
