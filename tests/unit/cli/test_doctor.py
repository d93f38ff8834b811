"""`ftlab doctor`: quick, never raises, and every gap says what to do."""

from __future__ import annotations

import http.server
import os
import socketserver
import subprocess
import sys
import threading
import time

import pytest

from ftlab.cli import doctor
from ftlab.cli.doctor import Finding, examine, render
from tests.limits import COMMAND_S


def by_name() -> dict[str, Finding]:
    return {each.name: each for each in examine()}


def test_examines_everything_it_promises_within_two_seconds():
    begin = time.monotonic()
    names = set(by_name())
    assert time.monotonic() - begin < 2.0
    assert names >= {"python", "torch", "cpus", "memory", "disk", "shared memory", "ports", "node addresses", "fork",
                     "partitions", "other users", "cgroups", "gpus", "docker", "jupyterlab", "nbgrader", "browser",
                     "leftovers"}


def test_every_gap_has_a_hint():
    assert [each for each in examine() if each.ok is False and not each.hint] == []


def test_a_check_that_raises_becomes_a_finding(monkeypatch):
    def _broken_part() -> Finding:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(doctor, "CHECKS", (_broken_part,))
    [found] = examine()
    assert (found.name, found.ok) == ("broken part", None)
    assert "ZeroDivisionError: surprise" in found.detail


def test_torch_is_not_imported_by_the_examination():
    code = "import sys; from ftlab.cli.doctor import examine; examine(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=COMMAND_S).returncode == 0


def test_renders_marks_hints_and_a_verdict():
    text = render([Finding("one", True, "fine"), Finding("two", False, "gone", "fetch it"), Finding("x", None, "?")])
    assert text.splitlines() == ["✓ one  fine", "✗ two  gone", "       try: fetch it", "· x    ?", "", "missing: two"]
    assert "everything" in render([Finding("one", True, "fine")])
    assert render([])


@pytest.mark.parametrize(("filters", "namespaces", "way", "protection"), [
    ("", "", "socket filters", "network='private'"),
    ("", "no namespaces", "socket filters", "network='private'): no namespaces"),
    ("not permitted", "", "private network", "is private"),
    ("not permitted", "no namespaces", "not permitted", "network='private'): no namespaces")])
def test_which_way_partitions_go_and_what_protects_from_other_users(monkeypatch, filters, namespaces, way, protection):
    monkeypatch.setattr("ftlab.cluster.packets.available", lambda: filters)
    monkeypatch.setattr("ftlab.cluster.private_network.why_not", lambda: namespaces)
    monkeypatch.setattr(doctor, "available", lambda: filters)
    monkeypatch.setattr(doctor, "private_network_missing", lambda: namespaces)
    partitions, others = doctor._network()
    assert way in partitions.detail and protection in others.detail + others.hint
    assert partitions.ok is (None if filters and namespaces else True)
    assert not partitions.ok or not partitions.hint
    assert "no namespaces" in partitions.detail or partitions.ok


def test_a_docker_engine_is_asked_over_its_socket(tmp_path):
    class Engine(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/_ping" else 404)
            self.send_header("Api-Version", "1.99")
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

        def address_string(self) -> str:
            return "unix"

    path = str(tmp_path / "docker.sock")
    with socketserver.UnixStreamServer(path, Engine) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert doctor._ping(path) == "1.99"
        thread.join()
    with pytest.raises(ConnectionRefusedError):
        doctor._ping(path)


def test_a_wrong_torch_is_a_gap(monkeypatch):
    for version, ok in (("2.13.0+cpu", True), ("3.0.1", True), ("2.9.1", False), (None, False)):
        monkeypatch.setattr(doctor, "_version", lambda name, version=version: version)
        assert doctor._torch().ok is ok


LONG = [Finding("short", True, "a b " * 60, "try this " * 30), Finding("a long name of a check", False, "/a/path" * 30),
        Finding("x", None, "")]


@pytest.mark.parametrize("columns", [20, 40, 80, 132])
def test_no_line_is_longer_than_the_screen(columns):
    lines = render(LONG, columns).splitlines()
    assert max(map(len, lines)) <= columns
    text = "".join("".join(lines).split())
    assert "ab" * 60 in text and "trythis" * 30 in text and "/a/path" * 30 in text, "nothing is lost"


def test_80_columns_where_there_is_no_terminal():
    done = subprocess.run([sys.executable, "-m", "ftlab.cli.main", "doctor"], capture_output=True, text=True,
                          timeout=COMMAND_S, env={**os.environ, "COLUMNS": "500"})
    assert done.stdout and max(map(len, done.stdout.splitlines())) <= 80
