"""Split brain: a node that was given up and still runs can neither commit a step nor write nor come back as it was."""

from __future__ import annotations

import contextlib
import json

import psutil
import pytest
from tornado.httpclient import HTTPRequest
from tornado.ioloop import IOLoop
from tornado.iostream import StreamClosedError
from tornado.websocket import WebSocketClosedError, websocket_connect

import ftlab
from ftlab import faults, messages
from ftlab.cluster.packets import available
from tests import trains
from tests.conftest import require


@pytest.fixture(scope="module")
def cluster():
    with ftlab.Cluster(nodes=3, spares=1, echo=None) as cluster:
        yield cluster


def test_a_partitioned_node_that_still_runs_commits_nothing_and_comes_back_as_new(cluster):
    require("filters", not available(), available())
    twin = cluster.submit(trains.everything, steps=250).result(timeout=90)
    job = cluster.submit(trains.everything, steps=250)
    job.wait_for_step(20)
    victim = next(node for node in cluster.status()["nodes"] if 1 in node["ranks"])
    worker = psutil.Process(victim["workers"]["0"]["pid"])
    injection = cluster.inject(faults.partition(victim["name"]))
    assert injection.receipt["filtered"] == injection.receipt["sockets"] >= 6
    job.wait_for("recovery.finished")
    assert worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE  # nobody ended it: it could still do harm
    verdict = next(event for event in job.events if event.kind == "node.died")
    cluster.order(do="heal", node=victim["name"])
    fenced = job.wait_for("node.fenced")
    report = job.result(timeout=90)
    assert fenced.source == victim["name"] and fenced.data["refused"]
    stale = fenced.data["refused"][0]  # what it still held of the old generation when it came back
    assert stale["generation"] < fenced.generation
    at_verdict = max(event.step for event in report.events if event.kind == "step.committed" and event.at < verdict.at)
    assert stale["step"] <= at_verdict + 1  # it did not get on alone
    late = [event for event in report.events if event.kind == "step.committed" and event.at > verdict.at]
    assert late and all(event.generation > stale["generation"] for event in late)
    rejoined = next(event for event in report.events if event.kind == "node.joined" and event.seq > fenced.seq)
    assert rejoined.data["fresh"] and rejoined.data["role"] == "spare"
    assert not worker.is_running()  # its old worker is gone, a new one waits as a spare
    assert report.digest == twin.digest is not None


def test_a_stopped_node_wakes_up_in_a_new_world_and_starts_over(cluster):
    job = cluster.submit(trains.plain, steps=250)
    job.wait_for_step(20)
    victim = next(node["name"] for node in cluster.status()["nodes"] if 0 in node["ranks"])
    cluster.inject(faults.hang(victim, heal_after=1.2))
    assert job.wait_for("node.fenced").source == victim
    assert job.result(timeout=90).recovered


def test_a_node_without_a_controller_ends_its_workers_when_its_lease_runs_out():
    require("filters", not available(), available())
    with ftlab.Cluster(nodes=1, spares=0, echo=None, lease_s=1.0, replace=False) as cluster:
        job = cluster.submit(trains.plain, steps=100_000, min_nodes=1)  # a world of one: no peer would stop it
        job.wait_for_step(5)
        worker = psutil.Process(cluster.status()["nodes"][0]["workers"]["0"]["pid"])
        cluster.inject(faults.partition("node-0"))
        psutil.wait_procs([worker], timeout=10)
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def _talk(cluster, *lines: str | bytes, token: str | None = None) -> tuple[list, int | None, str | None]:
    """Say something on a node link; what came back, and the code and reason with which the link was closed."""

    async def talk():
        request = HTTPRequest(cluster.url.replace("http", "ws") + "/node",
                              headers={"Authorization": f"Bearer {token or cluster.token}"})
        link = await websocket_connect(request)
        for line in lines:
            with contextlib.suppress(StreamClosedError, WebSocketClosedError):  # it may not even read it all
                await link.write_message(line, binary=isinstance(line, bytes))
        answers = []
        while (raw := await link.read_message()) is not None:
            answers.append(json.loads(raw))
        return answers, link.close_code, link.close_reason

    return IOLoop(make_current=False).run_sync(talk, timeout=20)


def _hello(**changes) -> bytes:
    fields = {"node": "node-77", "address": "127.0.0.1", "pid": 1, "instance": "mallory"}
    return messages.dumps(messages.Hello(**{**fields, **changes}))


@pytest.mark.parametrize(("lines", "reason"), [
    ([b"\x00\xff garbage"], "not a JSON message"),
    ([b"[1, 2]"], "must be a JSON object"),
    ([b'{"kind": "Teapot"}'], "unknown kind"),
    ([messages.dumps(messages.Ack(generation=1, step=1))], "must be Hello"),
    ([_hello(node="node-0")], "already linked by another process"),
    ([b"x" * (5 << 20)], None),  # larger than a message may be: closed with 1009
    ([_hello(), messages.dumps(messages.Welcome(fresh=True, heartbeat_s=1, lease_s=1))], "does not send Welcome"),
    ([_hello(node="node-78"), b'{"kind":"Heartbeat","workers":[{}]}'], "local_rank"),
    ([_hello(node="node-80"), b'{"kind":"Heartbeat","steps":[[0,1]]}'], "not enough values"),
    ([_hello(node="node-81"), b'{"kind":"Heartbeat","steps":[{"a":1}]}'], "invalid literal"),
])
def test_what_does_not_belong_on_a_link_is_refused_and_nobody_else_notices(cluster, lines, reason):
    job = cluster.submit(trains.plain, steps=60)
    job.wait_for_step(5)
    _, code, said = _talk(cluster, *lines)
    assert code in ((1009, None) if reason is None else (1002,))  # None: cut off in the middle of a flood
    assert reason is None or reason in (said or "")
    report = job.result(timeout=60)
    assert report.recoveries == 0
    assert any(event.kind == "message.refused" for event in report.events) or reason is None


def test_an_old_generations_step_is_refused(cluster):
    """A node with the right token claims steps for a seat it does not have."""
    job = cluster.submit(trains.plain, steps=80)
    job.wait_for_step(5)
    forged = messages.StepDone(cluster.status()["generation"] - 1, 10_000, 0.0)
    beat = messages.dumps(messages.Heartbeat(steps=[[0, *forged]]))
    _talk(cluster, _hello(node="node-79"), beat, b"bye")
    report = job.result(timeout=60)
    refused = [event.data["reason"] for event in report.events if event.kind == "message.refused"]
    assert any("no seat" in reason for reason in refused)
    assert report.steps == 80
