"""How long tests wait before they give up: all in one place, and all generous. None of them is how long a thing takes.

A machine with noisy neighbours, or one that runs several tests at once, takes many times as long as an idle one, and
that is no failure. How fast things are is measured by `ftlab bench`, as ratios within one run. pytest's own limit for a
whole test, `timeout` in pyproject.toml, stands above all of these.
"""

from __future__ import annotations

JOB_S = 180.0  # a job on a cluster, from submit to its report
COMMAND_S = 240.0  # a command of ours in a process of its own, torch's import included
BATCH_S = 900.0  # a command that runs many things: a batch of submissions, a notebook, all drills
START_S = 300.0  # a server, a cluster of containers or a kernel, until it answers
SOON_S = 30.0  # what should happen at once: a process that ends, an answer, a file that is there
GROUP_S = 60.0  # ranks of a process group, until all have said what came of it
