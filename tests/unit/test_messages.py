"""Messages: every kind comes back as it was sent, and garbage is refused with the reason, whatever it is."""

from __future__ import annotations

import json
import os
import random
from dataclasses import fields
from typing import Any

import pytest

from ftlab import messages
from ftlab.config import MAX_MESSAGE_BYTES
from ftlab.errors import BadMessage
from ftlab.membership import seat_nodes
from ftlab.messages import Message, Place, decode, dumps, encode, loads

TABLE = seat_nodes(2, [("node-0", "127.0.1.1")], 1).to_dict()
EXAMPLES: list[Message] = [
    messages.Hello(node="node-1", address="127.0.1.2", pid=7, instance="i", job="j", workers=[{"pid": 8}]),
    messages.Heartbeat(workers=[{"place": int(Place.PARKED)}], steps=[[0, 1, 1, 2.5]], output=[[0, 1, "line"]]),
    messages.FromWorker(job="j", run="r", local_rank=0, pid=9, body=encode(messages.Parked(seconds=0.5))),
    messages.Noted(job="j", event="checkpoint.committed", step=20, data={"bytes": 7}),
    messages.Welcome(fresh=True, heartbeat_s=0.1, lease_s=5.0),
    messages.Ack(generation=1, step=3),
    messages.RunJob(job="j", run="r", spec={"config": {}, "path": []}, local_ranks=[0, 1]),
    messages.EndJob(job="j"),
    messages.ToWorkers(job="j", body=encode(messages.Release())),
    messages.Buddy(address="127.0.1.3", port=4000),
    messages.Watch(step=4),
    messages.Parked(seconds=0.25),
    messages.Stopped(generation=1, step=2, at=3.5, reason="told to"),
    messages.Spans(generation=2, spans=[["connect", 1.0, 2.0]], complete=False, source="live"),
    messages.Examine(local_rank=1, seconds=1.5),
    messages.Steps(rows=[[1, 3, 2.5, 0.5, {"loss": 1.0}, None, None, ""]]),
    messages.Finished(generation=1, step=2, digest="d", result="r", error="too big"),
    messages.Failed(cause="crash", detail="x", traceback="t", fatal={"error": "ConfigError"}, generation=1, step=2),
    messages.Snapshot(slot=1, order={"step": 20}, blocking_s=0.01),
    messages.Saved(slot=1, seconds=0.2, ok=True),
    messages.Stuck(generation=3),
    messages.Held(generation=3, asked=25, step=25), messages.Hold(steps=[25, 40]), messages.GoOn(),
    messages.Terminate(generation=3),
    messages.Join(table=TABLE, store=["127.0.0.1", 29500], secret="s"),
    messages.Release(),
]


def test_there_is_an_example_of_every_kind():
    assert {type(example) for example in EXAMPLES} == set(Message.kinds.values())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda it: type(it).__name__)
def test_every_kind_comes_back_as_it_was_sent(message):
    assert loads(dumps(message)) == message == loads(dumps(message).decode())
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda it: type(it).__name__)
def test_fields_with_a_default_may_be_left_out_and_others_may_not(message):
    for each in fields(message):
        given = {name: value for name, value in encode(message).items() if name != each.name}
        try:
            type(message)(**{name: value for name, value in given.items() if name != "kind"})
        except TypeError:
            with pytest.raises(BadMessage, match=rf"{type(message).__name__} is incomplete.*{each.name}"):
                decode(given)
        else:
            assert decode(given) is not None


def test_whole_numbers_will_do_where_a_fraction_is_meant():
    assert loads('{"kind":"Parked","seconds":2}') == messages.Parked(seconds=2)


def test_nothing_may_be_nothing_only_where_that_is_allowed():
    assert loads('{"kind":"RunJob","job":"j","run":"r","spec":{},"local_ranks":null}').local_ranks is None
    with pytest.raises(BadMessage, match=r"RunJob\.spec must be dict, got NoneType"):
        loads('{"kind":"RunJob","job":"j","run":"r","spec":null}')


GARBAGE: list[tuple[bytes | str, str]] = [
    (b"", "not a JSON message"),
    (b"\x00\xff\xfe", "not a JSON message"),
    (b"\xed\xa0\x80", "not a JSON message"),
    ("hello", "not a JSON message"),
    ('{"kind":"Ack","step":1', "not a JSON message"),
    ('{"kind":"Ack","step":1}{}', "not a JSON message"),
    ("[" * 100_000, "not a JSON message"),
    ('{"kind":"Ack","step":' + "9" * 5000 + "}", "not a JSON message"),
    ("[]", "must be a JSON object, got list"),
    ("null", "must be a JSON object, got NoneType"),
    ("3", "must be a JSON object, got int"),
    ('"Ack"', "must be a JSON object, got str"),
    ("{}", "unknown kind of message None"),
    ('{"kind":"Nonsense"}', "unknown kind of message 'Nonsense'"),
    ('{"kind":"Message"}', "unknown kind of message 'Message'"),
    ('{"kind":["Ack"],"step":1}', "unknown kind of message"),
    ('{"kind":{"a":1}}', "unknown kind of message"),
    ('{"kind":"__class__"}', "unknown kind"),
    ('{"kind":"Ack"}', "Ack is incomplete"),
    ('{"kind":"Ack","step":1,"more":2}', "Ack has no field ['more']"),
    ('{"kind":"Ack","step":1,"self":2}', "Ack has no field ['self']"),
    ('{"kind":"Ack","step":1,"kinds":{}}', "Ack has no field ['kinds']"),
    ('{"kind":"Ack","step":"1"}', "Ack.step must be int, got str"),
    ('{"kind":"Ack","step":1.5}', "Ack.step must be int, got float"),
    ('{"kind":"Ack","step":true}', "Ack.step must be int, got bool"),
    ('{"kind":"Ack","step":null}', "Ack.step must be int, got NoneType"),
    ('{"kind":"Welcome","fresh":1,"heartbeat_s":1,"lease_s":1}', "Welcome.fresh must be bool, got int"),
    ('{"kind":"Parked","seconds":true}', "Parked.seconds must be float, got bool"),
    ('{"kind":"Heartbeat","steps":{}}', "Heartbeat.steps must be list, got dict"),
    ('{"kind":"ToWorkers","job":"j","body":[]}', "ToWorkers.body must be dict, got list"),
    ('{"kind":"EndJob","job":5}', "EndJob.job must be str, got int"),
    ('{"kind":"RunJob","job":"j","run":"r","spec":{},"local_ranks":"all"}', "RunJob.local_ranks must be list, got str"),
    (b'{"kind":"EndJob","job":"' + b"x" * MAX_MESSAGE_BYTES + b'"}', "is too large: the limit is"),
]


@pytest.mark.parametrize(("raw", "reason"), GARBAGE, ids=[reason[:40] + f" {index}" for index, (_, reason)
                                                          in enumerate(GARBAGE)])
def test_garbage_is_refused_with_the_reason(raw, reason):
    with pytest.raises(BadMessage) as refusal:
        loads(raw)
    assert reason in str(refusal.value)


def test_a_message_of_the_largest_size_passes():
    head, tail = b'{"kind":"EndJob","job":"', b'"}'
    raw = head + b"x" * (MAX_MESSAGE_BYTES - len(head) - len(tail)) + tail
    assert isinstance(loads(raw), messages.EndJob)


def test_random_messages_are_understood_or_refused_and_nothing_else():
    seed = int(os.environ.get("SEED") or random.randrange(1 << 32))
    print(f"SEED={seed} python -m pytest tests/unit/test_messages.py -k random")
    draw = random.Random(seed)
    outcomes = {"understood": 0, "refused": 0}
    for _ in range(4000):
        raw = random_raw(draw)
        try:
            message = loads(raw)
        except BadMessage as refusal:
            outcomes["refused"] += 1
            assert str(refusal)
        else:
            outcomes["understood"] += 1
            assert isinstance(message, Message)
    assert min(outcomes.values()) > 50, outcomes


def random_raw(draw: random.Random) -> bytes | str:
    """A message with something wrong in it, most of the time."""
    data: Any = json.loads(dumps(draw.choice(EXAMPLES)))
    for _ in range(draw.randrange(3)):
        name = draw.choice([*data, "kind", "more", ""])
        if draw.random() < 0.3:
            data.pop(name, None)
        else:
            data[name] = random_value(draw, 3)
    if draw.random() < 0.1:
        data = random_value(draw, 4)
    raw = json.dumps(data).encode()
    if draw.random() < 0.2:
        damaged = bytearray(raw)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        return bytes(damaged)
    return raw if draw.random() < 0.5 else raw.decode()


def random_value(draw: random.Random, depth: int) -> Any:
    plain = [None, True, False, 0, -1, 1 << 70, 1.5, float("nan"), float("inf"), "", "Ack", "\ud800", "\x00", "é" * 9]
    if depth == 0 or draw.random() < 0.5:
        return draw.choice(plain)
    if draw.random() < 0.5:
        return [random_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return {str(random_value(draw, 0)): random_value(draw, depth - 1) for _ in range(draw.randrange(4))}
