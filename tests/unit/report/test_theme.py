"""Both themes can be read by everybody: contrast and colour blindness, computed from the palette."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from ftlab.report.page import report_fragment, report_page
from ftlab.report.theme import PALETTE, colour, contrast, theme_css
from tests.recorded import report_of

THEMES = {"light": 0, "dark": 1}
ON_PAPER = ["ink", "soft", "red", "green", "amber", "link", *(f"generation-{n}" for n in range(1, 6)),
            *(f"phase-{n}" for n in range(1, 4))]  # as words on paper; the paper's colour is written on bars
PAIRS = [*((name, "paper") for name in ON_PAPER), ("ink", "chip"), ("soft", "quiet"), ("ink", "page"),
         *((f"{tone}-ink", tone) for tone in ("good", "fair", "bad", "plain"))]
# Machado, Oliveira, Fernandes (2009), complete dichromacy
SIGHT = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def seen(value: str, sight: str) -> tuple[float, float, float]:
    """A colour in CIELAB, as somebody with this sight sees it."""
    shares = [int(value[at:at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares]
    mixed = [sum(a * b for a, b in zip(row, linear, strict=True)) for row in SIGHT[sight]]
    red, green, blue = (min(max(one, 0.0), 1.0) for one in mixed)
    xyz = ((0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047, 0.2126 * red + 0.7152 * green + 0.0722 * blue,
           (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883)
    x, y, z = (one ** (1 / 3) if one > 0.008856 else 7.787 * one + 16 / 116 for one in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_contrast_is_what_wcag_defines() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert contrast("#123456", "#123456") == 1.0


@pytest.mark.parametrize("theme", THEMES)
def test_all_words_have_the_contrast_that_wcag_asks_for(theme: str) -> None:
    index = THEMES[theme]
    found = {pair: contrast(PALETTE[pair[0]][index], PALETTE[pair[1]][index]) for pair in PAIRS}
    assert {pair: round(value, 2) for pair, value in found.items() if value < 4.5} == {}


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", THEMES)
def test_neighbours_differ_for_the_colour_blind(theme: str, sight: str) -> None:
    for group, count in (("generation", 5), ("phase", 3)):
        shades = [seen(PALETTE[f"{group}-{n}"][THEMES[theme]], sight) for n in range(1, count + 1)]
        for one, other in pairwise([*shades, shades[0]]):
            assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 9


def test_every_colour_has_a_value_in_both_themes_and_a_page_says_which_holds() -> None:
    css = theme_css()
    for name, (light, dark) in PALETTE.items():
        assert css.count(f"--ftlab-{name}:{light}") >= 2 and css.count(f"--ftlab-{name}:{dark}") >= 2
    for page in ("[data-jp-theme-light=false]", ".vscode-dark", "(prefers-color-scheme:dark)", "[data-theme=dark]"):
        assert page in css


def test_reports_name_no_colour_of_their_own() -> None:
    """A colour that is not a variable of the theme would be wrong in one of the two."""
    report = report_of("random")
    for shown in (report_fragment(report.facts, report.events), report_page([(report.facts, report.events)])):
        body = re.sub(r"<style>.*?</style>", "", shown, flags=re.DOTALL)
        for name in PALETTE:
            body = body.replace(colour(name), "")
        assert re.findall(r"#[0-9a-f]{6}\b|\bwhite\b|\bblack\b|rgba?\(", body) == []
