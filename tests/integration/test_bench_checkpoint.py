"""`ftlab bench checkpoint`: all methods are measured and nothing stays behind. How fast they are, tests do not ask."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ftlab.cli.main import main
from tests.leaks import ended
from tests.limits import COMMAND_S, SOON_S

METHODS = {"torch.save", "torch.save + fsync", "dcp.save", "dcp.async_save (thread)", "dcp.async_save (process)",
           "ftlab"}
FIGURES = {"blocking_s", "durable_s", "load_s", "loop_cpu_s"}


def _start(folder: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "ftlab.cli.main", "bench", "checkpoint", "--dir", str(folder),
                             "--size-mb", "2", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            start_new_session=True)


def test_measures_every_method_and_leaves_nothing(tmp_path):
    bench = _start(tmp_path, "--repeats", "2", "--blocks", "1", "--json")
    out, err = bench.communicate(timeout=COMMAND_S)
    assert bench.returncode == 0, err
    assert out.count("\n") == 1 and "Traceback" not in err
    result = json.loads(out)
    [row] = result["sizes"]
    assert (result["bench"], row["size_mb"], row["repeats"]) == ("checkpoint", 2, 2)
    assert 1.8e6 < row["bytes"] <= 2e6 and set(row["methods"]) == METHODS
    for name, figures in row["methods"].items():
        assert set(figures) - {"load_live_s"} == FIGURES
        assert all(value is None or value >= 0 for value in figures.values())
        assert (figures["durable_s"] is None) == (name == "torch.save")  # nobody knows when that is durable
        assert len(row["samples"][name]["blocking_s"]) == 2
    assert set(row["limits"]) == {"memcpy_s", "raw_write_s"}
    assert {"blocking_to_memcpy", "durable_to_raw_write", "load_to_torch_load"} <= set(row["ratios"])
    assert {"overall_share", "during_save_share", "save_s"} <= set(result["training"])
    assert result["training"]["size_mb"] == 120
    assert list(tmp_path.iterdir()) == [] and _session(bench.pid) == []


def test_ctrl_c_leaves_nothing(tmp_path):
    with ended(_start(tmp_path, "--repeats", "1000", "--blocks", "0")) as bench:
        for line in bench.stderr:
            if "1/1000" in line:
                break
        time.sleep(0.3)  # somewhere in the middle of it
        os.killpg(bench.pid, signal.SIGINT)  # as a terminal does it
        _, said = bench.communicate(timeout=COMMAND_S)
    assert bench.returncode == 130 and "interrupted" in said and "Traceback" not in said
    assert list(tmp_path.iterdir()) == [] and _session(bench.pid) == []


@pytest.mark.parametrize("arguments", [["--size-mb", "many"], ["--size-mb", "0"], ["--size-mb", "900000"],
                                       ["--dir", "/gone"]])
def test_sizes_and_folders_that_cannot_be_are_bad_usage(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "checkpoint", *arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("ftlab: ") and not out and list(tmp_path.iterdir()) == []


def _session(leader: int) -> list[int]:
    """Processes of the bench that still run some seconds after it has ended."""
    deadline = time.monotonic() + SOON_S
    while True:
        alive = [each.pid for each in psutil.process_iter() if _sid(each.pid) == leader and _runs(each)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)


def _sid(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
