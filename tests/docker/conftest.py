"""Tests with real containers: skipped where no engine answers, unless FTLAB_REQUIRE lists docker. Nothing stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ftlab.cluster import engine, image
from ftlab.config import runs_dir
from tests.conftest import require


@pytest.fixture(scope="session")
def _engine() -> str:
    return image.possible() or engine.available()


@pytest.fixture(autouse=True)
def _with_engine(_engine: str, no_leaks: None) -> None:
    require("docker", not _engine, _engine)


@pytest.fixture
def nothing_of_ours_stays(_with_engine: None) -> Iterator[None]:
    """For tests that start clusters of their own: fail when a container or a network is left (by this run
    of the tests; others may use the engine too)."""
    before = {each.cluster for each in engine.look()}
    yield
    left = [each for each in engine.look() if each.cluster not in before and runs_dir() in each.folder.parents]
    assert not left, f"left in the engine: {left}"
