"""Markdown of students as HTML that runs nothing, for feedback and the formgrader.

nbgrader's own templates put markdown cells into the page as they are, scripts included, and do not look at
`HTMLExporter.sanitize_html`. This filter takes the place of the one they use (`c.HTMLExporter.filters`).
"""

from __future__ import annotations

from typing import Any

import bleach
from jinja2 import pass_context
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

_TAGS = frozenset({"a", "abbr", "b", "blockquote", "br", "code", "del", "details", "div", "em", "h1", "h2", "h3", "h4",
                   "h5", "h6", "hr", "i", "img", "kbd", "li", "ol", "p", "pre", "s", "span", "strong", "sub", "summary",
                   "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"})
_PLAIN = {"class", "id", "title", "alt", "align", "open", "width", "height"}
_PICTURES = ("data:image/png;base64,", "data:image/jpeg;base64,")


@pass_context
def markdown2html(context: Any, source: str) -> str:
    """The HTML of a markdown cell: text, tables, links to the web, pictures that are attached."""
    attached = context.get("cell", {}).get("attachments", {})
    renderer = IPythonRenderer(escape=False, attachments=attached)
    return clean(str(MarkdownWithMath(renderer=renderer).render(source)))


def clean(html: str) -> str:
    """HTML without anything that a browser would run or load from elsewhere; what is not allowed is shown as text."""
    return str(bleach.clean(html, tags=_TAGS, attributes=_allowed, protocols={"http", "https", "mailto", "data"}))


def _allowed(tag: str, name: str, value: str) -> bool:
    if name == "href":
        return tag == "a" and value.startswith(("http://", "https://", "mailto:", "#"))
    if name == "src":
        return tag == "img" and value.startswith(_PICTURES)
    return name in _PLAIN
