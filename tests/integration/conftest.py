"""Every test with real processes must leave nothing behind."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _nothing_stays(no_leaks: None) -> None:
    """See `no_leaks` in tests/conftest.py."""
