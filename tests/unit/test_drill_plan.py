"""What a drill plans before anything is started."""

from __future__ import annotations

import pytest

from ftlab.drill import drill


@pytest.mark.parametrize("steps", [20, 30, 60, 100, 150])
def test_the_disk_is_full_just_before_a_save_so_that_one_fails_however_long_steps_take(steps):
    fault = drill._plan_fault("disk", drill.DrillPlan(steps=steps))
    assert fault.at_step is not None and (fault.at_step + 1) % 10 == 0 and 5 <= fault.at_step < steps - 5


def test_a_twin_of_a_drill_that_runs_out_of_memory_takes_none_of_it():
    fault = drill._plan_fault("oom", drill.DrillPlan(way="allocation"))
    assert drill._options(fault)["sample_mb"] > 0
    assert drill._without_ballast(drill._options(fault)) == {"noisy": False}
