"""Split brain: a node that was given up and still runs can neither commit a step nor write nor come back as it was."""

from __future__ import annotations

import contextlib
import json
import time

import psutil
import pytest
from tornado.httpclient import HTTPRequest
from tornado.ioloop import IOLoop
from tornado.iostream import StreamClosedError
from tornado.websocket import WebSocketClosedError, websocket_connect

import ftlab
from ftlab import faults, messages
from ftlab.cluster.abilities import no_packet_loss
from ftlab.messages import Place
from tests import trains
from tests.conftest import require
from tests.limits import JOB_S, SOON_S


@pytest.fixture(scope="module")
def cluster():
    with ftlab.Cluster(nodes=3, spares=1, port=0, echo=None) as cluster:
        yield cluster


def test_a_partitioned_node_that_still_runs_commits_nothing_and_comes_back_as_new(cluster):
    require("filters", not no_packet_loss(), no_packet_loss())
    twin = cluster.submit(trains.everything, steps=250).result(timeout=JOB_S)
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
    report = job.result(timeout=JOB_S)
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
    assert job.result(timeout=JOB_S).recovered


def test_a_node_without_a_controller_stops_training_when_its_lease_runs_out_and_keeps_its_state():
    require("filters", not no_packet_loss(), no_packet_loss())
    with ftlab.Cluster(nodes=1, spares=0, echo=None, lease_s=1.0, replace=False) as cluster:
        job = cluster.submit(trains.plain, steps=100_000, min_nodes=1)  # a world of one: no peer would stop it
        job.wait_for_step(5)
        worker = psutil.Process(cluster.status()["nodes"][0]["workers"]["0"]["pid"])
        cluster.inject(faults.partition("node-0"))
        begin, used = time.monotonic(), -1.0
        while (now := sum(worker.cpu_times()[:2])) != used:  # it computes nothing any more
            assert time.monotonic() < begin + SOON_S
            used = now
            time.sleep(0.5)
        assert worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
        job.wait_for("node.died")
        cluster.order(do="heal", node="node-0")
        (stale,) = job.wait_for("node.fenced").data["refused"]
        assert stale["place"] == Place.RECOVERING


def test_a_controller_that_answers_again_after_the_lease_finds_the_state_where_it_was():
    """Its nodes ended their workers then: state lost with every node alive."""
    with ftlab.Cluster(nodes=2, spares=0, echo=None, lease_s=1.0) as cluster:
        job = cluster.submit(trains.plain, steps=100_000)
        job.wait_for_step(20)
        workers = [worker["pid"] for node in cluster.status()["nodes"] for worker in node["workers"].values()]
        controller = psutil.Process(next(event.data["pid"] for event in cluster.events
                                         if event.kind == "controller.started"))
        controller.suspend()
        time.sleep(1.6)  # longer than the lease; workers that do not stop are ended after two more
        controller.resume()
        step = job.wait_for("recovery.finished").step
        assert job.wait_for_step(step + 10) and step > 20
        kept = [worker["pid"] for node in cluster.status()["nodes"] for worker in node["workers"].values()]
        stuck = [event.data["detail"] for event in job.events if event.kind == "worker.failed"]
        assert all("did not stop within" in each for each in stuck), stuck  # docs/recovery.md: gloo can lose a send
        assert len(set(workers) - set(kept)) == len(stuck) <= 1
        job.cancel()


def _talk(cluster, *lines: str | bytes, raw: bytes = b"") -> tuple[list, int | None, str | None]:
    """Say something on a node link, or write raw bytes to it; what came back, and the code and reason with which the
    link was closed."""

    async def talk():
        request = HTTPRequest(cluster.url.replace("http", "ws") + "/node",
                              headers={"Authorization": f"Bearer {cluster.token}"})
        link = await websocket_connect(request)
        if raw:
            await link.protocol.stream.write(raw)
        for line in lines:
            with contextlib.suppress(StreamClosedError, WebSocketClosedError):  # it may not even read it all
                await link.write_message(line, binary=isinstance(line, bytes))
        answers = []
        while (answer := await link.read_message()) is not None:
            answers.append(json.loads(answer))
        return answers, link.close_code, link.close_reason

    return IOLoop(make_current=False).run_sync(talk, timeout=SOON_S)


def _hello(**changes) -> bytes:
    fields = {"node": "node-77", "address": "127.0.0.1", "pid": 1, "instance": "mallory"}
    return messages.dumps(messages.Hello(**{**fields, **changes}))


@pytest.mark.parametrize(("lines", "reason"), [
    ([b"\x00\xff garbage"], "not a JSON message"),
    ([b"[1, 2]"], "must be a JSON object"),
    ([b'{"kind": "Teapot"}'], "unknown kind"),
    ([messages.dumps(messages.Ack(generation=1, step=1))], "must be Hello"),
    ([_hello(node="node-0")], "already linked by another process"),
    ([_hello(), messages.dumps(messages.Welcome(fresh=True, heartbeat_s=1, lease_s=1))], "does not send Welcome"),
    ([_hello(node="node-78"), b'{"kind":"Heartbeat","workers":[{}]}'], "local_rank"),
    ([_hello(node="node-80"), b'{"kind":"Heartbeat","steps":[[0,1]]}'], "not enough values"),
    ([_hello(node="node-81"), b'{"kind":"Heartbeat","steps":[{"a":1}]}'], "invalid literal"),
])
def test_what_does_not_belong_on_a_link_is_refused_and_nobody_else_notices(cluster, lines, reason):
    job = cluster.submit(trains.plain, steps=60)
    job.wait_for_step(5)
    _, code, said = _talk(cluster, *lines)
    assert code == 1002 and reason in (said or "")
    report = job.result(timeout=JOB_S)
    assert report.recoveries == 0
    assert any(event.kind == "message.refused" for event in report.events)


def test_a_message_that_is_too_large_is_refused_by_its_head_and_nobody_else_notices(cluster):
    job = cluster.submit(trains.plain, steps=60)
    job.wait_for_step(5)
    head = b"\x82\xff" + (5 << 20).to_bytes(8, "big") + b"mask"  # a binary frame of 5 MiB, of which nothing follows
    assert _talk(cluster, raw=head) == ([], 1009, "message too big")
    assert job.result(timeout=JOB_S).recoveries == 0


def test_an_old_generations_step_is_refused(cluster):
    """A node with the right token claims steps for a seat it does not have."""
    job = cluster.submit(trains.plain, steps=80)
    job.wait_for_step(5)
    forged = messages.StepDone(cluster.status()["generation"] - 1, 10_000, 0.0)
    beat = messages.dumps(messages.Heartbeat(steps=[[0, *forged]]))
    _talk(cluster, _hello(node="node-79"), beat, b"bye")
    report = job.result(timeout=JOB_S)
    refused = [event.data["reason"] for event in report.events if event.kind == "message.refused"]
    assert any("no seat" in reason for reason in refused)
    assert report.steps == 80
