"""Situations that a policy is asked about: snapshots that were recorded from a real cluster, and made ones.

Snapshots travel to a child as JSON; what the student's function answers comes back as data, too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ftlab.config import DEFAULT_BUDGETS
from ftlab.grading.lab03.scenes import plain, read
from ftlab.policy import Abort, Failure, Snapshot, decide, is_of_a_step

RECORDED = Path(__file__).parent / "recorded.json"
_SPARES = ("node-7", "node-5", "node-8")


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One question to a policy."""

    name: str  # a sentence that says what has happened
    snapshot: Snapshot
    budgets: Mapping[str, int]
    look: str = ""
    refusing: bool = False  # the question is only whether to give up
    pair: str = ""  # situations of one pair count together: who always says the same is wrong in one of them

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"snapshot": asdict(self.snapshot), "budgets": dict(self.budgets)}

    @property
    def answer(self) -> dict[str, Any]:
        """What the reference says."""
        action = decide(self.snapshot, self.budgets)
        return plain(action if not self.refusing or isinstance(action, Abort) else None)


@cache
def recorded() -> tuple[Situation, ...]:
    """What a real controller and real workers asked."""
    rows = json.loads(RECORDED.read_text(encoding="utf-8"))
    return tuple(Situation(name=f"recorded: {row['name']}", snapshot=snapshot, budgets=budgets, pair="recorded")
                 for row in rows for snapshot, budgets in [read(row)])


def of_steps() -> list[Situation]:
    """The recorded ones that lie in a step."""
    return [each for each in recorded() if is_of_a_step(each.snapshot)]


def of_worlds() -> list[Situation]:
    """The recorded ones about nodes and workers."""
    return [each for each in recorded() if each.snapshot.failures and not is_of_a_step(each.snapshot)]


# ---- when to give up ---------------------------------------------------------------------------------------


def refusals(seed: int) -> list[Situation]:
    """Task 1: whether anything can be done at all."""
    draw = random.Random(seed)
    cause = draw.choice(["node", "crash", "numbers"])
    step = draw.randrange(20, 900)
    dead = Failure(cause="node", node="node-1", detail="killed by SIGKILL")
    return _paired([
        _refusal("a failure with budget left is no reason to give up", [dead], step=step,
                   look="return None: then the next function decides"),
        _refusal("a failure that no retry can mend ends the job", [
            Failure(cause="crash", node="node-0", local_rank=0, detail="ConfigError: no such option", fatal=True)],
            step=step, look="failure.fatal: Abort(error=\"TrainingFailed\", cause=..., reason=failure.detail)"),
        _refusal(f"the budget for '{cause}' is used up", [_failure(cause)], budgets={cause: 0}, step=step,
                   look="budgets[cause] < 1: Abort(error=\"RecoveryExhausted\", cause=..., reason=...)"),
        _refusal("another cause's budget is used up, which does not matter", [dead], budgets={"numbers": 0},
                   step=step, look="only the causes that are among the failures count"),
        _refusal("a cause that has no budget at all has none left", [
            Failure(cause="cosmic", node="node-1", detail="a ray")], step=step,
            look="budgets.get(cause, 0): what is not listed is not allowed"),
        _refusal("nobody holds the state, and there is no checkpoint", [dead, _dead("node-0"), _dead("node-2")],
                   step=step, holders=0, saved=None,
                   look="step > 0, holders == 0 and saved is None: Abort(error=\"StateLost\", ...)"),
        _refusal("nobody holds the state, but there is a checkpoint", [dead, _dead("node-0"), _dead("node-2")],
                   step=step, holders=0, saved=step // 10 * 10, look="what was saved can be loaded: return None"),
        _refusal("nobody holds the state, but nothing was done yet", [dead], step=0, holders=0,
                   look="before the first step there is nothing to lose: return None"),
    ], ["budget", "fatal", "budget", "cause", "cause", "state", "state", "fatal"])


# ---- nodes and workers -------------------------------------------------------------------------------------


def worlds(seed: int) -> list[Situation]:
    """Task 2: nodes that died, workers that failed."""
    draw = random.Random(seed)
    members = tuple(f"node-{number}" for number in range(draw.choice([3, 4])))
    one, two = draw.sample(members, 2)
    crash = Failure(cause="crash", node=two, local_rank=0, detail="exit code 1")
    stay = tuple(each for each in members if each != one)
    return _paired([
        _situation("a node is dead, and there is a spare", [_dead(one)], members, spares=_SPARES[:1],
                   look="Replace(seats={dead: spare})"),
        _situation("two nodes are dead, and there are three spares", [_dead(one), _dead(two)], members,
                   spares=_SPARES, look="every dead node gets a spare of its own, the first ones first; in the order "
                                        "of snapshot.members"),
        _situation("two nodes are dead, one spare is there and new nodes can be had", [_dead(one), _dead(two)],
                   members, spares=_SPARES[:1], can_start=True, look="None in seats stands for a new node"),
        _situation("a node is dead, nobody can replace it, enough are left", [_dead(one)], members,
                   minimum=len(stay), look="Shrink(lost=(...,)): go on without it"),
        _situation("a node is dead, nobody can replace it, and too few are left", [_dead(one)], members,
                   minimum=len(members), look="fewer than minimum: Abort(error=\"RecoveryExhausted\", cause=\"node\")"),
        _situation("a worker failed, and its node is well", [crash], members, spares=_SPARES[:1],
                   look="Restart(restart=((node, local_rank),)): only that worker; the others keep their memory"),
        _situation("a worker makes no progress, and its node is well", [
            Failure(cause="stall", node=two, local_rank=0, detail="no step for 9.1 s")], members, spares=_SPARES[:1],
            look="a stalled worker is a failed one: it has a local_rank, whatever the cause is called"),
        _situation("a worker failed while another node died", [crash, _dead(one)], members, spares=_SPARES[:1],
                   look="one action for both: Replace(seats=..., restart=...)"),
        _situation("a worker failed on a node that is dead as well", [
            Failure(cause="crash", node=one, local_rank=0, detail="exit code 1"), _dead(one)], members,
            spares=_SPARES[:1], look="a worker of a dead node cannot be restarted: its node is replaced"),
        _situation("ranks lost each other, and everybody is well", [
            Failure(cause="link", detail="ranks lost each other and no node died")], members,
            look="nothing is broken but the group: Continue()"),
    ], ["replace", "replace", "few", "few", "few", "worker", "worker", "both", "both", "worker"])


# ---- steps -------------------------------------------------------------------------------------------------


def steps(seed: int) -> list[Situation]:
    """Task 3: a step whose numbers are bad, or for which memory was not enough."""
    draw = random.Random(seed)
    step = draw.randrange(30, 500)
    saved = step - draw.randrange(5, 20)
    bad, memory = _failure("numbers"), _failure("oom")
    return _paired([
        _step("bad numbers for the first time", bad, step, saved=saved, look="tries == 0: Retry()"),
        _step("bad numbers again: it is the batch", bad, step, tries=1, saved=saved, look="Skip()"),
        _step("bad numbers again, two steps after a checkpoint was loaded", bad, step, tries=1, saved=saved,
              since_load=2, look="since_load <= 3: that checkpoint is bad: Rollback(condemn=True)"),
        _step("bad numbers again, long after a checkpoint was loaded", bad, step, tries=1, saved=saved,
              since_load=50, look="since_load > 3 speaks for the checkpoint: Skip()"),
        _step("bad numbers right after a load, and no other checkpoint", bad, step, tries=1, since_load=1,
              look="saved is None: there is nothing to go back to; Skip()"),
        _step("bad numbers after three batches in a row were passed over", bad, step, tries=2, skipped=3, saved=saved,
              look="so many are not bad by chance, the state is: Rollback(steps=10, skip=True)"),
        _step("the same without a checkpoint", bad, step, tries=2, skipped=3, look="LowerRate()"),
        _step("memory ran out, and the batch can be cut", memory, step, saved=saved, can_split=True,
              look="Split()"),
        _step("memory ran out for a single sample", memory, step, saved=saved,
              look="can_split is False: Abort(error=\"OutOfMemory\", cause=\"oom\", ...)"),
    ], ["first", "first", "load", "load", "row", "row", "row", "memory", "memory"])


def _paired(situations: list[Situation], pairs: list[str]) -> list[Situation]:
    return [replace(each, pair=pair) for each, pair in zip(situations, pairs, strict=True)]


def _refusal(name: str, failures: list[Failure], look: str, **more: Any) -> Situation:
    return replace(_situation(name, failures, spares=_SPARES, look=look, **more), refusing=True)


def _step(name: str, failure: Failure, step: int, look: str, **more: Any) -> Situation:
    return _situation(name, [failure], ("node-0",), step=step, look=look, **more)


def _situation(name: str, failures: list[Failure], members: tuple[str, ...] = ("node-0", "node-1", "node-2"), *,
               budgets: Mapping[str, int] | None = None, look: str = "", **more: Any) -> Situation:
    facts = {"spares": (), "wanted": len(members), "minimum": 1, "can_start": False, "step": 40,
             "holders": len(members), **more}
    return Situation(name=name, snapshot=Snapshot(failures=tuple(failures), members=members, **facts),
                     budgets={**DEFAULT_BUDGETS, **(budgets or {})}, look=look)


def _dead(node: str) -> Failure:
    return Failure(cause="node", node=node, detail="no heartbeat for 0.58 s")


def _failure(cause: str) -> Failure:
    if cause == "node":
        return _dead("node-1")
    if cause == "crash":
        return Failure(cause="crash", node="node-1", local_rank=0, detail="exit code 1")
    return Failure(cause=cause, detail="the loss is NaN" if cause == "numbers" else "cannot allocate 3 GB")
