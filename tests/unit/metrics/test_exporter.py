"""Metrics are the event log, counted."""

from __future__ import annotations

import pytest

from ftlab.events import Event
from ftlab.metrics.exporter import Exporter


def event(kind: str, **data: object) -> Event:
    return Event(kind=kind, seq=1, at=1.0, source="node-0", step=7, data=data)


@pytest.mark.parametrize(("events", "line"), [
    ([event("step.spoiled", cause="numbers", action="Retry", reason="the loss is NaN")] * 2,
     'ftlab_steps_spoiled_total{action="Retry",cause="numbers"} 2.0'),
    ([event("step.committed", world=2, ranks=2, skipped="the loss is NaN", passed_over=[3, 4])],
     "ftlab_batches_skipped_total 1.0"),
    ([event("step.committed", world=2, ranks=2, loss=0.25)], "ftlab_batches_skipped_total 0.0"),
    ([event("straggler.found", ratio=2.0, cause="stopped")], "ftlab_stragglers_total 1.0"),
    ([event("memory.warned", detail="cgroup / is 95% full")], "ftlab_memory_warnings_total 1.0"),
])
def test_what_the_health_monitor_finds_is_counted(events, line):
    exporter = Exporter()
    for each in events:
        exporter.observe(each)
    assert line in exporter.render()[1].decode().splitlines()
