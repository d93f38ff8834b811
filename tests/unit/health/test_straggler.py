"""The rank that holds the others up, told from noise; and what the kernel's counters say about the reason."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from ftlab.config import HealthConfig
from ftlab.health.straggler import StepTimes, Straggler, Turn, Usage, name_cause
from tests.limits import SOON_S

CONFIG = HealthConfig(straggler_factor=1.5, straggler_steps=20)


def times(busy: list[float], steps: int = 20, noise: float = 0.0) -> StepTimes:
    """Ranks that work so long in each step, more or less."""
    made, draw = StepTimes(CONFIG), random.Random(5)
    for step in range(steps):
        for rank, seconds in enumerate(busy):
            made.add(rank, step, seconds * (1 + noise * draw.uniform(-1, 1)))
    return made


# ---- who -----------------------------------------------------------------------------------------------------------


def test_the_slow_rank_is_named_with_how_slow_it_is():
    assert times([0.010, 0.010, 0.030, 0.010]).find() == Straggler(rank=2, ratio=pytest.approx(3.0), busy_s=0.030,
                                                                   others_s=0.010)


@pytest.mark.parametrize(("busy", "rank"), [
    ([0.010, 0.010, 0.010, 0.010], None),
    ([0.010, 0.010, 0.010, 0.0149], None),
    ([0.010, 0.010, 0.010, 0.0160], 3),
    ([0.010, 0.010, 0.001, 0.010], None),
    ([0.010, 0.040], 1), ([0.040, 0.010], 0), ([0.010, 0.014], None),
    ([0.001, 0.0029], None), ([0.001, 0.0031], 1), ([0.0, 0.010], 1),
    ([0.010, 0.030, 0.040, 0.010, 0.010], 2),
    ([0.010] * 63 + [0.020], 63),
    ([5.0], None), ([], None),
], ids=["all alike", "below the factor", "above the factor", "a fast one", "of two", "of two, the first",
        "of two, a little", "too small to feel", "just felt", "others do nothing", "two are slow", "of many",
        "alone", "nobody"])
def test_only_who_is_clearly_slower_than_the_others_holds_them_up(busy, rank):
    found = times(busy).find()
    assert (found.rank if found else None) == rank


def test_noise_makes_no_straggler_and_hides_none():
    assert times([0.020] * 4, noise=0.5).find() is None
    assert times([0.020, 0.050, 0.020, 0.020], noise=0.5).find().rank == 1


def test_a_difference_within_the_others_own_spread_is_no_evidence():
    made = StepTimes(CONFIG)
    for step in range(20):
        made.add(0, step, 0.010 if step % 2 else 0.050)  # median 0.030, and 0.020 away from it at every step
        made.add(1, step, 0.060)
    assert made.find() is None


def test_some_slow_steps_are_noise_and_most_steps_are_not():
    def found(slow: int) -> Straggler | None:
        made = StepTimes(CONFIG)
        for step in range(20):
            made.add(0, step, 0.010)
            made.add(1, step, 0.100 if step < slow else 0.010)
        return made.find()

    assert found(9) is None
    assert found(11).rank == 1


def test_nobody_is_accused_before_enough_steps_were_seen():
    assert times([0.010, 0.100], steps=19).find() is None
    assert times([0.010, 0.100], steps=20).find().rank == 1


def test_a_rank_that_is_well_again_is_forgiven():
    made = times([0.010, 0.100])
    for step in range(20, 31):
        made.add(0, step, 0.010)
        made.add(1, step, 0.010)
    assert made.find() is None


def test_a_rank_with_few_steps_is_neither_accused_nor_asked():
    made = times([0.010, 0.100])
    made.add(2, 19, 9.0)
    assert made.find() == Straggler(rank=1, ratio=pytest.approx(10.0), busy_s=0.100, others_s=0.010)


def test_a_step_that_is_told_again_counts_once():
    made = StepTimes(CONFIG)
    for step in range(10):
        for _ in range(2):
            made.add(0, step, 0.010)
            made.add(1, step, 0.100)
    assert made.find() is None


def test_memory_is_bounded_and_a_new_generation_begins_from_nothing():
    made = times([0.010, 0.100], steps=1000)
    assert sum(map(len, made._times.values())) == 40
    made.clear()
    assert made.find() is None
    for step in range(20):
        made.add(0, step, 0.100)
        made.add(1, step, 0.010)
    assert made.find().rank == 0


# ---- why -----------------------------------------------------------------------------------------------------------

ZERO = Usage(cpu_s=0.0, delay_s=0.0, major_faults=0, throttled=0, throttled_s=0.0, resent=0)


def after(**changes) -> Usage:
    return Usage(**{**vars(ZERO), "cpu_s": 9.0, **changes})


@pytest.mark.parametrize(("later", "outside_s", "cause"), [
    (after(), 0.5, ""),
    (after(stopped=True), 9.0, "stopped"),
    (after(throttled=60, throttled_s=4.0), 0.5, "CPU throttled by its cgroup"),
    (after(throttled=60, throttled_s=4.0, delay_s=4.0), 5.0, "CPU throttled by its cgroup"),
    (after(throttled=2, throttled_s=0.1), 0.5, ""),
    (after(throttled=0, throttled_s=4.0), 0.5, ""),
    (after(delay_s=4.0), 0.5, "waits for a CPU"),
    (after(delay_s=4.0, major_faults=5000), 5.0, "waits for a CPU"),
    (after(delay_s=1.0), 0.5, ""),
    (after(major_faults=5000), 5.0, "paging"),
    (after(major_faults=100), 0.5, ""),
    (after(cpu_s=1.0), 5.0, "data (time between steps)"),
    (after(cpu_s=1.0, resent=500), 5.0, "data (time between steps)"),
    (after(cpu_s=1.0, resent=500), 0.5, "network"),
    (after(cpu_s=9.0, resent=500), 0.5, ""),
    (after(cpu_s=1.0, resent=3), 0.5, ""),
    (after(cpu_s=1.0), 0.5, ""),
    (Usage(), 5.0, "data (time between steps)"),
    (Usage(), 0.5, ""),
    (Usage(delay_s=4.0), 0.5, "waits for a CPU"),
    (Usage(resent=500), 0.5, ""),
])
def test_the_cause_is_what_the_counters_show(later, outside_s, cause):
    assert name_cause(ZERO, later, outside_s, wall_s=10.0) == cause


def test_without_counters_before_or_without_time_nothing_is_named():
    assert name_cause(Usage(), after(delay_s=9.0, throttled=9, throttled_s=9.0, major_faults=9999), 0.0, 10.0) == ""
    assert name_cause(ZERO, after(delay_s=9.0), 1.0, 0.0) == ""


# ---- the counters --------------------------------------------------------------------------------------------------

STAT = "77 (a (b) c) S 1 77 77 0 -1 4194304 500 0 12 0 250 150 0 0 20 0 3 0 100 1 1"
SNMP = "Ip: Forwarding\nIp: 1\nTcp: RtoMin InSegs OutSegs RetransSegs\nTcp: 200 1000 900 17\nUdp: A\nUdp: 1\n"


def machine(tmp_path: Path, cgroup: str, stat: str = STAT, **cpu_stats: str) -> Usage:
    """What is read of process 77 in a made-up /proc, with these `cpu.stat` files (`a__b` is a/b)."""
    folder = tmp_path / "proc" / "77"
    (folder / "net").mkdir(parents=True)
    for name, text in (("stat", stat), ("schedstat", "4000000000 1500000000 88\n"), ("cgroup", cgroup),
                       ("net/snmp", SNMP)):
        (folder / name).write_text(text)
    for name, text in cpu_stats.items():
        place = tmp_path / "cgroup" / name.strip("_").replace("__", "/")
        place.mkdir(parents=True, exist_ok=True)
        (place / "cpu.stat").write_text(text)
        (place / "cgroup.controllers").write_text("cpu memory\n")
    return Usage.read(77, tmp_path / "proc", tmp_path / "cgroup")


def test_the_counters_of_a_process_are_read(tmp_path):
    ticks = os.sysconf("SC_CLK_TCK")
    assert machine(tmp_path, "") == Usage(cpu_s=400 / ticks, delay_s=1.5, major_faults=12, resent=17)


@pytest.mark.parametrize(("state", "stopped"), [("S", False), ("R", False), ("D", False), ("T", True), ("t", True)])
def test_a_stopped_process_is_seen(tmp_path, state, stopped):
    assert machine(tmp_path, "", STAT.replace(") S ", f") {state} ")).stopped is stopped


def test_throttling_is_read_from_a_cgroup_of_version_1_and_all_around_it(tmp_path):
    inner = "nr_periods 9\nnr_throttled 4\nthrottled_time 1500000000\n"
    outer = "nr_periods 9\nnr_throttled 1\nthrottled_time 500000000\n"
    found = machine(tmp_path, "5:memory:/x\n3:cpu,cpuacct:/jobs/one\n0::/\n", cpu="nr_throttled 0\nthrottled_time 0",
                    cpu__jobs=outer, cpu__jobs__one=inner)
    assert (found.throttled, found.throttled_s) == (5, 2.0)


def test_throttling_is_read_from_a_cgroup_of_version_2(tmp_path):
    found = machine(tmp_path, "0::/jobs\n", _="usage_usec 9\n",
                    jobs="usage_usec 77\nnr_periods 9\nnr_throttled 6\nthrottled_usec 2500000\n")
    assert (found.throttled, found.throttled_s) == (6, 2.5)


def test_without_proc_or_process_nothing_is_known(tmp_path):
    assert Usage.read(77, tmp_path / "none", tmp_path / "none") == Usage()
    assert Usage.read(2 ** 22 + 1) == Usage()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_real_process_counts_its_cpu_time_and_shows_that_it_is_stopped():
    child = os.fork()
    if child == 0:
        while True:
            pass
    try:
        deadline = time.monotonic() + SOON_S
        while not (Usage.read(child).cpu_s or 0.0) > 0.02:
            assert time.monotonic() < deadline, "a process that spins uses CPU time"
        first = Usage.read(child)
        assert first.delay_s is not None and first.major_faults is not None and not first.stopped
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        assert name_cause(first, Usage.read(child), 0.0, 1.0) == "stopped"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_ready_to_run_and_seldom_run_is_starved_and_nothing_else_is():
    before = Turn(ready=True, cpu_s=5.0)
    assert Turn(ready=True, cpu_s=5.1).starves(before, 1.0)
    assert not Turn(ready=True, cpu_s=5.9).starves(before, 1.0), "an endless loop"
    assert not Turn(ready=False, cpu_s=5.0).starves(before, 1.0), "stopped, or it sleeps"
