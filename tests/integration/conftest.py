"""Tests with real processes leave nothing behind: each test, and each module with the clusters that its tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.leaks import fail_if_left, look


@pytest.fixture(autouse=True)
def _nothing_stays(no_leaks: None) -> None:
    """See `no_leaks` in tests/conftest.py."""


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_of_the_module() -> Iterator[None]:
    """While a shared cluster runs it may start processes; once it is closed, all must be gone."""
    before = look()
    yield
    fail_if_left(before)
