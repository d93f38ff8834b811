"""Who sent a file, by its path in the download of a learning platform: Moodle, Canvas or nbgrader.

The platform writes the first part of such a path, the student the rest: so it is the first match that counts, and a
folder of a student's own that looks like somebody else's changes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LAYOUTS = {
    "moodle": re.compile(r"^(?:[^/]+/)??(?P<name>[^/]+?)_(?P<number>\d+)_assignsubmission_[a-z]+_?[^/]*(?:/|$)"),
    "nbgrader": re.compile(r"^(?:[^/]+/)*?(?P<name>[^/]+)/(?P<lab>lab\d\d)/"),
    "nbgrader exchange": re.compile(r"^(?:[^/]+/)*?(?P<name>[^/+]+)\+(?P<lab>lab\d\d)\+[^/]+/"),
    "canvas": re.compile(r"^(?:[^/]+/)??(?P<name>[^/_]+)(?:_LATE)?_(?P<number>\d+)_\d+_[^/]+$"),
}


@dataclass(frozen=True, kw_only=True)
class Sender:
    """Whom a platform names as the one who handed a file in."""

    layout: str
    name: str  # of nbgrader: the id itself
    number: str = ""
    lab: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.layout}{' ' + self.number if self.number else ''})"

    @property
    def own_id(self) -> str:
        """An id that is made of what the platform says, for a course without a roster."""
        if not self.number:
            return self.name
        return f"{re.sub(r'[^A-Za-z0-9.@-]+', '-', self.name).strip('-.') or self.layout}-{self.number}"[:64]


def sender(path: str) -> Sender | None:
    """Who sent it; None if no layout that we know has such paths."""
    for layout, pattern in _LAYOUTS.items():
        if found := pattern.match(path):
            groups = found.groupdict()
            return Sender(layout=layout, name=groups["name"], number=groups.get("number") or "",
                          lab=groups.get("lab") or "")
    return None
