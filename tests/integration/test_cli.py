"""The command line, as people and scripts use it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import ftlab
from tests import trains
from tests.leaks import ended
from tests.limits import COMMAND_S, JOB_S


def _ftlab(*arguments: str, timeout: float = 100) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "ftlab.cli.main", *arguments], capture_output=True, text=True,
                          timeout=timeout)


def test_a_drill_prints_exactly_one_json_object(tmp_path):
    page = tmp_path / "kill.html"
    done = _ftlab("drill", "kill", "--json", "--steps", "60", "--seed", "4", "--report", str(page))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert {"drill", "backend", "nodes", "spares", "seed", "injected", "recovered", "detection_s", "stall_s", "phases",
            "steps_lost", "samples_lost", "samples_repeated", "worlds", "generations", "source", "verdict", "goodput",
            "leaked"} <= set(facts)
    assert (facts["drill"], facts["injected"], facts["recovered"], facts["verdict"]) == ("kill", 1, True, "identical")
    assert facts["detection_s"] < facts["stall_s"] and facts["worlds"] == [4, 4] and facts["leaked"] == 0
    assert {"detect", "terminate", "replace", "ranktable", "continue", "agent", "store", "load_ranktable", "connect",
            "strategy", "send_state", "receive_state", "rollback_data", "load_data",
            "first_step"} == set(facts["phases"])
    html = page.read_text()
    assert "<svg" in html and "identical" in html and "http://" not in html.replace("http://www.w3.org", "")


def test_bad_usage_is_told_and_exits_with_2():
    for arguments in (["drill", "teatime"], ["drill", "kill", "--nodes", "0"], ["drill"], ["juggle"],
                      ["bench", "recovery", "--faults", "meteor"]):
        done = _ftlab(*arguments)
        assert done.returncode == 2, arguments
        assert done.stderr and not done.stdout


def test_an_error_with_json_is_json():
    done = _ftlab("drill", "teatime", "--json")
    assert done.returncode == 2 and json.loads(done.stdout)["error"] == "UnknownFault"


def test_up_status_connect_down():
    up = _ftlab("up", "--nodes", "2", "--spares", "0", "--json")
    assert up.returncode == 0, up.stderr
    name = json.loads(up.stdout)["cluster"]
    try:
        status = json.loads(_ftlab("status", "--json").stdout)
        [mine] = [each for each in status["clusters"] if each["cluster"] == name]
        assert [node["verdict"] for node in mine["nodes"]] == ["ALIVE", "ALIVE"]
        cluster = ftlab.connect(name)
        assert cluster.submit(trains.plain, steps=5).result(timeout=JOB_S).steps == 5
        cluster.close()  # only lets go of it
        assert name in _ftlab("status").stdout
    finally:
        down = _ftlab("down", name)
    assert down.returncode == 0 and "is down" in down.stdout
    assert name not in _ftlab("status").stdout
    assert _ftlab("down", name).returncode == 1


def test_ctrl_c_ends_a_drill_cleanly():
    with ended(subprocess.Popen([sys.executable, "-m", "ftlab.cli.main", "drill", "hang", "--steps", "2000"],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)) as drill:
        for line in drill.stderr:
            if "twin" in line:
                break
        time.sleep(0.5)  # somewhere in the middle of it
        drill.send_signal(signal.SIGINT)
        _, said = drill.communicate(timeout=COMMAND_S)
    assert drill.returncode == 130 and "interrupted" in said and "Traceback" not in said


def test_doctor_and_reap_and_help():
    doctor = _ftlab("doctor", "--json")
    assert doctor.returncode == 0 and json.loads(doctor.stdout)["ok"]
    assert json.loads(_ftlab("reap", "--json").stdout) == {"reaped": []}
    assert "example:" in _ftlab("drill", "--help").stdout
