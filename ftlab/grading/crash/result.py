"""What a crash check found, for a grader's program and for a student's eyes."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ftlab.grading.crash.operations import Operation
from ftlab.report.style import card_css

_SHOWN = 40  # operations listed at most


@dataclass(frozen=True)
class Explanation:
    """Why an image could not be loaded: the mistake by name, and in words with the way out."""

    mistake: str  # see MISTAKES in explain.py
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Failure:
    """The first image that load did not survive."""

    died: str  # the last operation before the machine died
    boundary: int  # how many operations it had done
    lost: tuple[str, ...]  # un-synced work that did not reach the disk
    files: tuple[tuple[str, int], ...]  # path and size of what was on disk
    found: str  # what load gave or raised
    explanation: Explanation

    def __str__(self) -> str:
        files = [f"  {path:<32} {'' if path.endswith('/') else f'{size} bytes'}".rstrip() for path, size in self.files]
        return "\n".join([
            f"the machine died after: {self.died}",
            *(f"  not on disk yet: {each}" for each in self.lost),
            "on disk then:", *(files or ["  (nothing)"]),
            f"load: {self.found}",
            f"why: {self.explanation}",
        ])


@dataclass(frozen=True)
class CrashResult:
    """How a checkpoint manager came through every crash that was tried."""

    images: int  # crash images tried
    survived: int  # of these gave exactly the old or the new state
    possible: int  # different images there were; more than `images` when the limit was reached
    first_failure: Failure | None
    operations: tuple[Operation, ...]  # what save did, in order
    seconds: float
    sampled: bool = False  # whether the save did so much that the machine died in some places of it only
    failed_after_return: int = 0  # images that did not survive although save had already returned

    @property
    def ok(self) -> bool:
        """Whether every image survived."""
        return self.survived == self.images

    @property
    def capped(self) -> bool:
        """Whether there were more images than the limit."""
        return self.images < self.possible

    @property
    def score(self) -> float:
        """The share of images that survived."""
        return self.survived / self.images

    def __str__(self) -> str:
        return f"{self._headline()}\n{self.first_failure}" if self.first_failure else self._headline()

    def _repr_html_(self) -> str:
        return _html(self)

    def _headline(self) -> str:
        more = "more than " if self.sampled else ""
        capped = f" (a selection: {more}{self.possible} were possible)" if self.capped or self.sampled else ""
        return f"{self.survived} of {self.images} crashes survived{capped}"


def _html(result: CrashResult) -> str:
    tone, word = ("green", "alive") if result.ok else ("red", "dead")
    parts = [f'<div class="ftlab"><style>{card_css()}</style><section class="ftlab-card small {tone}">'
             f'<b class="{word}">{escape(result._headline())}</b>']
    if result.first_failure:
        parts.append(_failure_html(result.first_failure))
    parts.append(_operations_html(result))
    return "".join([*parts, "</section></div>"])


def _failure_html(failure: Failure) -> str:
    rows = "".join(f"<tr><td><code>{escape(path)}</code></td><td>{'' if path.endswith('/') else f'{size} bytes'}</td>"
                   "</tr>" for path, size in failure.files) or "<tr><td>(nothing)</td></tr>"
    lost = "".join(f"<li>{escape(each)}</li>" for each in failure.lost)
    return (f"<p><b>{escape(failure.explanation.text)}</b></p>"
            f"<p>The machine died after: {escape(failure.died)}.</p>"
            + (f"<p>Not on disk yet:</p><ul>{lost}</ul>" if lost else "")
            + f"<p>On disk then:</p><table>{rows}</table><p>load: <code>{escape(failure.found)}</code></p>")


def _operations_html(result: CrashResult) -> str:
    died = result.first_failure.boundary - 1 if result.first_failure else -1
    first = max(0, min(died - _SHOWN // 2, len(result.operations) - _SHOWN))
    rows = []
    for number, each in enumerate(result.operations[first:first + _SHOWN], first):
        mark = ' class="died"' if number == died else ""
        rows.append(f'<li value="{number + 1}"{mark}>{escape(str(each))}{" ← died here" if mark else ""}</li>')
    return (f"<details><summary>what save did ({len(result.operations)} operations)</summary>"
            f"<ol>{''.join(rows)}</ol></details>")
