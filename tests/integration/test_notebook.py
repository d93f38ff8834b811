"""A real kernel: the cells a student would run, and what happens when the kernel is interrupted or killed."""

from __future__ import annotations

import os
import signal
import time

import pytest
from jupyter_client.manager import start_new_kernel

from ftlab.cluster.runs import labelled
from ftlab.config import runs_dir
from tests.limits import JOB_S, SOON_S

CELLS = ['''
import ftlab, torch
from ftlab import faults

def train(ctx):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    ctx.protect(model=model, optimizer=optimizer)
    x = torch.randn(256, 8)
    data = ctx.sampler(256, global_batch=32)
    for step in ctx.steps(60):
        with ctx.step():
            ids = data.indices(step)
            loss = model(x[ids]).square().mean()
            ctx.backward(loss)
            optimizer.step(); optimizer.zero_grad()
            ctx.report(loss=loss)
            __import__("time").sleep(0.01)
    print("done on", ctx.node)
    return ctx.rank
''', '''
cluster = ftlab.Cluster(nodes=2, spares=1)
cluster
''', '''
job = cluster.submit(train)
job.wait_for_step(10)
cluster.inject(faults.kill("node-1"))
report = job.result()
report
''']


@pytest.fixture
def kernel():
    manager, client = start_new_kernel()
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def _run(client, code: str) -> tuple[str, str, list[dict]]:
    """Execute a cell: its stdout, its stderr, its rich outputs; raises if the cell raised."""
    out, err, rich = [], [], []

    def hook(message: dict) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            (out if content["name"] == "stdout" else err).append(content["text"])
        elif message["msg_type"] in ("execute_result", "display_data"):
            rich.append(content["data"])

    reply = client.execute_interactive(code, timeout=JOB_S, output_hook=hook)["content"]
    assert reply["status"] == "ok", "\n".join(reply.get("traceback", []))
    return "".join(out), "".join(err), rich


def _gone(name: str, seconds: float = SOON_S) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (labelled().get(name) or (runs_dir() / name).exists()):
        time.sleep(0.05)
    return not labelled().get(name) and not (runs_dir() / name).exists()


def test_the_first_result_comes_within_five_cells_and_is_a_picture(kernel):
    _, client = kernel
    _run(client, CELLS[0])
    out, err, [table] = _run(client, CELLS[1])
    assert "node-2" in table["text/html"] and "2 nodes + 1 spare" in table["text/plain"]
    assert "is up" in out and not err  # stderr would cost marks in a graded cell
    out, err, [card] = _run(client, CELLS[2])
    assert "done on node-0" in out and "[node-0 rank=0]" in out and not err
    assert card["text/html"].count("<svg") >= 2 and "kill" in card["text/html"]
    _run(client, "cluster.close()")


def test_a_killed_kernel_leaves_nothing(kernel):
    manager, client = kernel
    _run(client, CELLS[0])
    _run(client, CELLS[1])
    out, _, _ = _run(client, "job = cluster.submit(train); job.wait_for_step(3); print(cluster.name)")
    name = out.split()[-1]
    os.kill(manager.provisioner.process.pid, signal.SIGKILL)
    assert _gone(name)


def test_an_interrupted_cell_leaves_a_usable_cluster(kernel):
    manager, client = kernel
    _run(client, CELLS[0])
    _run(client, CELLS[1])
    _run(client, "job = cluster.submit(lambda ctx: __import__('time').sleep(600))")
    client.execute("job.result()", stop_on_error=False)  # else the kernel may abort the cell after it
    time.sleep(1.0)  # the cell is waiting
    manager.interrupt_kernel()
    reply = client.get_shell_msg(timeout=SOON_S)["content"]
    assert reply["status"] == "error" and reply["ename"] == "WaitInterrupted"
    _run(client, "job.cancel()")
    out, _, _ = _run(client, f"print(cluster.submit(train).result(timeout={JOB_S}).steps); cluster.close()")
    assert "60" in out
