"""The catalogue: what can be broken, and the plan for one fault.

A `Fault` is only a plan; injecting it into a cluster does it and returns the receipt. Recovery code never learns that a
fault was injected: it sees what production sees.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ftlab.errors import ConfigError, FaultUnavailable, UnknownFault
from ftlab.faults.corruption import WAYS as DAMAGES
from ftlab.faults.injection import TO_A_WORKER, Hands, Injection, Pending, carry_out, schedule
from ftlab.validation import Checked

KINDS: dict[str, str] = {
    "kill": "SIGKILL of a whole node",
    "crash": "SIGKILL of one worker; its node lives on",
    "hang": "SIGSTOP of a whole node; SIGCONT heals it",
    "stall": "the training thread of one worker blocks while everything else goes on",
    "nan": "a gradient of one worker becomes NaN: once, or each time the same step is tried",
    "oom": "one worker runs out of memory: an allocation fails, or the kernel kills it",
    "straggler": "one worker gets only a part of its time, until it is healed",
    "partition": "packets between a node, or a group, and all others are dropped, both ways or one; then they pass",
    "link": "a node's link loses packets, or is slow or late, until it is healed",
    "disk": "the disk that nodes save to is full: what is saved there fails, until it is healed",
    "controller": "SIGKILL of the controller, which is restarted from its journal",
    "blackout": "SIGKILL of all nodes with a rank, and all spares, at once",
    "corrupt": "a blackout, and the newest checkpoint is damaged before anybody can load it",
}
HEALABLE = ("hang", "partition", "straggler", "oom", "link", "disk")
WAYS: dict[str, tuple[str, ...]] = {"corrupt": DAMAGES, "nan": ("once", "again"), "oom": ("allocation", "kernel"),
                                    "partition": ("", "sends", "receives")}  # nothing: both ways
_FIXED = {"controller": "controller", "blackout": "all", "corrupt": "all"}  # targets of faults that have no choice
_TARGET = re.compile(r"(node|rank)-(0|[1-9][0-9]*)")
_ONLY: dict[str, tuple[str, ...]] = {  # settings that mean nothing to other kinds
    "local_rank": tuple(TO_A_WORKER), "room_mb": ("oom",), "share": ("straggler",), "loss": ("link",),
    "delay_ms": ("link",), "rate_mbit": ("link",), "heal_after": HEALABLE}


@dataclass(frozen=True, kw_only=True)
class Fault(Checked):
    """The plan of one fault: what, where, and when (at once if neither `at_step` nor `after` is given)."""

    kind: str = ""
    target: str = ""  # a node's name, or "rank-2" for whoever sits there; "controller" or "all" where there is no
    # choice; for a partition also several, separated by commas: they stay together
    local_rank: int = 0  # of the worker, for crash and stall
    at_step: int | None = None  # when so many steps are committed
    after: float | None = None  # seconds from now; after the step, if both are given
    heal_after: float | None = None  # seconds from when it was done, for those that are HEALABLE
    way: str = ""  # one of WAYS, for the kinds that have several
    room_mb: int = 36  # for oom: what the worker may still take
    share: float = 0.25  # for straggler: of its time
    loss: float = 0.1  # for link: of its packets, both ways
    delay_ms: float = 0.0  # for link: that each packet it sends comes later
    rate_mbit: float = 0.0  # for link: as fast as it may send; 0: as before

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise UnknownFault(f"no fault is called {self.kind!r}", hint=f"faults are {', '.join(KINDS)}")
        self._check_target()
        self.check_types()
        self._check_moment()
        if self.way not in WAYS.get(self.kind, ("",)):
            known = ", ".join(way or "\"\"" for way in WAYS[self.kind]) if self.kind in WAYS else "not to be chosen"
            raise ConfigError(f"{self.way!r} is no way to {self.kind}: its ways are {known}")
        self.require(0 < self.share < 1, f"share must be between 0 and 1: it is the part of its time that is left (got "
                                         f"{self.share})")
        self.require(0 <= self.loss <= 1, f"loss must be between 0 and 1: it is a share of all packets (got "
                                          f"{self.loss})")
        for name in ("delay_ms", "rate_mbit"):
            self.require(getattr(self, name) >= 0, f"{name} must not be negative (got {getattr(self, name)})")
        self.require(self.room_mb >= 1, f"room_mb must be at least 1 (got {self.room_mb})")
        self.require(self.kind != "link" or bool(self.loss or self.delay_ms or self.rate_mbit),
                     "a link needs a loss, a delay_ms or a rate_mbit: else nothing is wrong with it")
        self._check_fit()

    def _check_target(self) -> None:
        if self.kind in _FIXED:
            self.require(self.target == _FIXED[self.kind], f"a {self.kind} has no target to choose (got "
                                                           f"{self.target!r})")
            return
        names = self.target.split(",") if isinstance(self.target, str) else []
        self.require(self.kind == "partition" or len(names) <= 1, f"a {self.kind} has one target: only a partition "
                                                                  f"takes several (got {self.target})")
        self.require(bool(names) and all(map(_TARGET.fullmatch, names)),
                     f"a {self.kind} needs a target: the name of a node, such as \"node-2\", or \"rank-2\" for the "
                     f"node that has this rank (got {self.target!r})")

    def _check_moment(self) -> None:
        self.require(self.local_rank >= 0, f"local_rank must not be negative (got {self.local_rank})")
        self.require(self.at_step is None or self.at_step >= 0,
                     f"at_step must not be negative: it counts committed steps (got {self.at_step})")
        for name in ("after", "heal_after"):
            value = getattr(self, name)
            self.require(value is None or value >= 0, f"{name} must not be negative: it is a number of seconds (got "
                                                      f"{value})")

    def _check_fit(self) -> None:
        """A setting of another kind of fault would be ignored without a word."""
        for name, kinds in _ONLY.items():
            given = getattr(self, name) != type(self).__dataclass_fields__[name].default
            doing = "cannot be healed" if name == "heal_after" else f"has no {name}"
            self.require(not given or self.kind in kinds, f"a {self.kind} {doing}: {name} is for {', '.join(kinds)}")

    @property
    def needs(self) -> tuple[str, ...]:
        """What a cluster must be able to do for it, by the names that `Hands.missing` knows."""
        if self.kind == "partition":
            return ("split",) if self.way or "," in self.target else ("partition",)
        if self.kind == "link":
            wanted = (("loss", self.loss), ("delay", self.delay_ms), ("rate", self.rate_mbit))
            return tuple(need for need, value in wanted if value)
        return {"disk": ("disk",), "oom": ("cage",) if self.way == "kernel" else ()}.get(self.kind, ())

    def inject(self, hands: Hands) -> Injection | Pending:
        """Do it to a cluster now and return the receipt, or arrange for it and return what can be waited for; raises
        FaultUnavailable at once where it cannot be done."""
        reason = hands.missing(self.needs) if self.needs else ""
        if reason:
            raise FaultUnavailable(reason, hint="`ftlab doctor` tells what this machine can do")
        if self.at_step is None and self.after is None:
            return carry_out(self, hands)
        return schedule(self, hands)

    def describe(self) -> str:
        """For people: `hang node-2 at step 40, healed after 2 s`."""
        when = f" at step {self.at_step}" if self.at_step is not None else ""
        when += f" after {self.after:g} s" if self.after is not None else ""
        when = f" by {self.way}{when}" if self.way else when
        heal = f", healed after {self.heal_after:g} s" if self.heal_after is not None else ""
        return f"{self.kind} {self.target}{when}{heal}"


def make(kind: str, target: str = "", **when: Any) -> Fault:
    """A fault by the name of its kind."""
    return Fault(kind=kind, target=_FIXED.get(str(kind), target), **when)


def kill(node: str = "", **when: Any) -> Fault:
    """SIGKILL a whole node."""
    return make("kill", node, **when)


def crash(node: str = "", local_rank: int = 0, **when: Any) -> Fault:
    """SIGKILL one worker of a node."""
    return make("crash", node, local_rank=local_rank, **when)


def hang(node: str = "", heal_after: float | None = None, **when: Any) -> Fault:
    """SIGSTOP a whole node, and SIGCONT it later."""
    return make("hang", node, heal_after=heal_after, **when)


def stall(node: str = "", local_rank: int = 0, **when: Any) -> Fault:
    """Block the training thread of one worker."""
    return make("stall", node, local_rank=local_rank, **when)


def nan(node: str = "", way: str = "once", local_rank: int = 0, **when: Any) -> Fault:
    """Make a gradient of one worker NaN: once, as a flipped bit would, or `again` as a bad sample would."""
    return make("nan", node, way=way, local_rank=local_rank, **when)


def oom(node: str = "", way: str = "allocation", local_rank: int = 0, **when: Any) -> Fault:
    """Leave one worker no more than `room_mb` of memory: the next larger allocation fails (`allocation`), or the kernel
    kills it (`kernel`, where cgroups can be made)."""
    return make("oom", node, way=way, local_rank=local_rank, **when)


def straggler(node: str = "", share: float = 0.25, local_rank: int = 0, **when: Any) -> Fault:
    """Let one worker run only for a share of the time."""
    return make("straggler", node, share=share, local_rank=local_rank, **when)


def partition(node: str | Sequence[str] = "", heal_after: float | None = None, way: str = "", **when: Any) -> Fault:
    """Drop all packets between a node, or several that stay together, and everybody else, and let them pass again
    later. `way`: only what they send ("sends"), or only what is sent to them ("receives")."""
    group: Any = ",".join(map(str, node)) if isinstance(node, list | tuple | set) else node
    return make("partition", group, heal_after=heal_after, way=way, **when)


def link(node: str = "", loss: float = 0.1, delay_ms: float = 0.0, rate_mbit: float = 0.0, **when: Any) -> Fault:
    """Let a node's link lose a share of all packets, both ways; delay what it sends, or slow it down."""
    return make("link", node, loss=loss, delay_ms=delay_ms, rate_mbit=rate_mbit, **when)


def disk(node: str = "", heal_after: float | None = None, **when: Any) -> Fault:
    """Have a node fill the cluster's small disk (Cluster(disk_mb=...)), and give the room back later."""
    return make("disk", node, heal_after=heal_after, **when)


def controller(**when: Any) -> Fault:
    """SIGKILL the controller."""
    return make("controller", **when)


def blackout(**when: Any) -> Fault:
    """SIGKILL all nodes at once."""
    return make("blackout", **when)


def corrupt(way: str = "flip", **when: Any) -> Fault:
    """Stop all nodes, damage the newest checkpoint, and SIGKILL them."""
    return make("corrupt", way=way, **when)
