"""`ftlab bench interval`: every interval is measured on real blackouts, and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ftlab.bench.interval import kill_steps
from ftlab.cli.main import main
from tests.leaks import ended
from tests.limits import COMMAND_S


def _start(folder: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "ftlab.cli.main", "bench", "interval", *arguments],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "TMPDIR": str(folder)}, start_new_session=True)


def test_measures_every_interval_and_leaves_nothing(tmp_path):
    scratch, page = tmp_path / "scratch", tmp_path / "interval.html"
    scratch.mkdir()
    bench = _start(scratch, "--every", "5,20", "--steps", "60", "--kills", "1", "--json", "--report", str(page))
    out, err = bench.communicate(timeout=COMMAND_S)
    assert bench.returncode == 0, err
    assert out.count("\n") == 1 and "Traceback" not in err
    result = json.loads(out)
    assert (result["bench"], result["steps"], result["kills"]) == ("interval", 60, 1)
    assert [row["every"] for row in result["intervals"]] == [5, 20]
    for row in result["intervals"]:  # how much is lost, tests do not ask: the machine may be busy
        parts = row["recovering"] + row["redoing"] + row["slowed"]
        assert 0 < row["predicted"] <= 1 and row["measured"] < 1 and row["measured"] == pytest.approx(parts, abs=0.001)
        assert row["interval_s"] == pytest.approx(row["every"] * result["step_s"], rel=0.01)
        assert row["checkpoints"] >= 1 and row["recovering"] > 0
    assert sum(row["redone_steps"] for row in result["intervals"]) > 0, "the state came from storage"
    assert result["model"]["mtbf"] == pytest.approx(sum(row["run_s"] for row in result["intervals"]) / 2, abs=0.01)
    assert set(result["best"]) == {"young_s", "young_steps", "daly_s", "daly_steps"}
    html = page.read_text()
    assert html.count("<svg") == 2 and "<script" not in html and "best" in html
    assert list(scratch.glob("ftlab*")) == []


def test_ctrl_c_leaves_nothing(tmp_path):
    with ended(_start(tmp_path, "--every", "5")) as bench:
        for line in bench.stderr:
            if "every 5 steps" in line:
                break
        os.killpg(bench.pid, signal.SIGINT)  # as a terminal does it
        out, said = bench.communicate(timeout=COMMAND_S)
    assert bench.returncode == 130 and "interrupted" in said and "Traceback" not in said and not out
    assert list(tmp_path.glob("ftlab*")) == []


@pytest.mark.parametrize("arguments", [["--every", "often"], ["--every", "0,5"], ["--every", ""], ["--kills", "0"],
                                       ["--steps", "60"], ["--report", "/gone/interval.html"]])
def test_what_cannot_be_measured_is_bad_usage(capsys, arguments):
    assert main(["bench", "interval", *arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("ftlab: ") and not out


@pytest.mark.parametrize("seed", range(20))
def test_kills_come_after_the_first_checkpoint_and_find_the_interval_at_all_ages(seed):
    steps = kill_steps(320, 5, 50, seed)
    assert steps == kill_steps(320, 5, 50, seed) and steps == sorted(steps)
    assert 60 <= steps[0] and steps[-1] < 310
    assert sorted(step % 50 // 10 for step in steps) == [0, 1, 2, 3, 4]
