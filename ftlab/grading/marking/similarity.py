"""Submissions that are alike beyond the given cells: `ftlab grade LAB --similar`.

What a student wrote is what the released notebook does not hold. It is read as Python's tokens, with names of its own
variables made alike and comments left out, and two submissions are compared by the runs of tokens they share: renaming
and reordering hide nothing. Short answers are alike by nature, so a pair is told only from a length and a share on. It
takes no marks, and says nothing of who copied from whom.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import keyword
import tokenize
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ftlab.errors import ConfigError
from ftlab.grading.course.course import Course
from ftlab.grading.course.record import Record
from ftlab.grading.course.repair import repair
from ftlab.grading.marking.intake import find, notebook_text

RUN = 12  # tokens that are compared at once
LEAST = 60  # tokens that both have written, for a pair to say anything
SHARE = 0.6  # of the shorter one's runs that are in the other one too
_LEFT_OUT = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)


@dataclass(frozen=True)
class Pair:
    """Two submissions, and how much of the shorter one is in the other."""

    one: str
    two: str
    share: float
    cells: tuple[str, ...] = ()  # those in which they are most alike

    def __str__(self) -> str:
        where = f", above all in {', '.join(self.cells)}" if self.cells else ""
        return f"{self.one} and {self.two}: {self.share:.0%} of what the shorter one wrote is in the other{where}"


def similar(written: Mapping[str, Mapping[str, str]], given: Mapping[str, str], share: float = SHARE) -> list[Pair]:
    """Pairs that are alike, the most alike first; `written` is student → cell → source, `given` the released cells."""
    known = {run for source in given.values() for run in runs(source, given.values())}
    seen = {student: {cell: set(runs(source, given.values())) - known for cell, source in cells.items()}
            for student, cells in written.items()}
    found = []
    for one, two in combinations(sorted(seen), 2):
        pair = _compare(one, two, seen[one], seen[two])
        if pair is not None and pair.share >= share:
            found.append(pair)
    return sorted(found, key=lambda pair: -pair.share)


def similar_submissions(course: Course, lab: str, students: Sequence[str] = ()) -> list[Pair]:
    """Pairs among what was handed in for a lab; what cannot be read is left out: grading says why."""
    course.labs([lab])
    release = Record.read(course.releases / lab)
    if release is None:
        raise ConfigError(f"{lab} was never released here", hint=f"ftlab labs release {lab}")
    given = {cell["id"]: "".join(cell["source"]) for cell in release.content["cells"] if cell["cell_type"] == "code"}
    written = {}
    for each in find(course, lab, list(students)):
        with contextlib.suppress(ConfigError, OSError, RecursionError):
            whole = repair(notebook_text(each, release), release).notebook
            written[each.student] = {str(cell.get("id", at)): str(cell.source) for at, cell in enumerate(whole.cells)
                                     if cell.cell_type == "code"}
    return similar(written, given)


def _compare(one: str, two: str, first: Mapping[str, set[str]], second: Mapping[str, set[str]]) -> Pair | None:
    all_of_one, all_of_two = set[str]().union(*first.values()), set[str]().union(*second.values())
    shorter = min(len(all_of_one), len(all_of_two))
    if shorter < LEAST:
        return None
    cells = [cell for cell in first if cell in second and first[cell] and
             len(first[cell] & second[cell]) >= SHARE * min(len(first[cell]), len(second[cell]) or 1)]
    return Pair(one, two, len(all_of_one & all_of_two) / shorter, tuple(cells))


def runs(source: str, given: Collection[str] = ()) -> Iterator[str]:
    """The runs of tokens of a cell; names that it makes up itself count as one."""
    words = list(_tokens(source, _vocabulary(given)))
    yield from (" ".join(words[at:at + RUN]) for at in range(max(0, len(words) - RUN + 1)))


def _tokens(source: str, vocabulary: frozenset[str]) -> Iterator[str]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.NAME:
                yield token.string if token.string in vocabulary else "name"
            elif token.type == tokenize.STRING:
                yield "text"
            elif token.type in (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE):
                yield {tokenize.INDENT: "(", tokenize.DEDENT: ")"}.get(token.type, ";")
            elif token.type not in _LEFT_OUT:
                yield token.string
    except (tokenize.TokenError, SyntaxError):
        return


def _vocabulary(given: Collection[str]) -> frozenset[str]:
    """Names that mean something to all: Python's, and those of the released notebook."""
    key = tuple(given)
    if key not in _vocabularies:
        names = {*keyword.kwlist, *dir(builtins)}
        for source in key:
            names |= set(_words(source))
        _vocabularies[key] = frozenset(names)
    return _vocabularies[key]


def _words(source: str) -> Iterator[str]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.NAME:
                yield token.string
    except (tokenize.TokenError, SyntaxError):
        return


_vocabularies: dict[tuple[str, ...], frozenset[str]] = {}
