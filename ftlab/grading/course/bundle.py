"""`ftlab labs pack`: the one file that is handed out to students.

It holds the labs as released, ftlab's source with its pinned versions, a Makefile and a README. It never holds
`solutions/`, `tests/`, a lab's `hidden` module, or anything of a lab that is not packed; and before it is written,
every file is searched for what the sources hide. The labs are generated afresh, so nobody's work in `labs/` gets in.
The same sources give the same bytes.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path, PurePosixPath

from ftlab.errors import ConfigError, FtlabError
from ftlab.grading.course import cells
from ftlab.grading.course.course import LAB, Course
from ftlab.grading.course.release import generated, tree
from ftlab.grading.course.release_rules import secret_lines, secrets
from ftlab.grading.hidden import NAME as HIDDEN

FOLDER = "ftlab-labs"  # into which it unpacks
README = "docs/students.md"  # becomes the bundle's README.md
AS_THEY_ARE = ("LICENSE", "Makefile", "constraints.txt", "pyproject.toml", "docs/checkpoints.md", "docs/docker.md",
               "docs/health.md", "docs/points.md", "docs/recovery.md")
_KINDS = (".py", ".json", ".jsonl")  # of the package's files
_MORE = ("py.typed", "bashrc")
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # zip knows no earlier time


def pack(course: Course, labs: list[str], to: Path) -> list[str]:
    """Write the bundle; the names of its files. Raises FtlabError if something hidden would get into it."""
    files = {**_package(course, labs), **_pages(course)}
    with generated(course, labs) as fresh:
        for lab in labs:
            _refuse_secrets(course, lab, fresh / lab)
            files |= {f"{course.releases.name}/{lab}/{name}": raw for name, raw in tree(fresh / lab).items()}
    for lab in course.labs():
        _refuse_hidden(course, lab, files)
    _write(files, to)
    return sorted(files)


def _package(course: Course, labs: list[str]) -> dict[str, bytes]:
    """ftlab's source, without what only grading needs and without the checks of other labs."""
    root = course.root / "ftlab"
    if not (root / "__init__.py").is_file():
        raise ConfigError(f"{course.root} does not hold ftlab's source", hint="pack from a clone of ftlab")
    found = [each for each in sorted(root.rglob("*")) if each.is_file() and not each.is_symlink()]
    names = {each.relative_to(course.root).as_posix(): each for each in found}
    return {name: path.read_bytes() for name, path in names.items() if _belongs(PurePosixPath(name), labs)}


def _belongs(path: PurePosixPath, labs: list[str]) -> bool:
    """Whether a file of the package is for students."""
    if not (path.suffix in _KINDS or path.name in _MORE) or any(part.startswith(".") for part in path.parts):
        return False
    of_lab = path.parts[2] if path.parts[:2] == ("ftlab", "grading") and LAB.fullmatch(path.parts[2]) else ""
    return not of_lab or (of_lab in labs and HIDDEN not in (path.stem, *path.parts))


def _pages(course: Course) -> dict[str, bytes]:
    missing = [name for name in (*AS_THEY_ARE, README) if not (course.root / name).is_file()]
    if missing:
        raise ConfigError(f"{course.root} does not hold {', '.join(missing)}", hint="pack from a clone of ftlab")
    return {**{name: (course.root / name).read_bytes() for name in AS_THEY_ARE},
            "README.md": (course.root / README).read_bytes()}


def _refuse_secrets(course: Course, lab: str, released: Path) -> None:
    for problem in secrets(cells.read(course.notebook(lab)), released, lab):
        raise FtlabError(f"the bundle would give something away: {problem}")


def _refuse_hidden(course: Course, lab: str, files: dict[str, bytes]) -> None:
    """No line of a hidden test may stand in any file: it names its seed and its parameters."""
    source = cells.read(course.notebook(lab))
    source.cells = [cell for cell in source.cells if cells.hidden(cell)]
    for line in secret_lines(source):
        found = next((name for name, raw in files.items() if line.encode() in raw), "")
        if found:
            raise FtlabError(f"the bundle would give away a hidden test of {lab}: {found} holds {line[:60]!r}",
                             hint="take it out of that file")


def _write(files: dict[str, bytes], to: Path) -> None:
    """All at once: a pack that is interrupted leaves what was there before."""
    draft = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        to.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(files):
                entry = zipfile.ZipInfo(f"{FOLDER}/{name}", _LONG_AGO)
                entry.external_attr, entry.compress_type, entry.create_system = 0o100644 << 16, zipfile.ZIP_DEFLATED, 3
                archive.writestr(entry, files[name])
        draft.replace(to)
    except OSError as error:
        raise ConfigError(f"the bundle cannot be written to {to}: {error.strerror}", hint="--to FILE.zip") from None
    finally:
        draft.unlink(missing_ok=True)
