"""The stop button, and cells that are run again, in a real kernel: what goes on is told, and nothing piles up."""

from __future__ import annotations

import threading
import time

import pytest
from jupyter_client.manager import start_new_kernel

from ftlab.cluster.runs import labelled
from ftlab.config import runs_dir
from tests.leaks import look, wait_until_gone
from tests.limits import JOB_S, SOON_S

SET_UP = '''
import ftlab, time
from ftlab import faults

def train(ctx, steps=10_000):
    import torch
    model = torch.nn.Linear(2, 2)
    ctx.protect(model=model)
    for _ in ctx.steps(steps):
        with ctx.step():
            time.sleep(0.01)
    return ctx.rank
'''
MAKE = "cluster = ftlab.Cluster(nodes=1, spares=0)"
TRAIN = "job = cluster.submit(train)\njob.wait_for_step(3)\nprint('TRAINS')\n"


class Notebook:
    """Cells in a real kernel: what they show, and how they end."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel()

    def run(self, code: str, stop_at: str = "", cell: str = "", after: float = 0.3) -> tuple[str, dict, float]:
        """Execute a cell, and stop it so long after it has shown some text: its output, its reply, seconds from stop to
        end."""
        out: list[str] = []
        stopped: list[float] = []
        presses: list[threading.Timer] = []

        def hook(message: dict) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                assert content["name"] == "stdout", content["text"]  # stderr would cost marks in a graded cell
                out.append(content["text"])
                if stop_at and not stopped and stop_at in "".join(out):
                    stopped.append(0.0)
                    presses.append(threading.Timer(after, self._stop, [stopped]))
                    presses[0].start()

        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False,
                   "stop_on_error": False}
        message = self.client.session.msg("execute_request", content, metadata={"cellId": cell} if cell else {})
        self.client.shell_channel.send(message)
        reply = self._await(message["header"]["msg_id"], hook)
        for press in presses:  # one that came too late must not strike the next cell
            press.join()
        return "".join(out), reply, time.monotonic() - stopped[0] if stopped else 0.0

    def _stop(self, stopped: list[float]) -> None:
        stopped[0] = time.monotonic()
        self.manager.interrupt_kernel()

    def _await(self, request: str, hook) -> dict:
        idle = False
        while not idle:
            message = self.client.get_iopub_msg(timeout=JOB_S)
            if message["parent_header"].get("msg_id") == request:
                hook(message)
                idle = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
        while (reply := self.client.get_shell_msg(timeout=SOON_S))["parent_header"].get("msg_id") != request:
            pass
        return reply["content"]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def notebook():
    notebook = Notebook()
    assert notebook.run(SET_UP)[1]["status"] == "ok"
    yield notebook
    notebook.close()


@pytest.fixture(scope="module")
def cluster(notebook) -> str:
    """The name of a cluster that is called `cluster` in the notebook."""
    out, reply, _ = notebook.run(f"{MAKE}\nprint('NAME', cluster.name)", cell="cluster")
    assert reply["status"] == "ok", reply
    return out.split("NAME ")[1].split()[0]


def _shown(reply: dict) -> str:
    assert reply["status"] == "error", reply
    return "\n".join(reply["traceback"])


@pytest.mark.parametrize("wait", ["job.result()", "job.wait_for_step(5000)", "job.wait_for('node.died', timeout=60)"])
def test_the_stop_button_ends_the_wait_at_once_and_tells_what_goes_on(notebook, cluster, wait):
    _, reply, seconds = notebook.run(TRAIN + wait, stop_at="TRAINS", cell=wait)
    shown = _shown(reply)
    assert seconds < 1.0
    assert "job train goes on, at step" in shown and "job.cancel()" in shown and "cluster.close()" in shown
    assert "ftlab/cluster" not in shown and len(shown.splitlines()) <= 6, shown
    assert "line 4 of this cell" in shown and wait in shown
    out, reply, _ = notebook.run("print(job.done, end='')")
    assert out == "False" and reply["status"] == "ok"


def test_a_cell_that_is_run_again_takes_the_old_jobs_place_and_says_so_in_one_line(notebook, cluster):
    notebook.run(TRAIN + "job.result()", stop_at="TRAINS")
    out, reply, _ = notebook.run("job = cluster.submit(train, steps=5)\nprint('VALUES', job.result().values)")
    assert reply["status"] == "ok" and "VALUES {0: 0}" in out
    assert [line for line in out.splitlines() if "cancelled, the new one takes its place" in line], out


def test_a_job_that_somebody_still_counts_on_stays_and_the_error_is_one_line(notebook, cluster):
    _, reply, _ = notebook.run(f"{TRAIN}\ncluster.submit(train)")
    shown = _shown(reply)
    assert reply["ename"] == "JobRunning" and "job train is still running, at step" in shown
    assert "ftlab/cluster" not in shown and len(shown.splitlines()) <= 5, shown
    out, reply, _ = notebook.run("assert not job.done\njob.cancel()\njob.wait_for_end()\nprint(job.done, end='')")
    assert reply["status"] == "ok" and out == "True"


def test_an_error_shows_the_users_own_lines_and_none_of_ftlabs(notebook, cluster):
    _, reply, _ = notebook.run("def helper():\n    cluster.inject(faults.kill('rank-9'))\n\nhelper()")
    shown = _shown(reply)
    assert reply["ename"] == "UnknownNode" and "ranks are 0 to 0" in shown
    assert "line 4 of this cell:\n    helper()" in shown
    assert "line 2 of this cell, in helper:\n    cluster.inject(faults.kill('rank-9'))" in shown
    assert "injection.py" not in shown and "IPython" not in shown


def test_a_bug_in_the_train_function_still_shows_its_own_traceback(notebook, cluster):
    bad = "def bad(ctx):\n    return 1 / 0\n\ncluster.submit(bad, budgets={'crash': 0}).result()"
    shown = _shown(notebook.run(bad)[1])
    assert "ZeroDivisionError: division by zero" in shown and "in bad" in shown


def test_a_cell_that_is_run_again_closes_the_cluster_that_it_made_before(notebook, cluster):
    code = f"old = globals().get('two')\n{MAKE.replace('cluster =', 'two =')}\nprint('NAME', two.name)"
    first = notebook.run(code, cell="two")[0].split("NAME ")[1].split()[0]
    out, reply, _ = notebook.run(code, cell="two")
    second = out.split("NAME ")[1].split()[0]
    assert reply["status"] == "ok" and f"cluster {first}, which this cell made before, is closed" in out
    assert not labelled().get(first) and not (runs_dir() / first).exists()
    assert labelled().get(second) and labelled().get(cluster)  # of this run, and of another cell
    out, _, _ = notebook.run("print(old.running, two.running, cluster.running, end=''); two.close()")
    assert out == "False True True"


def test_several_clusters_on_purpose_stay(notebook, cluster):
    out, reply, _ = notebook.run(f"a = {MAKE[10:]}\nb = {MAKE[10:]}\nprint(a.running, b.running, cluster.running)\n"
                                 f"a.close(); b.close()")
    assert reply["status"] == "ok" and "True True True" in out and "is closed" not in out


def test_a_start_that_is_stopped_leaves_nothing_and_says_so(notebook):
    before, stopped = look(), 0
    for stop_at in ("starting", "importing torch", "nodes are up"):
        _, reply, seconds = notebook.run(MAKE.replace("cluster =", "three ="), stop_at=stop_at, after=0.0)
        if reply["status"] == "ok":  # it was up before the button was pressed
            notebook.run("three.close()")
            continue
        assert "the start of the cluster was stopped, and nothing of it is left" in _shown(reply)
        assert seconds < 1.5 and not wait_until_gone(before, seconds=1.0)
        stopped += 1
    assert stopped >= 1


def test_a_drill_that_is_stopped_ends_its_cluster(notebook):
    before = look()
    code = "from ftlab.drill import run_drill\nrun_drill('kill', nodes=1, spares=1, steps=5000, say=print)"
    _, reply, seconds = notebook.run(code, stop_at="training the undisturbed twin")
    assert "drill kill was stopped, and its cluster is closed" in _shown(reply)
    assert seconds < 2.0 and not wait_until_gone(before, seconds=1.0)


@pytest.mark.parametrize("answered", [False, True])
def test_a_submit_that_is_stopped_says_so_in_one_line_and_the_next_one_takes_its_place(notebook, cluster, answered):
    """The button once struck between the controller's answer and ours: its job went on, and nobody knew of it."""
    press = ("ask = cluster.api.post\ndef post(*args, **more):\n    cluster.api.post = ask\n"
             f"    ask(*args, **more) if {answered} else None\n    raise KeyboardInterrupt\ncluster.api.post = post\n")
    notebook.run("job = None")
    shown = _shown(notebook.run(f"{press}job = cluster.submit(train)")[1])
    assert "stopped while job train was being sent" in shown and "the next submit takes its place" in shown
    assert "ftlab/cluster" not in shown and len(shown.splitlines()) <= 6, shown
    out, reply, _ = notebook.run("print('VALUES', cluster.submit(train, steps=5).result().values)")
    assert reply["status"] == "ok" and "VALUES {0: 0}" in out, reply
    assert ("cancelled, the new one takes its place" in out) is answered


def test_a_cancel_that_is_stopped_says_so_in_one_line(notebook, cluster):
    notebook.run(TRAIN)
    shown = _shown(notebook.run("ask = cluster.api.post\ndef post(*args, **more):\n    cluster.api.post = ask\n"
                                "    raise KeyboardInterrupt\ncluster.api.post = post\njob.cancel()")[1])
    assert "stopped while job train was being cancelled" in shown and len(shown.splitlines()) <= 6, shown
    assert notebook.run("job.cancel(); job.wait_for_end()")[1]["status"] == "ok"


@pytest.mark.parametrize("end", ["four.close()", MAKE.replace("cluster =", "four =")], ids=["close", "run again"])
def test_closing_a_cluster_that_is_stopped_comes_to_its_end_and_is_told_in_one_line(notebook, end):
    before = look()
    notebook.run(MAKE.replace("cluster =", "four ="), cell="four")
    press = ("import signal\nold = four.follower.close\ndef close():\n    four.follower.close = old\n"
             "    signal.raise_signal(signal.SIGINT)\n    old()\nfour.follower.close = close")
    notebook.run(press)
    shown = _shown(notebook.run(end, cell="four")[1])
    assert ("is closed all the same" if "close" in end else "the start of the cluster was stopped") in shown
    assert "ftlab/cluster" not in shown and len(shown.splitlines()) <= 6, shown
    assert not wait_until_gone(before, seconds=1.0)
    assert notebook.run("assert not four.running\nfour.close()")[1]["status"] == "ok"
