"""Drills: a cluster, a fault and what is expected of it, measured against an undisturbed twin."""

from ftlab.drill.drill import DRILLS, run_drill, run_drills, run_random
from ftlab.report.verdict import judged

__all__ = ["DRILLS", "judged", "run_drill", "run_drills", "run_random"]
