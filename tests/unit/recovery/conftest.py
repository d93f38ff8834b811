"""`make_world`: a controller with a fake clock, fake nodes and a fake provider."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.recovery.harness import World


@pytest.fixture
def make_world(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    return lambda **config: World(monkeypatch, **config)
