"""The catalogue: what can be broken, and the plan for one fault.

A `Fault` is only a plan; injecting it into a cluster does it and returns the receipt. Recovery code never learns that a
fault was injected: it sees what production sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ftlab.errors import ConfigError, UnknownFault
from ftlab.faults.corruption import WAYS
from ftlab.faults.injection import Hands, Injection, Pending, carry_out, schedule

KINDS: dict[str, str] = {
    "kill": "SIGKILL of a whole node",
    "crash": "SIGKILL of one worker; its node lives on",
    "hang": "SIGSTOP of a whole node; SIGCONT heals it",
    "stall": "the training thread of one worker blocks while everything else goes on",
    "partition": "packets between a node and all others are dropped both ways, then pass again",
    "controller": "SIGKILL of the controller, which is restarted from its journal",
    "blackout": "SIGKILL of all nodes with a rank, and all spares, at once",
    "corrupt": "a blackout, and the newest checkpoint is damaged before anybody can load it",
}
HEALABLE = ("hang", "partition")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The plan of one fault: what, where, and when (at once if neither `at_step` nor `after` is given)."""

    kind: str
    target: str  # a node's name, or "rank-2" for whoever sits there; "controller" or "all" where there is no choice
    local_rank: int = 0  # of the worker, for crash and stall
    at_step: int | None = None  # when so many steps are committed
    after: float | None = None  # seconds from now; after the step, if both are given
    heal_after: float | None = None  # seconds from the injection, for hang and partition
    way: str = ""  # of the damage, for corrupt: flip, truncate or swap

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownFault(f"no fault is called {self.kind!r}", hint=f"faults are {', '.join(KINDS)}")
        if (self.kind == "corrupt") != (self.way in WAYS):
            raise ConfigError(f"{self.way!r} is no way to {self.kind}: ways to corrupt are {', '.join(WAYS)}")
        if self.heal_after is not None and self.kind not in HEALABLE:
            raise ConfigError(f"a {self.kind} cannot be healed: heal_after is for {' and '.join(HEALABLE)}")

    def inject(self, hands: Hands) -> Injection | Pending:
        """Do it to a cluster now and return the receipt, or arrange for it and return what can be waited for."""
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
    fixed = {"controller": "controller", "blackout": "all", "corrupt": "all"}
    return Fault(kind=kind, target=fixed.get(kind, target), **when)


def kill(node: str, **when: Any) -> Fault:
    """SIGKILL a whole node."""
    return make("kill", node, **when)


def crash(node: str, local_rank: int = 0, **when: Any) -> Fault:
    """SIGKILL one worker of a node."""
    return make("crash", node, local_rank=local_rank, **when)


def hang(node: str, heal_after: float | None = None, **when: Any) -> Fault:
    """SIGSTOP a whole node, and SIGCONT it later."""
    return make("hang", node, heal_after=heal_after, **when)


def stall(node: str, local_rank: int = 0, **when: Any) -> Fault:
    """Block the training thread of one worker."""
    return make("stall", node, local_rank=local_rank, **when)


def partition(node: str, heal_after: float | None = None, **when: Any) -> Fault:
    """Drop all packets between a node and everybody else, and let them pass again later."""
    return make("partition", node, heal_after=heal_after, **when)


def controller(**when: Any) -> Fault:
    """SIGKILL the controller."""
    return make("controller", **when)


def blackout(**when: Any) -> Fault:
    """SIGKILL all nodes at once."""
    return make("blackout", **when)


def corrupt(way: str = "flip", **when: Any) -> Fault:
    """Stop all nodes, damage the newest checkpoint, and SIGKILL them."""
    return make("corrupt", way=way, **when)
