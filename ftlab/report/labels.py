"""Words that keep out of each other's way: lines that wrap, headings with a legend, and shelves for labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ftlab.report.canvas import INK, INSET, text, text_width

Symbol = Callable[[float, float], str]  # drawn around its centre
LINE = 16  # pixels from one line of words to the next
_SYMBOL, _GAP = 16, 18  # pixels from a symbol's centre to its words' begin and a bit, and between two entries


class Spot(NamedTuple):
    """Where a label goes: the shelf, which of the places that were offered, and how far it was moved."""

    shelf: int
    side: int
    shift: float


@dataclass
class Shelves:
    """Keeps labels apart: each goes on the lowest shelf on which it touches no other, and never over the edge."""

    left: float
    right: float
    taken: list[list[tuple[float, float]]] = field(default_factory=list)

    def put(self, *candidates: tuple[float, float]) -> Spot:
        """Reserve one of the (from, to) places, the earlier the better; one that would leave the picture is moved."""
        inside = [index for index, (x0, x1) in enumerate(candidates) if x0 >= self.left and x1 <= self.right]
        shift = 0.0 if inside else self._shift(*candidates[0])
        shelf = 0
        while True:
            if shelf == len(self.taken):
                self.taken.append([])
            for index in inside or [0]:
                x0, x1 = candidates[index][0] + shift, candidates[index][1] + shift
                if all(x1 <= other0 or x0 >= other1 for other0, other1 in self.taken[shelf]):
                    self.taken[shelf].append((x0, x1))
                    return Spot(shelf, index, shift)
            shelf += 1

    def _shift(self, x0: float, x1: float) -> float:
        """How far to move what hangs over an edge; over both, the beginning is kept."""
        return max(self.left - x0, min(0.0, self.right - x1))


def wrap(content: str, width: float, *, bold: bool = False, size: float = 11) -> list[str]:
    """The words in lines that are no wider than that, if no single word is."""
    lines: list[str] = []
    for word in content.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, bold=bold, size=size) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def paragraph(y: float, content: str, width: float, *, fill: str = INK, bold: bool = False,
              size: float = 11) -> tuple[list[str], float]:
    """Lines from the left edge, the first on the baseline `y`; also the baseline after the last."""
    lines = wrap(content, width - 2 * INSET, bold=bold, size=size)
    return [text(INSET, y + index * LINE, each, fill=fill, bold=bold, size=size)
            for index, each in enumerate(lines)], y + len(lines) * LINE


def heading(title: str, entries: Sequence[tuple[Symbol, str]], width: float) -> tuple[list[str], float]:
    """A title, and beside it what the symbols mean, or below where there is no room; also the next free baseline."""
    beside = width - 2 * INSET - text_width(title, bold=True, size=13) - 2 * _GAP
    if entries and sum(_reach(label) for _, label in entries) <= beside:
        return [text(INSET, 22, title, bold=True, size=13), *_row(entries, 22, width, right=True)], 42
    parts, y = paragraph(22, title, width, bold=True, size=13)
    below, y = legend(entries, y + 2, width) if entries else ([], y)
    return [*parts, *below], y + 4


def legend(entries: Sequence[tuple[Symbol, str]], y: float, width: float, *,
           right: bool = False) -> tuple[list[str], float]:
    """Symbols and their meanings in as many rows as they need; also the baseline after the last."""
    rows: list[list[tuple[Symbol, str]]] = [[]]
    for entry in entries:
        if rows[-1] and sum(_reach(label) for _, label in (*rows[-1], entry)) > width - 2 * INSET:
            rows.append([])
        rows[-1].append(entry)
    parts = [part for index, row in enumerate(rows) for part in _row(row, y + index * LINE, width, right=right)]
    return parts, y + len(rows) * LINE


def _reach(label: str) -> float:
    return _SYMBOL + text_width(label) + _GAP


def _row(entries: Sequence[tuple[Symbol, str]], y: float, width: float, *, right: bool) -> list[str]:
    x = width - INSET - sum(_reach(label) for _, label in entries) + _GAP if right else float(INSET)
    parts = []
    for symbol, label in entries:
        parts += [symbol(x + 6, y - 4), text(x + _SYMBOL, y, label)]
        x += _reach(label)
    return parts


def apart(ticks: Sequence[tuple[float, str]], gap: float = 6) -> list[tuple[float, str]]:
    """Those (x, label) of an axis, from the left, whose labels do not touch the one before."""
    kept: list[tuple[float, str]] = []
    for x, label in ticks:
        if not kept or x - text_width(label) / 2 >= kept[-1][0] + text_width(kept[-1][1]) / 2 + gap:
            kept.append((x, label))
    return kept
