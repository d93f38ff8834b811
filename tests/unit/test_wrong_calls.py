"""Wrong calls that need no cluster: each is told as such and names its argument, before anything is started."""

from __future__ import annotations

import pytest

import ftlab
from ftlab import faults
from ftlab.cli.main import main
from ftlab.drill import run_drill, run_drills, run_random
from ftlab.errors import FtlabError

NAN = float("nan")
WRONG = [  # a call, and what its error must name
    (lambda: faults.random_schedule("x", 3, ["node-1"], 50), "seed"),
    (lambda: faults.random_schedule(1, -3, ["node-1"], 50), "count"),
    (lambda: faults.random_schedule(1, 3, [], 50), "nodes"),
    (lambda: faults.random_schedule(1, 3, ["node-1"], 50, kinds=["meteor"]), "meteor"),
    (lambda: ftlab.Cluster(nodes="4"), "nodes"),
    (lambda: ftlab.Cluster(nodes=True), "nodes"),
    (lambda: ftlab.Cluster(nodes=None), "nodes"),
    (lambda: ftlab.Cluster(spares=-1), "spares"),
    (lambda: ftlab.Cluster(heartbeat_s="x"), "heartbeat_s"),
    (lambda: ftlab.Cluster(heartbeat_s=NAN), "heartbeat_s"),
    (lambda: ftlab.Cluster(dead_s=float("inf")), "dead_s"),
    (lambda: ftlab.Cluster(reclaim_s=-1), "reclaim_s"),
    (lambda: ftlab.Cluster(replace="no"), "replace"),
    (lambda: ftlab.Cluster(node=4), "'nodes'"),
    (lambda: ftlab.Cluster(backend=3), "backend"),
    (lambda: ftlab.Cluster(backend="teapot"), "teapot"),
    (lambda: ftlab.Cluster(port="x"), "port"),
    (lambda: ftlab.Cluster(policy=3), "policy"),
    (lambda: ftlab.Cluster(detector=3), "detector"),
    (lambda: ftlab.Cluster(detector="psi"), "psi"),
    (lambda: ftlab.Cluster(echo="screen"), "echo"),
    (lambda: ftlab.Cluster(memory_mb="1g"), "memory_mb"),
    (lambda: ftlab.ClusterConfig(4), "by name"),
    (lambda: ftlab.CheckpointConfig(directory=3), "directory"),
    (lambda: ftlab.CheckpointConfig(every=NAN), "every"),
    (lambda: ftlab.CheckpointConfig(resume=-1), "resume"),
    (lambda: ftlab.HealthConfig(memory_warn="x"), "memory_warn"),
    (lambda: ftlab.HealthConfig(spike=3), "'spike'"),
    (lambda: ftlab.connect("ft-nobody"), "ft-nobody"),
    (lambda: ftlab.connect(3), "name"),
    (lambda: ftlab.connect("http://127.0.0.1:1", token=3), "token"),
    (lambda: run_drill("meteor"), "meteor"),
    (lambda: run_drill(["kill"]), "kill"),
    (lambda: run_drill("kill", steps="x"), "steps"),
    (lambda: run_drill("kill", stepz=50), "'steps'"),
    (lambda: run_drill("kill", step_s=-1), "step_s"),
    (lambda: run_drill("kill", settings={"nods": 3}), "nods"),
    (lambda: run_drill("kill", settings=7), "settings"),
    (lambda: run_drill("kill", twin="yes"), "twin"),
    (lambda: run_drills("kill"), "names"),
    (lambda: run_random(faults=0), "faults"),
    (lambda: run_random(faults="x"), "faults"),
]


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("something was started")

    monkeypatch.setattr("subprocess.Popen", refuse)


@pytest.mark.parametrize(("call", "named"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_a_wrong_call_is_told_and_names_its_argument(call, named):
    with pytest.raises(FtlabError) as refusal:
        call()
    assert named in str(refusal.value) and len(str(refusal.value)) < 600


@pytest.mark.parametrize(("arguments", "named"), [
    (["drill", "kill", "--nodes", "x"], "--nodes"), (["drill", "kill", "--nodes", "-1"], "nodes"),
    (["drill", "kill", "--step-ms", "nan"], "step_s"), (["drill", "kill", "--step-ms", "-5"], "step_s"),
    (["drill", "kill", "--steps", "1"], "steps"), (["drill", "random", "--faults", "0"], "faults"),
    (["drill", "kill", "--way", "flip"], "flip"), (["drill", "kill", "--report", "/nowhere/x.html"], "/nowhere"),
    (["drill", "meteor"], "meteor"), (["up", "--port", "99999"], "port"), (["up", "--spares", "-1"], "spares"),
    (["bench", "recovery", "--runs", "0"], "runs"), (["bench", "recovery", "--nodes", "-1"], "nodes"),
    (["bench", "checkpoint", "--size-mb", "x"], "--size-mb"), (["bench", "interval", "--every", "0"], "every"),
    (["bench", "detectors", "--record", "--seconds", "-1"], "seconds"), (["up", "--backend", "teapot"], "backend"),
    (["bench", "overhead", "--nodes", "999"], "nodes"), (["bench", "interval", "--kills", "-1"], "kills"),
    (["bench", "checkpoint", "--repeats", "-1"], "repeats"), (["bench", "checkpoint", "--blocks", "-1"], "blocks"),
    (["bench", "detectors", "--record", "--seconds", "nan"], "seconds"),
], ids=" ".join)
def test_a_wrong_command_ends_with_2_and_says_why(arguments, named, capsys):
    try:
        code = main(arguments)
    except SystemExit as ended:  # argparse's own
        code = ended.code
    shown = capsys.readouterr()
    assert code == 2 and named in shown.err and not shown.out
