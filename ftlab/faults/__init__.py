"""Faults: real ones, from a catalogue, at a step or a time, each with a receipt that it happened.

    cluster.inject(faults.kill("node-2"))                       now
    cluster.inject(faults.hang("node-1", at_step=100, heal_after=3))
    cluster.inject(faults.partition("node-3", after=2.0, heal_after=3))
    cluster.inject(faults.partition(["node-1", "node-2"], way="sends"))
"""

from ftlab.faults.catalogue import (
    KINDS,
    Fault,
    blackout,
    controller,
    corrupt,
    crash,
    disk,
    hang,
    kill,
    link,
    make,
    nan,
    oom,
    partition,
    stall,
    straggler,
)
from ftlab.faults.injection import Injection, Pending
from ftlab.faults.schedule import Schedule, random_schedule

__all__ = ["KINDS", "Fault", "Injection", "Pending", "Schedule", "blackout", "controller", "corrupt", "crash", "disk",
           "hang", "kill", "link", "make", "nan", "oom", "partition", "random_schedule", "stall", "straggler"]
