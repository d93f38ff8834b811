"""`ftlab labs check`: everything that can be wrong with the labs without running them."""

from __future__ import annotations

from collections.abc import Iterator

from nbformat import NotebookNode

from ftlab.errors import FtlabError
from ftlab.grading.course import cells, points, release_rules
from ftlab.grading.course.course import Course
from ftlab.grading.course.problem import Problem
from ftlab.grading.course.release import generated
from ftlab.grading.course.source_rules import source_problems


def audit(course: Course, labs: list[str]) -> list[Problem]:
    """All problems of these labs, those of the sources first; empty when all is well."""
    found: list[Problem] = []
    sources: dict[str, NotebookNode] = {}
    for lab in labs:
        try:
            path = course.notebook(lab)
            sources[lab] = cells.read(path)
        except FtlabError as error:
            found.append(Problem(f"{course.sources.name}/{lab}", error.message, error.hint or "correct it"))
            continue
        found += source_problems(lab, str(path.relative_to(course.root)), sources[lab])
    for lab, source in sources.items():
        found += _release_problems(course, lab, source)
    return [*found, *_orphans(course), *_points_page(course)]


def _release_problems(course: Course, lab: str, source: NotebookNode) -> list[Problem]:
    place, name = course.releases / lab, f"{course.releases.name}/{lab}"
    try:
        with generated(course, [lab]) as fresh:
            found = list(release_rules.drift(fresh / lab, place, name))
    except FtlabError as error:
        return [Problem(f"{course.sources.name}/{lab}", f"{error.message} ({error.seen})", error.hint)]
    if not place.is_dir():
        return found
    return [*found, *release_rules.secrets(source, place, name), *release_rules.links(place, name)]


def _orphans(course: Course) -> Iterator[Problem]:
    """Releases without a source."""
    known = course.labs()
    for folder in sorted(course.releases.iterdir()) if course.releases.is_dir() else []:
        if folder.is_dir() and folder.name not in known and not folder.name.startswith("."):
            yield Problem(f"{course.releases.name}/{folder.name}", "has no source", "remove it, or author it")


def _points_page(course: Course) -> Iterator[Problem]:
    file = course.root / points.PAGE
    try:
        wanted = points.page(points.all_rows(course))
    except FtlabError:
        return  # told already
    if not file.is_file() or file.read_text(encoding="utf-8") != wanted:
        yield Problem(points.PAGE, "does not say what the notebooks say", "ftlab labs points")
