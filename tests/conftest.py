"""Shared fixtures.

FTLAB_REQUIRE is a list of parts, separated by commas or spaces, that must not be skipped here: `docker`, `browser`,
`prometheus`, `filters`, ... A test that needs such a part says `require("docker", available, "why not")`: without the
part it is skipped with that reason, or it *fails* when the part is listed. CI lists whatever it has installed, so a
part that silently stopped working cannot hide behind a skip.

`make test` runs several tests at once (pytest-xdist). Tests that share a fixture of their module, a cluster
mostly, stay together in one process; all others go wherever there is room. Tests marked `full` take long and find
little that the others miss: all drills in containers, every wrong solution, soaks. `make test-all` (`--full`) runs
them too.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.leaks import fail_if_left, look

TESTS = Path(__file__).parent

# A shell's background job ignores Ctrl-C, and so would everything that tests start from there.
signal.signal(signal.SIGINT, signal.default_int_handler)


_LONGEST_FIRST = ("zoo", "docker", "labs", "browser", "contract", "integration", "law", "unit")  # none is left alone


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--full`, for `make test-all`."""
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`, which take long")


@pytest.hookimpl(tryfirst=True)  # xdist looks at the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `full` unless it is asked for, and say what must stay together."""
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: _LONGEST_FIRST.index(item.path.relative_to(TESTS).parts[0]))
    for item in items:
        if shared := _shared_fixtures(item):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.relative_to(TESTS)}:{shared}"))


def _shared_fixtures(item: pytest.Item) -> str:
    """The fixtures that this test shares with others of its module, by name."""
    known = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009  (pytest has no public way to ask)
    return ",".join(sorted(name for name, found in known.items()
                           if found[-1].scope in ("class", "module") and not name.startswith("_")))


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
    """Fail the test when it leaves a process, a /dev/shm entry, a run folder or a thread of ours for long."""
    before = look()
    yield
    fail_if_left(before)
