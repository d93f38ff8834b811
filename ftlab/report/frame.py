"""A picture in a page: drawn twice, for a wide and for a narrow place; the style sheet shows the one that fits.

Scaling one drawing down would make its words too small to read; so nothing is scaled by more than about a quarter.
A notebook that is not trusted yet loses style sheets and drawings: then `hidden` still hides what is left of them, and
a line says how to see the picture.
"""

from __future__ import annotations

from collections.abc import Callable

from ftlab.report.theme import theme_css

Draw = Callable[[int], str]  # an SVG that is so many pixels wide

WIDE, NARROW = 800, 330
_SWITCH = 660  # pixels of room from which on the wide drawing is shown


class Picture:
    """A picture that a notebook shows; `draw` is an SVG, or gives one for a width."""

    def __init__(self, draw: Draw | str) -> None:
        self._draw: Draw = (lambda width: draw) if isinstance(draw, str) else draw

    @property
    def svg(self) -> str:
        """The wide drawing."""
        return self._draw(WIDE)

    def _repr_html_(self) -> str:
        return f'<div class="ftlab"><style>{theme_css()}{FRAME_CSS}</style>{framed(self._draw)}</div>'

    def __repr__(self) -> str:
        return f"<a picture of {len(self.svg)} bytes>"


def framed(draw: Draw) -> str:
    """Both drawings, under a page's style sheet that holds `FRAME_CSS`."""
    wide, narrow = draw(WIDE), draw(NARROW)
    if wide == narrow:  # it knows one width only
        narrow = ""
    one = f'<div class="ftlab-wide{"" if narrow else " ftlab-narrow"}" hidden="hidden">{wide}</div>'
    return (f'<div class="ftlab-picture">{one}'
            + (f'<div class="ftlab-narrow" hidden="hidden">{narrow}</div>' if narrow else "")
            + '<p class="ftlab-unseen">(A picture: trust this notebook, or run the cell again, to see it.)</p></div>')


FRAME_CSS = f"""
.ftlab-picture{{container-type:inline-size;max-width:{WIDE * 1.25:.0f}px}}
.ftlab-picture .ftlab-unseen,.ftlab-picture .ftlab-narrow{{display:none}}
.ftlab-picture .ftlab-wide{{display:block}}
.ftlab-picture svg{{display:block;width:100%;height:auto;max-width:none}}
@container (max-width:{_SWITCH - 1}px){{
.ftlab-picture .ftlab-wide{{display:none}}
.ftlab-picture .ftlab-narrow{{display:block;max-width:{NARROW * 1.5:.0f}px}}}}
"""
