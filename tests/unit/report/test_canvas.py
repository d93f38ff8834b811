"""The pencils: shelves, ticks and human units."""

from __future__ import annotations

import pytest

from ftlab.report.canvas import Scale, duration, tag, text
from ftlab.report.labels import Shelves


def test_shelves_keep_labels_apart_and_prefer_the_lowest() -> None:
    shelves = Shelves(0, 100)
    assert shelves.put((0, 40)) == (0, 0, 0)
    assert shelves.put((30, 70), (45, 80)) == (0, 1, 0)
    assert shelves.put((30, 70)) == (1, 0, 0)
    assert shelves.put((90, 130), (80, 100)) == (0, 1, 0)  # the first would leave the picture
    assert shelves.put((90, 130)) == (2, 0, -30)  # moved, as there is no other place


def test_ticks_are_round_and_count_from_the_origin() -> None:
    scale = Scale(begin=9.95, end=10.2, left=0, right=500)
    assert [label for _, label in scale.ticks(10.0, 0.001)] == ["\N{MINUS SIGN}50", "0", "50", "100", "150", "200"]


@pytest.mark.parametrize(("seconds", "said"), [
    (0.0, "0.0 ms"), (0.00004, "<0.1 ms"), (0.0123, "12.3 ms"), (0.0999, "99.9 ms"), (0.09999, "100 ms"),
    (0.312, "312 ms"), (12.34, "12.3 s"),
])
def test_durations_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_text_and_attributes_are_escaped() -> None:
    assert "<b>" not in text(0, 0, "<b>", hint="<b>")
    assert tag("g", label='"><b>') == '<g label="&quot;&gt;&lt;b&gt;"/>'
