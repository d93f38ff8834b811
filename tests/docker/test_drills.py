"""Faults in containers: each fired, was detected, ended in the bits of an undisturbed run, and left nothing."""

from __future__ import annotations

import pytest

from ftlab.drill import DRILLS, run_drill
from ftlab.faults.catalogue import WAYS

pytestmark = pytest.mark.docker
VERDICTS = {("oom", "allocation"): "equivalent", ("oom", "kernel"): "equivalent", ("nan", "again"): "diverged"}
RECEIPTS = {"kill": ("engine_status", "exited"), "hang": ("engine_status", "paused"), "partition": ("networks", []),
            "crash": ("status", "gone")}


@pytest.fixture(scope="module")
def twins() -> dict:
    return {}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in DRILLS
                                           for way in (WAYS[name] if name in ("nan", "oom") else ("",))])
def test_every_drill_holds(name, way, twins, nothing_of_ours_stays):
    report = run_drill(name, twin=twins.get("drill"), steps=60 if way == "kernel" else 100, seed=1, way=way,
                       settings={"backend": "docker"})
    twins["drill"] = report.twin
    assert report.failed_expectations == [], report.repeat
    assert report.injected == 1 and report.leaked == 0 and report.backend == "docker"
    assert report.facts["verdict"] == VERDICTS.get((name, way), "identical")
    key, value = RECEIPTS.get(name, ("at", None))
    receipt = next(event.data["receipt"] for event in report.events if event.kind == "fault.injected")
    assert value is None or receipt[key] == value
    if way == "kernel":
        assert any(event.kind == "node.oom_killed" for event in report.events), "the kernel's kill was not read back"
