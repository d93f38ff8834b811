"""`ftlab doctor`: quick, never raises, and every gap says what to do."""

from __future__ import annotations

import http.server
import socketserver
import subprocess
import sys
import threading
import time

import pytest

from ftlab.cli import doctor
from ftlab.cli.doctor import Finding, examine, render


def by_name() -> dict[str, Finding]:
    return {each.name: each for each in examine()}


def test_examines_everything_it_promises_within_two_seconds():
    begin = time.monotonic()
    names = set(by_name())
    assert time.monotonic() - begin < 2.0
    assert names >= {"python", "torch", "cpus", "memory", "disk", "shared memory", "ports", "node addresses", "fork",
                     "packet filters", "cgroups", "gpus", "docker", "jupyterlab", "nbgrader", "browser", "leftovers"}


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
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_renders_marks_hints_and_a_verdict():
    text = render([Finding("one", True, "fine"), Finding("two", False, "gone", "fetch it"), Finding("x", None, "?")])
    assert text.splitlines() == ["✓ one  fine", "✗ two  gone", "       try: fetch it", "· x    ?", "", "missing: two"]
    assert "everything" in render([Finding("one", True, "fine")])
    assert render([])


def test_a_refused_filter_names_the_reason_and_another_way(monkeypatch):
    monkeypatch.setattr(doctor, "available", lambda: "the kernel refuses it: Operation not permitted")
    found = doctor._packet_filters()
    assert found.ok is None and "not permitted" in found.detail and "Docker" in found.hint


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
