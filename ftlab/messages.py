"""What travels on the links between controller, node agents and workers: small JSON messages, each with a type.

`decode` refuses garbage, unknown kinds, missing or extra fields and oversized messages with a `BadMessage` that
says which; it never executes anything. Code (the pickled train function) does not travel here: nodes fetch it
from the controller's HTTP API with the cluster's token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cache
from typing import Any, ClassVar, NamedTuple

from ftlab.config import MAX_MESSAGE_BYTES
from ftlab.errors import BadMessage

PHASES: dict[str, tuple[str, ...]] = {  # of a recovery, and the steps of each
    "node reschedule": ("detect", "terminate", "replace", "ranktable", "continue"),
    "communication group restore": ("agent", "store", "load_ranktable", "connect"),
    "training recovery": ("strategy", "rollback_data", "send_state", "receive_state", "load_data", "first_step"),
}
NOTABLE = ("step.spoiled", "worker.caught", "memory.warned", "memory.failed",
           "state.unprotected", "rehearsal.finished", "rehearsal.skipped")  # nodes may record these events too
RESERVED_VALUES = frozenset({"kind", "seq", "at", "source", "generation", "rank", "step", "data", "self", "world",
                             "ranks", "samples", "digest", "skipped",
                             "passed_over", "stands_for"})  # a step's event has fields of its own by these names


class Place(IntEnum):
    """Where the training thread is."""

    STARTING = 0  # runs the train function up to its first step
    PARKED = 1  # waits for a rank
    OUTSIDE = 2  # between two steps
    COMPUTING = 3  # inside a step
    COMMUNICATING = 4  # inside a step, waiting for the other ranks
    RECOVERING = 5
    FINISHED = 6
    HELD = 7  # pauses between two steps, because somebody asked for it


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message; the class is its kind."""

    kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls) -> None:
        Message.kinds[cls.__name__] = cls


# ---- node agent → controller -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hello(Message):
    """First on a node link: who the node is and what its workers are doing."""

    node: str
    address: str
    pid: int
    instance: str  # of this agent process: tells a node that came back from a new one with its name
    job: str = ""
    workers: list[dict[str, Any]] = field(default_factory=list)  # Progress of each, as a dict
    replica_port: int = 0  # where it takes replicas of other nodes' snapshots


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Message):
    """The node lives; with the progress of its workers and the step records not yet acknowledged."""

    workers: list[dict[str, Any]] = field(default_factory=list)
    steps: list[list[Any]] = field(default_factory=list)  # [local_rank, *StepDone] of each
    output: list[list[Any]] = field(default_factory=list)  # [local_rank, rank, line]


@dataclass(frozen=True, kw_only=True)
class FromWorker(Message):
    """A worker's message, passed on by its agent."""

    job: str
    run: str  # of RunJob: tells a worker from the one it replaced
    local_rank: int
    pid: int
    body: dict[str, Any]  # an encoded worker message


@dataclass(frozen=True, kw_only=True)
class Noted(Message):
    """Something that belongs into the event log; from an agent or a worker."""

    job: str
    event: str  # checkpoint.*, or one of NOTABLE
    step: int
    generation: int = 0  # of the save, if it is about one: of a fenced generation it is refused
    data: dict[str, Any] = field(default_factory=dict)


# ---- controller → node agent -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Welcome(Message):
    """The answer to Hello; `fresh` tells a node that was given up to drop everything and start over."""

    fresh: bool
    heartbeat_s: float
    lease_s: float


@dataclass(frozen=True, kw_only=True)
class Ack(Message):
    """Renews the lease; the steps up to this one of this generation are in the journal."""

    generation: int
    step: int


@dataclass(frozen=True, kw_only=True)
class RunJob(Message):
    """Start the workers of a job and let them run up to their first step."""

    job: str
    run: str  # a new name each time: what workers say is only taken under the name they were last started with
    spec: dict[str, Any]
    local_ranks: list[int] | None = None  # None: all; else only these (a worker is replaced)


@dataclass(frozen=True, kw_only=True)
class EndJob(Message):
    """The job is over: its workers end."""

    job: str


@dataclass(frozen=True, kw_only=True)
class ToWorkers(Message):
    """A message for the workers of a job on this node."""

    job: str
    body: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Buddy(Message):
    """The node that keeps a replica of this one's snapshots; no address: there is nobody."""

    address: str = ""
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class Watch(Message):
    """Report at once, not with the next heartbeat, when this many steps are committed."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Examine(Message):
    """A worker of this node holds the others up: look at it closely for so long; what is seen goes with heartbeats."""

    local_rank: int
    seconds: float


# ---- worker → agent (→ controller) -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Parked(Message):
    """The train function has run up to its first step and waits for a rank."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Stopped(Message):
    """Training stopped; the worker holds `step` committed steps and waits for the next rank table."""

    generation: int
    step: int
    at: float
    reason: str = ""
    rewind: bool = False  # by its own decision, as all ranks did: they go back to a checkpoint


@dataclass(frozen=True, kw_only=True)
class Spans(Message):
    """What the worker measured of one recovery: [name, begin, end] each."""

    generation: int
    spans: list[list[Any]]
    complete: bool
    source: str = ""


StepRow = tuple[int, int, float, float, dict[str, float], list[int] | None, int | None, str]


class StepDone(NamedTuple):
    """One committed step; not a message of its own. It travels as a row without names, `StepRow`: one is made in every
    step, and steps are most of what is said on the links."""

    generation: int
    step: int
    at: float
    busy: float = 0.0  # seconds this rank worked itself: waiting for the others is not counted
    values: dict[str, float] | None = None
    samples: list[int] | None = None
    digest: int | None = None  # of the global batch's sample ids: all ranks must agree
    skipped: str = ""  # why the batch was passed over

    @classmethod
    def of(cls, row: Sequence[Any]) -> StepDone:
        """The step in a row of a message; raises ValueError or TypeError if it is none."""
        generation, step, at, busy, values, samples, digest, skipped = row
        return cls(int(generation), int(step), float(at), float(busy),
                   {str(name): float(value) for name, value in values.items()} if values else None,
                   list(samples) if samples is not None else None, int(digest) if digest else None, str(skipped))


@dataclass(frozen=True, kw_only=True)
class Steps(Message):
    """The steps committed since the last message."""

    rows: list[list[Any]]  # StepDone of each


@dataclass(frozen=True, kw_only=True)
class Finished(Message):
    """The train function returned."""

    generation: int
    step: int
    digest: str  # of the protected training state
    result: str  # base64 of the pickled return value
    error: str = ""  # why the return value could not be sent


@dataclass(frozen=True, kw_only=True)
class Failed(Message):
    """The worker is gone: it raised (`traceback`), or its process ended."""

    cause: str
    detail: str
    traceback: str = ""
    fatal: dict[str, Any] | None = None  # an FtlabError that no retry can mend
    generation: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Held(Message):
    """Training pauses after the step that was asked for, or the step is missed: it goes on beyond it."""

    generation: int
    asked: int
    step: int  # committed
    missed: bool = False


@dataclass(frozen=True, kw_only=True)
class Stuck(Message):
    """The group of an ended generation was cut, again and again, and the collective that uses it does not return."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class Snapshot(Message):
    """A slot of the worker's shared memory holds its state; the agent writes it to storage."""

    slot: int
    order: dict[str, Any]  # a SaveOrder
    blocking_s: float  # how long training waited


# ---- agent → worker (from the controller) ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Terminate(Message):
    """Stop training in this generation at once; keep everything."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class Join(Message):
    """Take your seat in the next generation."""

    table: dict[str, Any]
    store: list[Any]  # host and port of the TCPStore
    secret: str  # known to the members of this generation only
    step: int = 0  # steps the job has committed
    split: bool = False  # a worker was killed for memory: cut batches into twice as many pieces
    holds: list[Any] = field(default_factory=list)  # as in Hold


@dataclass(frozen=True, kw_only=True)
class Hold(Message):
    """Pause when this many steps are committed, before the next one begins, until another Hold leaves it out. Each
    Hold names all such steps; a pause ends with its generation, too, and never lasts long."""

    steps: list[Any]


@dataclass(frozen=True, kw_only=True)
class GoOn(Message):
    """From the agent itself: the controller that asked for the pause is gone, so it is over."""


@dataclass(frozen=True, kw_only=True)
class Saved(Message):
    """From the agent itself: a slot's snapshot is in storage, or could not be written; the slot is free again."""

    slot: int
    seconds: float
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Release(Message):
    """All ranks have finished: the worker may end."""


def encode(message: Message) -> dict[str, Any]:
    """The message as JSON-able data."""
    return {"kind": type(message).__name__, **vars(message)}  # not asdict: this runs once a step


def dumps(message: Message) -> bytes:
    """The message as bytes for a link."""
    return json.dumps(encode(message), separators=(",", ":")).encode()


def loads(raw: bytes | str) -> Message:
    """The message in the bytes of a link; raises BadMessage for anything else."""
    if len(raw) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message of {len(raw)} bytes is too large: the limit is {MAX_MESSAGE_BYTES}")
    try:
        return decode(json.loads(raw))
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not a JSON message: {str(error)[:200]}", seen=repr(raw[:80])) from None


def decode(data: Any) -> Message:
    """The message in JSON data; raises BadMessage that names what is wrong with it."""
    if not isinstance(data, dict):
        raise BadMessage(f"a message must be a JSON object, got {type(data).__name__}")
    kind = Message.kinds.get(str(data.get("kind")))
    if kind is None:
        raise BadMessage(f"unknown kind of message {data.get('kind')!r}", hint=f"kinds are {sorted(Message.kinds)}")
    given = {name: value for name, value in data.items() if name != "kind"}
    known = _types_of(kind.__name__)
    if not given.keys() <= known.keys():
        raise BadMessage(f"{kind.__name__} has no field {sorted(given.keys() - known.keys())}")
    for name, value in given.items():
        if type(value) not in known[name]:
            raise BadMessage(f"{kind.__name__}.{name} must be {known[name][0].__name__}, got {type(value).__name__}")
    try:
        return kind(**given)
    except TypeError as error:
        raise BadMessage(f"{kind.__name__} is incomplete: {error}") from None


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "float": (float, int), "bool": (bool,), "list": (list,), "dict": (dict,),
}


@cache
def _types_of(kind: str) -> dict[str, tuple[type, ...]]:
    """The fields of a kind of message, and what JSON may hold for each."""
    found = {}
    for each in fields(Message.kinds[kind]):
        base, _, none = str(each.type).partition(" | ")
        found[each.name] = (*_TYPES[base.partition("[")[0]], *((type(None),) if none else ()))
    return found
