"""Shared fixtures.

FTLAB_REQUIRE is a list of parts, separated by commas or spaces, that must not be skipped here: `docker`, `browser`,
`prometheus`, `filters`, ... A test that needs such a part says `require("docker", available, "why not")`: without the
part it is skipped with that reason, or it *fails* when the part is listed. CI lists whatever it has installed, so a
part that silently stopped working cannot hide behind a skip.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator

import pytest

from tests.leaks import look, wait_until_gone

# A shell's background job ignores Ctrl-C, and so would everything that tests start from there.
signal.signal(signal.SIGINT, signal.default_int_handler)


def require(part: str, available: bool, reason: str) -> None:
    """Skip the test when a part is not there, or fail it when FTLAB_REQUIRE lists the part."""
    if available:
        return
    listed = os.environ.get("FTLAB_REQUIRE", "").replace(",", " ").split()
    if part in listed or "all" in listed:
        pytest.fail(f"FTLAB_REQUIRE lists {part!r}, but it is not here: {reason}", pytrace=False)
    pytest.skip(f"{part}: {reason}")


@pytest.fixture(name="require")
def require_fixture() -> Callable[[str, bool, str], None]:
    """`require` for tests that would rather not import it."""
    return require


@pytest.fixture(scope="session", autouse=True)
def _own_runs() -> Iterator[None]:
    """Clusters of this test session live in a folder of their own, whatever else runs on the machine."""
    with tempfile.TemporaryDirectory(prefix="ftlab-test-") as folder:
        os.environ["FTLAB_RUNS"] = f"{folder}/runs"
        yield
        del os.environ["FTLAB_RUNS"]


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail the test when it leaves a process, a /dev/shm entry, a run folder or a thread of ours for 5 s."""
    before = look()
    yield
    left = wait_until_gone(before)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)
