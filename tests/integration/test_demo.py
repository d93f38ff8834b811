"""`ftlab demo`: what a machine cannot do is named and left out, the rest is done, and a report is left."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from ftlab.cli import demo
from ftlab.cli.main import main
from ftlab.cluster import abilities
from tests.leaks import ended
from tests.limits import SOON_S


@pytest.fixture
def no_partitions(monkeypatch):
    """A machine that refuses packet filters, and a tour of two stops."""
    monkeypatch.setattr(abilities, "no_packet_loss", lambda network: "the kernel refuses it")
    monkeypatch.setattr(demo, "_STOPS", {name: demo._STOPS[name] for name in ("partition", "crash")})


def test_the_tour_goes_on_without_what_the_machine_cannot_do(no_partitions, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 0
    said = capsys.readouterr().out
    assert "Left out: cutting a node off is not possible here: the kernel refuses it" in said
    assert "crash: " in said and "identical, bit by bit" in said
    assert "Left out, as this machine cannot do it: partition" in said
    assert "make lab" in said and "docs/recovery.md" in said and str(tmp_path / "ftlab-demo.html") in said
    page = (tmp_path / "ftlab-demo.html").read_text()
    assert "identical" in page and "<svg" in page and "partition" not in page


def test_ctrl_c_ends_the_tour_cleanly(tmp_path):
    with ended(subprocess.Popen([sys.executable, "-m", "ftlab.cli.main", "demo"], cwd=tmp_path, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)) as tour:
        for line in tour.stdout:
            if line.startswith("kill"):
                break
        tour.send_signal(signal.SIGINT)
        _, said = tour.communicate(timeout=SOON_S)
    assert tour.returncode == 130 and "interrupted" in said and "Traceback" not in said
    assert not list(tmp_path.iterdir()), "nothing is left, no empty report either"


def test_a_report_that_cannot_be_written_is_told_before_the_tour(tmp_path, capsys):
    assert main(["demo", "--report", str(tmp_path / "nowhere" / "tour.html")]) == 2
    assert "nowhere" in capsys.readouterr().err
