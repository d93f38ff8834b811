"""Drills: a cluster, a fault and an expectation make a report."""
