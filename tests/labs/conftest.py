"""A small course in a temporary folder, for what does not need the real labs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import ftlab.grading
from ftlab.grading.course.course import Course
from ftlab.grading.course.points import write_page
from ftlab.grading.course.release import release

ROOT = Path(__file__).parents[2]
SMALL = Path(__file__).parent / "course"


@pytest.fixture(scope="session")
def small_checks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`check.lab90_task1` is found, here and in kernels."""
    profile = tmp_path_factory.mktemp("ipython")
    startup = profile / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00-small-course.py").write_text(
        f"import ftlab.grading; ftlab.grading.__path__.append({str(SMALL / 'grading')!r})\n")
    ftlab.grading.__path__.append(str(SMALL / "grading"))
    os.environ["IPYTHONDIR"] = str(profile)
    yield
    del os.environ["IPYTHONDIR"]
    ftlab.grading.__path__.remove(str(SMALL / "grading"))


@pytest.fixture(scope="session")
def released(small_checks: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small course, released; not to be changed."""
    root = tmp_path_factory.mktemp("small")
    shutil.copytree(SMALL / "solutions", root / "solutions")
    shutil.copy(ROOT / "nbgrader_config.py", root)
    course = Course(root)
    release(course, ["lab90"])
    write_page(course)
    return root


@pytest.fixture
def course(released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    """A copy of the released small course, and the folder commands are called in."""
    root = Path(shutil.copytree(released, tmp_path / "course"))
    monkeypatch.chdir(root)
    return Course(root)
