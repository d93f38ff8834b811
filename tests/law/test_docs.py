"""Relative links in README.md and docs/ lead somewhere: to a file, and to a heading where they name one."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)


def broken_links(page: Path) -> list[str]:
    """What is wrong with the relative links of a page."""
    text = _without_code(page.read_text(encoding="utf-8"))
    targets = [inline or reference for inline, reference in LINK.findall(text)]
    return [problem for target in targets if not re.match(r"[a-z][a-z0-9+.-]*:", target)
            for problem in _problem(page, target)]


def _problem(page: Path, target: str) -> list[str]:
    path, _, anchor = unquote(target).partition("#")
    file = (page.parent / path) if path else page
    if not file.exists():
        return [f"{target}: no such file"]
    if anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
        return [f"{target}: no such heading"]
    return []


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, in the spelling of the usual renderers."""
    headings = re.findall(r"^#{1,6}\s+(.+?)\s*#*$", _without_fences(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", _without_fences(text))


def _without_fences(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_broken_links_are_seen(tmp_path):
    (tmp_path / "other.md").write_text("# One heading, `here`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n[a](other.md) [b](other.md#one-heading-here) [c](#top) [d](https://example.com/x) `[e](not/a/link)`\n"
        "[f](gone.md) [g](other.md#gone)\n![h](gone.png)\n```\n[i](gone/in/code)\n```\n"
    )
    assert broken_links(page) == ["gone.md: no such file", "other.md#gone: no such heading", "gone.png: no such file"]
