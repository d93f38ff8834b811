"""Reports, cards and plots as a browser shows them: nothing overlaps or overflows, in both themes, wide and narrow.

The logs are recorded, so no cluster is started.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftlab.cluster.view import status_html
from ftlab.report.curves import draw
from ftlab.report.detectors import detectors_svg
from ftlab.report.interval import interval_svg
from ftlab.report.page import report_fragment, report_page
from ftlab.report.sheet import sheet
from ftlab.report.theme import PALETTE
from tests.conftest import require
from tests.recorded import report_of
from tests.unit.report.test_labels import crowded_panels

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking"]
SIZES = [(width, theme) for width in (420, 1200) for theme in ("light", "dark")]
SMALLEST_PX = 9.5  # of words in a picture, as they are shown

pytestmark = pytest.mark.browser

_LOOK = """() => {
  const wrong = [], shown = element => element.getClientRects().length > 0
  const root = document.documentElement
  if (root.scrollWidth > root.clientWidth + 1) wrong.push(`the page is ${root.scrollWidth} wide`)
  for (const svg of document.querySelectorAll('svg')) {
    if (!shown(svg)) continue
    const edge = svg.getBoundingClientRect(), scale = edge.width / svg.viewBox.baseVal.width
    if (11 * scale < SMALLEST) wrong.push(`words of ${11 * scale} px`)
    const labels = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()])
    labels.forEach(([said, box], index) => {
      if (box.left < edge.left - 2 || box.right > edge.right + 2) wrong.push(`${said} leaves its picture`)
      for (const [other, its] of labels.slice(index + 1)) {
        const across = Math.min(box.right, its.right) - Math.max(box.left, its.left)
        const down = Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top)
        if (across > 1 && down > 4 * scale) wrong.push(`${said} overlaps ${other}`)
      }
    })
  }
  for (const element of document.querySelectorAll('.ftlab-card *')) {
    if (element.closest('svg') || !shown(element)) continue
    const card = element.closest('.ftlab-card').getBoundingClientRect(), box = element.getBoundingClientRect()
    if (box.right > card.right + 1 || box.left < card.left - 1)
      wrong.push(`${element.tagName} ${element.textContent.slice(0, 40)} overflows its card`)
    if (element.tagName == 'TD' && element.scrollWidth > element.clientWidth + 1)
      wrong.push(`${element.textContent.slice(0, 40)} overflows its cell`)
  }
  return wrong
}""".replace("SMALLEST", str(SMALLEST_PX))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    require("browser", bool(CHROMIUM), "there is no Chromium on this machine")
    require("browser", importlib.util.find_spec("playwright") is not None, "playwright is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Every kind of picture, as files."""
    folder, texts = tmp_path_factory.mktemp("pages"), {}
    for name in ("controller", "blackout", "straggler", "split"):
        report = report_of(name, failed_expectations=["the end state is diverged, not identical to the twin's"])
        texts[name] = report_page([(report.facts, report.events)])
    reports = [report_of(name) for name in ("kill", "hang", "random")]
    texts["several"] = report_page([(report.facts, report.events) for report in reports])
    texts["detectors"] = sheet("Detectors", partial(_detectors, "Failure detectors: how soon, how often wrongly"),
                               [["condition", "detector", "dead from"], ["idle", "phi accrual", "0.55 s"]], ["a line"])
    texts["interval"] = sheet("Checkpoint interval", partial(_interval, "Checkpoint interval: predicted and measured"),
                              [["steps", "interval", "predicted"], ["10", "0.2 s", "4.1%"]], ["best interval: 21.9 s"])
    texts["notebook"] = _notebook("")
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


def _interval(title: str, width: int) -> str:
    curve = [(10 ** (k / 10), 0.4 / 10 ** (k / 10) + 10 ** (k / 10) / 2400) for k in range(-10, 31)]
    return interval_svg(curve, [(3.0, 0.14), (20.0, 0.04)], 21.9, title, width=width)


def _detectors(title: str, width: int) -> str:
    return detectors_svg(crowded_panels(), title, width=width)


def _notebook(attribute: str) -> str:
    """A card, a report and a plot on a page of somebody else's."""
    report = report_of("kill")
    cards = [status_html("Cluster ft-1a2b 2 nodes + 1 spare", STATUS), report_fragment(report.facts, report.events),
             draw({"mine": [3.0, 2.0, 1.0], "theirs, which has a longer name": [1.0, 2.0]}, "Losses")._repr_html_()]
    return f"<!DOCTYPE html><html><body {attribute}>{''.join(cards)}</body></html>"


STATUS: dict[str, Any] = {"generation": 2, "job": {"name": "train", "status": "running", "step": 40}, "nodes": [
    {"name": f"node-{number}", "address": f"127.0.243.{number}", "joined": True, "verdict": verdict, "role": role,
     "ranks": ranks, "workers": {"0": {"step": 40}}}
    for number, verdict, role, ranks in ((0, "ALIVE", "member", [0, 1]), (1, "SUSPECT", "member", [2, 3]),
                                         (2, "ALIVE", "spare", []), (3, "DEAD", "lost", []))]}


@pytest.mark.parametrize(("width", "theme"), SIZES, ids=[f"{width}-{theme}" for width, theme in SIZES])
def test_no_label_overlaps_and_nothing_overflows(browser, pages, width: int, theme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    try:
        found = {}
        for name, path in pages.items():
            page.goto(path.as_uri())
            page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
            found[name] = page.evaluate(_LOOK)
        assert {name: wrong for name, wrong in found.items() if wrong} == {}
    finally:
        page.close()


@pytest.mark.parametrize("width", [312, 640])
def test_nor_in_an_output_of_jupyterlab_which_leaves_312_of_420_pixels_and_has_rules_for_tables(browser, tmp_path,
                                                                                              width: int) -> None:
    rule = f"<style>.theirs table {{table-layout: fixed}} .theirs {{width: {width}px}}</style>"
    (tmp_path / "page.html").write_text(rule + _notebook('class="theirs"'), encoding="utf-8")
    page = browser.new_page(viewport={"width": width + 100, "height": 900})
    try:
        page.goto((tmp_path / "page.html").as_uri())
        assert page.evaluate(_LOOK) == []
        words = page.locator(".ftlab-card.small").inner_text()
        assert "127.0.243.1" in words and "SUSPECT" in words and "ranks 2, 3" in words
    finally:
        page.close()


@pytest.mark.parametrize(("attribute", "system", "theme"), [
    ('data-jp-theme-light="false"', "light", "dark"), ('data-jp-theme-light="true"', "dark", "light"),
    ('class="vscode-dark"', "light", "dark"), ('class="vscode-light"', "dark", "light"), ("", "dark", "dark"),
    ("", "light", "light"),
], ids=["dark JupyterLab", "light JupyterLab", "dark VS Code", "light VS Code", "dark system", "light system"])
def test_the_page_decides_on_the_theme_and_else_the_system(browser, tmp_path, attribute: str, system: str,
                                                           theme: str) -> None:
    (tmp_path / "page.html").write_text(_notebook(attribute), encoding="utf-8")
    page = browser.new_page(color_scheme=system)
    try:
        page.goto((tmp_path / "page.html").as_uri())
        wanted = [_rgb(PALETTE[name][theme == "dark"]) for name in ("paper", "ink")]
        look = "all => all.map(getComputedStyle).map(style => [style.backgroundColor, style.color])"
        cards = page.eval_on_selector_all(".ftlab-card", look)
        assert len(cards) == 2 and all(card == wanted for card in cards)
        look = "all => all.map(getComputedStyle).map(style => style.fill)"
        papers = page.eval_on_selector_all("svg > rect:first-of-type", look)
        assert papers and set(papers) == {wanted[0]}
    finally:
        page.close()


def test_what_an_untrusted_notebook_leaves_of_it_is_a_line_of_words_and_the_table(browser, tmp_path) -> None:
    """JupyterLab drops style sheets and drawings there and keeps `hidden`: words of a drawing must not pour out."""
    (tmp_path / "page.html").write_text(_notebook(""), encoding="utf-8")
    page = browser.new_page(color_scheme="dark")
    try:
        page.goto((tmp_path / "page.html").as_uri())
        page.evaluate("""() => {
          document.querySelectorAll('style').forEach(each => each.remove())
          document.querySelectorAll('svg').forEach(each => each.replaceWith(each.textContent))
        }""")
        said = page.evaluate("document.body.innerText")
        assert "node-2" in said and "33.7 ms" in said and "trust this notebook" in said
        assert "gen 3" not in said, "what was a label in a picture"
    finally:
        page.close()


def _rgb(value: str) -> str:
    return f"rgb({', '.join(str(int(value[at:at + 2], 16)) for at in (1, 3, 5))})"
