"""Who is in the course: `students.csv`, with a column `id` and nbgrader's `first_name`, `last_name` and `email`.

A column `lms` may hold the number that the learning platform knows a student by. With a roster, `ftlab collect` takes
work of these students only, and finds a platform's sender by number, email or name.
"""

from __future__ import annotations

import csv
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

from ftlab.errors import ConfigError

FILE = "students.csv"


@dataclass(frozen=True)
class Roster:
    """The ids of all students, and the other words that mean one of them."""

    ids: frozenset[str]
    known: dict[str, set[str]] = field(default_factory=dict)  # plain name, email or number → ids

    @classmethod
    def read(cls, root: Path) -> Roster | None:
        """Of a course's folder; None if it has none. Raises ConfigError if it cannot be read."""
        file = root / FILE
        if not file.is_file():
            return None
        try:
            with file.open(encoding="utf-8-sig", newline="") as opened:
                rows = [{str(key).strip(): text.strip() for key, text in row.items() if isinstance(text, str)}
                        for row in csv.DictReader(opened)]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{file} cannot be read: {error}", hint="save it as CSV in UTF-8") from None
        if not rows or any(not row.get("id") for row in rows):
            raise ConfigError(f"{file} needs a column id, filled in for everybody",
                              hint="id,first_name,last_name,email (and perhaps lms)")
        known: dict[str, set[str]] = {}
        for row in rows:
            for word in _words(row):
                known.setdefault(word, set()).add(row["id"])
        return cls(frozenset(row["id"] for row in rows), known)

    def find(self, name: str, number: str = "") -> str:
        """The id of a platform's sender; empty if nobody, or more than one, is meant."""
        for word in (number, plain(name)):
            found = self.known.get(word, set())
            if len(found) == 1:
                return next(iter(found))
        return ""


def plain(name: str) -> str:
    """A name without case, accents, blanks and signs: "Müller, Anna" is mulleranna."""
    bare = unicodedata.normalize("NFKD", name).casefold()
    return "".join(each for each in bare if each.isalnum())


def _words(row: dict[str, str]) -> set[str]:
    first, last = row.get("first_name", ""), row.get("last_name", "")
    words = {row.get("lms", ""), *map(plain, (row["id"], row.get("email", ""), row.get("name", ""), first + last,
                                              last + first))}
    return words - {""}
