"""The tests' own tools: what is required must be there, and what leaks is seen."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from ftlab.config import CLUSTER_LABEL
from tests import leaks


def test_an_available_part_runs(require):
    require("docker", True, "unused")


def test_a_missing_part_is_skipped_with_its_reason(require, monkeypatch):
    monkeypatch.setenv("FTLAB_REQUIRE", "browser, prometheus")
    with pytest.raises(pytest.skip.Exception, match="docker: no engine"):
        require("docker", False, "no engine")


@pytest.mark.parametrize("listed", ["docker", "browser,docker", "browser docker", "all"])
def test_a_missing_part_fails_when_it_is_listed(require, monkeypatch, listed):
    monkeypatch.setenv("FTLAB_REQUIRE", listed)
    with pytest.raises(pytest.fail.Exception, match="no engine"):
        require("docker", False, "no engine")


def test_a_labelled_process_is_seen_until_it_ends():
    before = leaks.look()
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          env={**os.environ, CLUSTER_LABEL: "unit-test"}) as child:
        child.stdout.readline()
        assert any("of cluster unit-test" in line for line in leaks.wait_until_gone(before, seconds=0))
        child.stdin.close()
    assert leaks.wait_until_gone(before) == []


def test_a_named_thread_is_seen_until_it_ends():
    before, over = leaks.look(), threading.Event()
    thread = threading.Thread(target=over.wait, name="ftlab-unit-test")
    thread.start()
    assert leaks.wait_until_gone(before, seconds=0) == ["thread ftlab-unit-test"]
    over.set()
    thread.join()
    assert leaks.wait_until_gone(before) == []


def test_a_run_folder_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(leaks, "runs_dir", lambda: tmp_path)
    before = leaks.look()
    (tmp_path / "abc").mkdir()
    assert leaks.wait_until_gone(before, seconds=0) == [f"run folder {tmp_path / 'abc'}"]


@pytest.fixture(scope="module")
def shared() -> None:
    """What tests of this module share."""


def test_tests_that_share_a_fixture_stay_in_one_process(shared, request):
    """Newer versions of pytest do not let xdist mark them: see the pin in constraints.txt."""
    grouped = getattr(request.config.option, "loadgroup", False)  # set in xdist's workers
    assert [mark.args for mark in request.node.iter_markers("xdist_group")] == [("unit/test_support.py:shared",)]
    assert request.node.nodeid.endswith("@unit/test_support.py:shared") == grouped
