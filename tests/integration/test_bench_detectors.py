"""`bench detectors`: heartbeats of real processes are recorded and replayed, and nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from xml.etree import ElementTree

import psutil
import pytest

from ftlab.bench.detectors import bench_detectors, detectors_page, detectors_picture, detectors_table, quickest_quiet
from ftlab.bench.heartbeats import PAUSES_S, Receiver, pause_plan, record_traces
from ftlab.errors import ConfigError
from ftlab.health.simulation import PHIS, TIMEOUTS_S
from ftlab.report.detectors import Mark, Panel, detectors_svg
from tests.limits import SOON_S

SVG = "{http://www.w3.org/2000/svg}"


def ours() -> list[psutil.Process]:
    """The recorder's processes below this one."""
    return [each for each in psutil.Process().children(recursive=True) if "ftlab.bench.heartbeats" in _command(each)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # gone meanwhile
        return ""


@pytest.fixture(scope="module")
def result() -> dict:
    """The bench on the traces that come with ftlab."""
    return bench_detectors()


# ---- recording


def test_heartbeats_of_real_processes_are_recorded():
    traces = record_traces(2.0, nodes=2, conditions=["idle"])
    assert [(trace.name, trace.node) for trace in traces] == [("idle", "node-0"), ("idle", "node-1")]
    for trace in traces:  # how late they were, tests do not ask: the machine may be busy
        assert 2 <= len(trace.arrivals) <= 21 and 0 <= trace.arrivals[0] <= trace.arrivals[-1] <= 2.1
        assert not trace.pauses and "% busy" in trace.recorded
    assert ours() == []


def test_a_stopped_node_is_silent_and_goes_on_afterwards():
    with Receiver(2, busy=0) as receiver:
        stopped, other = receiver.record("paused", 3.0, [(0.5, 1.5, 0)])
    ((begin, end),) = stopped.pauses
    assert 0.5 <= begin < 1.5 <= end and other.pauses == ()
    assert [at for at in stopped.arrivals if begin + 0.05 < at < end] == []
    assert any(at >= end for at in stopped.arrivals) and stopped.longest_gap() > 0.9


def test_load_comes_from_more_busy_processes_than_cores():
    with Receiver(1, busy=(os.cpu_count() or 1) + 1) as receiver:
        busy = [each for each in ours() if _command(each).endswith("busy")]
        assert len(busy) == (os.cpu_count() or 1) + 1
        before = sum(each.cpu_times().user for each in busy)
        receiver.record("loaded", 1.0)
        assert sum(each.cpu_times().user for each in busy) > before + 0.2
    assert ours() == []


def test_a_recording_that_fails_leaves_no_process_not_even_a_stopped_one():
    with pytest.raises(RuntimeError, match="on purpose"), Receiver(2, busy=1) as receiver:
        receiver._processes["node-0"].send_signal(signal.SIGSTOP)
        assert len(ours()) == 3
        raise RuntimeError("on purpose")
    assert ours() == []
    receiver.close()


def test_processes_end_with_their_owner():
    code = ("from ftlab.bench.heartbeats import Receiver; import signal, time\n"
            "with Receiver(2, busy=1) as receiver:\n"
            "    receiver._processes['node-0'].send_signal(signal.SIGSTOP)\n"
            "    print(*(each.pid for each in receiver._processes.values()), flush=True)\n"
            "    time.sleep(60)\n")
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert len(processes) == 3
    owner.kill()
    owner.communicate(timeout=SOON_S)
    deadline = time.monotonic() + SOON_S
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
        assert time.monotonic() < deadline, "a process outlived its owner"
        time.sleep(0.05)


@pytest.mark.parametrize("wrong", [{"seconds": 0.0}, {"nodes": 0}, {"conditions": ["stormy"]}])
def test_what_cannot_be_recorded_is_refused(wrong):
    with pytest.raises(ConfigError, match="cannot record"):
        record_traces(**{"seconds": 1.0, **wrong})


def test_pauses_are_short_and_long_and_never_overlap_on_a_node():
    plan = pause_plan(60.0, 3)
    assert {round(end - begin, 3) for begin, end, _ in plan} == set(PAUSES_S) and plan == sorted(plan)
    for node in range(3):
        mine = [(begin, end) for begin, end, who in plan if who == node]
        assert len(mine) >= 8 and all(end + 1.0 < begin for (_, end), (begin, _) in pairwise(mine))
        assert mine[-1][1] < 60.0


# ---- the bench


def test_new_recordings_are_replayed():
    said: list[str] = []
    result = bench_detectors(record=True, seconds=3.0, say=said.append, timeouts=(0.3, 2.0), phis=(8.0,))
    assert result["recorded"] and len(result["rows"]) == 12 and len(said) == 4
    assert [trace["name"] for trace in result["traces"]] == ["idle", "loaded", "paused"]
    assert ours() == []


def test_every_setting_is_measured_under_every_condition(result):
    assert len(result["rows"]) == 3 * (len(TIMEOUTS_S) + 2 * len(PHIS))
    json.dumps(result, allow_nan=False)
    for row in result["rows"]:
        assert row["missed"] == 0 and row["deaths"] > 500 and 0.1 < row["median_s"] <= row["worst_s"]


@pytest.mark.parametrize("detector", ["timeout", "phi", "phi_pause"])
def test_a_stricter_detector_is_quicker_and_raises_more_alarms(result, detector):
    for name in ("idle", "loaded", "paused"):
        rows = [row for row in result["rows"] if (row["trace"], row["detector"]) == (name, detector)]
        assert rows[0]["median_s"] < rows[-1]["median_s"] and rows[0]["false_alarms"] >= rows[-1]["false_alarms"]


def test_a_timeout_cries_wolf_at_the_pauses_that_are_longer(result):
    (row,) = [row for row in result["rows"] if (row["trace"], row["detector"], row["threshold"]) ==
              ("paused", "timeout", 0.55)]
    long = sum(end - begin > 0.65 for begin, end, _ in pause_plan(60.0, 3))
    assert row["false_alarms"] == long > 0
    quiet = quickest_quiet(result, "paused", "timeout")
    assert quiet is not None and quiet["threshold"] == 2.0


def test_the_table_has_a_line_for_each_row(result):
    lines = detectors_table(result).splitlines()
    assert len(lines) > len(result["rows"]) + 3 and "false alarms" in lines[0]
    assert len({len(line) for line in lines[:len(result["rows"]) + 1]}) == 1, "columns are aligned"
    assert sum("quickest without a false alarm" in line for line in lines) == 3


def test_the_page_stands_alone(result):
    page = detectors_page(result)
    assert page.count("<svg") == 2 and "<script" not in page and "http" not in page.replace("http://www.w3.org", "")
    assert page.count("<tr>") == 1 + len(result["rows"])


# ---- the picture


def dots(svg: str) -> list[tuple[float, float]]:
    """The places of the settings: the circles with a hint."""
    circles = [one for one in ElementTree.fromstring(svg).iter(f"{SVG}circle") if one.find(f"{SVG}title") is not None]
    return [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in circles]


def mark(median: float, alarms: float, worst: float = 0.0) -> Mark:
    return Mark(median_s=median, worst_s=worst or median, alarms=alarms, label=f"{median:g} s")


def test_the_picture_shows_every_setting_in_a_panel_for_each_condition(result):
    svg = detectors_picture(result)
    words = [each.text for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert {"idle", "loaded", "paused", "fixed timeout", "phi accrual", "0"} <= set(words)
    assert len(dots(svg)) == len(result["rows"]) and not re.search(r"nan|inf\b", svg)


def test_no_alarms_lie_below_any_alarm_and_more_alarms_lie_higher():
    svg = detectors_svg([Panel(title="t", curves={"d": [mark(0.1, 10_000), mark(0.3, 20), mark(1.0, 0)]})], "title")
    (x0, y0), (x1, y1), (x2, y2) = dots(svg)
    assert x0 < x1 < x2 and y0 < y1 < y2


@pytest.mark.parametrize("curves", [
    {}, {"d": []}, {"d": [mark(0.5, 0)]}, {"d": [mark(0.5, 7)]}, {"d": [mark(0.0, 1), mark(0.2, float("inf"))]},
    {"a & <b>": [mark(0.2, 1), mark(0.2, 1)]}, {"d": [mark(0.001, 0.01), mark(500.0, 1e7)]},
], ids=["no detector", "no setting", "no alarm", "one setting", "what cannot be drawn", "odd names", "far apart"])
def test_unusual_data_is_drawn_too(curves):
    svg = detectors_svg([Panel(title="<t>", curves=curves)], "a & b")
    ElementTree.fromstring(svg)
    assert not re.search(r'"(nan|-?inf)', svg)
