"""The recovery waterfall, from a handful of spans."""

from __future__ import annotations

from xml.etree import ElementTree

from ftlab.report.waterfall import waterfall_rows, waterfall_svg


def words(svg: str) -> list[str]:
    """All visible texts of a picture."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_waterfall_draws_the_envelope_of_all_ranks() -> None:
    spans = [
        {"phase": "communication group restore", "name": "connect", "begin": 2.02, "end": 2.05, "by": "node-1 rank=1"},
        {"phase": "communication group restore", "name": "connect", "begin": 2.01, "end": 2.03, "by": "node-0 rank=0"},
        {"phase": "node reschedule", "name": "detect", "begin": 1.98, "end": 2.0, "by": "controller"},
    ]
    detect, connect = waterfall_rows(spans)
    assert (detect.name, detect.begin, detect.end) == ("detect", 1.98, 2.0)
    assert (connect.begin, connect.end, len(connect.spans)) == (2.01, 2.05, 2)
    said = words(waterfall_svg(spans))
    assert {"20.0 ms", "40.0 ms", "2 ranks", "total", "70.0 ms"} <= set(said)


def test_unknown_steps_and_empty_recoveries_are_drawn_too() -> None:
    odd = {"phase": "", "name": "coffee", "begin": 1.0, "end": 1.2}
    assert "coffee" in words(waterfall_svg([odd]))
    assert words(waterfall_svg([])) == ["no recovery steps were recorded"]
