"""Is the machine busy? From what the kernel counts, read at two moments."""

from __future__ import annotations

import pytest

from ftlab.health.pressure import Pressure, cpu_pressure


def test_the_kernels_count_is_read_or_there_is_none():
    seconds = cpu_pressure()
    assert seconds is None or seconds >= 0


@pytest.mark.parametrize(("counts", "busy"), [((5.0, 5.9), True), ((5.0, 5.2), False), ((None, None), False),
                                              ((5.0, None), False)])
def test_a_machine_is_busy_if_something_waited_for_a_cpu_most_of_the_time(counts, busy):
    told = iter(counts)
    pressure = Pressure(lambda: next(told))
    pressure.begin(100.0)
    pressure.begin(100.5)  # it counts already
    assert pressure.is_busy(101.0) is busy


def test_before_it_counts_and_after_it_ended_nothing_is_busy():
    pressure = Pressure(lambda: 5.0)
    assert not pressure.is_busy(100.0)
    pressure.begin(100.0)
    pressure.end()
    assert not pressure.is_busy(101.0)
