"""The reference policy: a table of what broke, when, and with what budget → what to do."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest

from ftlab.config import DEFAULT_BUDGETS
from ftlab.policy import (
    BACK_STEPS,
    FEW_STEPS,
    MANY_SKIPS,
    Abort,
    Action,
    Continue,
    Failure,
    Grow,
    LowerRate,
    Replace,
    Restart,
    Retry,
    Rollback,
    Shrink,
    Skip,
    Snapshot,
    Split,
    Wait,
    decide,
    decide_step,
    find_problem,
)

BUDGETS = dict(DEFAULT_BUDGETS)
CALM = Snapshot(failures=(), members=("node-0", "node-1", "node-2"), spares=(), wanted=3, minimum=3, can_start=False,
                step=10, holders=2, procs_per_node=2)


def node(name: str, **more: Any) -> Failure:
    return Failure(cause="node", node=name, detail=f"{name} is silent", **more)


def crash(name: str, local_rank: int = 0, **more: Any) -> Failure:
    return Failure(cause="crash", node=name, local_rank=local_rank, detail=f"ValueError on {name}", **more)


def stall(name: str) -> Failure:
    return Failure(cause="stall", node=name, local_rank=0, detail=f"{name} computes for 9.0 s")


LINK = Failure(cause="link", detail="ranks lost each other")
EVERY_RANK_CRASHED = (crash("node-0"), crash("node-1"), crash("node-2"))

WORKER = (("node-1", 0),)
TABLE = {
    "a lost node gives its seat to a spare":
        ([node("node-1")], {"spares": ("node-3", "node-4")}, Replace(seats={"node-1": "node-3"})),
    "the spare is used even when new nodes could be had":
        ([node("node-1")], {"spares": ("node-3",), "can_start": True}, Replace(seats={"node-1": "node-3"})),
    "without a spare a new node is asked for":
        ([node("node-1")], {"can_start": True}, Replace(seats={"node-1": None})),
    "a new node is asked for before the world shrinks":
        ([node("node-1")], {"can_start": True, "minimum": 1}, Replace(seats={"node-1": None})),
    "two lost nodes share one spare and one new node, in rank order":
        ([node("node-2"), node("node-0")], {"spares": ("node-3",), "can_start": True, "holders": 1},
         Replace(seats={"node-0": "node-3", "node-2": None})),
    "too few spares and no new nodes: the world shrinks by all that were lost":
        ([node("node-0"), node("node-2")], {"spares": ("node-3",), "minimum": 1, "holders": 1},
         Shrink(lost=("node-0", "node-2"))),
    "the world shrinks down to its minimum":
        ([node("node-1")], {"minimum": 2}, Shrink(lost=("node-1",))),
    "a crashed worker is started again on its own node":
        ([crash("node-1")], {"spares": ("node-3",)}, Restart(restart=WORKER)),
    "two crashed workers of one node are both started again":
        ([crash("node-1", 0), crash("node-1", 1)], {}, Restart(restart=(("node-1", 0), ("node-1", 1)))),
    "a second crash on the same node is still only a restart":
        ([crash("node-1")], {"repeats": {"node-1": 2}, "spares": ("node-3",)}, Restart(restart=WORKER)),
    "all ranks crashing before the first step are started again":
        (EVERY_RANK_CRASHED, {"step": 0, "holders": 0},
         Restart(restart=(("node-0", 0), ("node-1", 0), ("node-2", 0)))),
    "a stalled worker is started again the first time":
        ([stall("node-1")], {"spares": ("node-3",)}, Restart(restart=WORKER)),
    "a node whose worker stalls a second time loses its seat":
        ([stall("node-1")], {"spares": ("node-3",), "repeats": {"node-1": 1}}, Replace(seats={"node-1": "node-3"})),
    "stalls on another node do not count against this one":
        ([stall("node-1")], {"spares": ("node-3",), "repeats": {"node-0": 2}}, Restart(restart=WORKER)),
    "when several nodes stall at once the fault is not theirs":
        ([stall("node-0"), stall("node-1")], {"spares": ("node-3",), "repeats": {"node-0": 1, "node-1": 1}},
         Restart(restart=(("node-0", 0), ("node-1", 0)))),
    "a broken link is built again with the same members":
        ([LINK], {"spares": ("node-3",)}, Continue()),
    "a link that broke together with a worker needs no action of its own":
        ([LINK, crash("node-1")], {}, Restart(restart=WORKER)),
    "a lost node and a crashed worker elsewhere are mended together":
        ([node("node-0"), crash("node-1")], {"spares": ("node-3",)},
         Replace(seats={"node-0": "node-3"}, restart=WORKER)),
    "shrinking restarts crashed workers elsewhere too":
        ([node("node-0"), crash("node-1")], {"minimum": 2}, Shrink(lost=("node-0",), restart=WORKER)),
    "a crash on a node that died as well is not restarted there":
        ([crash("node-1"), node("node-1")], {"spares": ("node-3",)}, Replace(seats={"node-1": "node-3"})),
    "a node without a seat is not replaced":
        ([node("node-7"), LINK], {"spares": ("node-3",)}, Continue()),
    "a lost node before the first step is replaced although nobody holds state":
        ([node("node-1")], {"spares": ("node-3",), "step": 0, "holders": 0}, Replace(seats={"node-1": "node-3"})),
    "one holder is enough":
        ([node("node-0"), node("node-1")], {"spares": ("node-3", "node-4"), "holders": 1},
         Replace(seats={"node-0": "node-3", "node-1": "node-4"})),
    "a free node joins when a member is missing":
        ([], {"wanted": 4, "spares": ("node-3", "node-4")}, Grow(added=("node-3",))),
    "as many free nodes join as are missing":
        ([], {"wanted": 6, "spares": ("node-3", "node-4")}, Grow(added=("node-3", "node-4"))),
    "nothing grows in a full world":
        ([], {"spares": ("node-3",)}, Wait(reason="nothing is wrong")),
    "nothing grows without a free node":
        ([], {"wanted": 4}, Wait(reason="nothing is wrong")),
}


@pytest.mark.parametrize(("failures", "moment", "action"), TABLE.values(), ids=TABLE.keys())
def test_the_policy_decides(failures, moment, action):
    assert decide(replace(CALM, failures=tuple(failures), **moment), BUDGETS) == action


REFUSALS = {
    "too few nodes are left":
        ([node("node-1")], {"minimum": 3}, BUDGETS, "RecoveryExhausted", "node", "2 of 3 nodes are left"),
    "the world would fall below its minimum":
        ([node("node-1"), node("node-2")], {"minimum": 2, "holders": 1}, BUDGETS, "RecoveryExhausted", "node",
         "the job needs 2"),
    "nobody holds the state any more":
        ([node("node-0")], {"spares": ("node-3",), "holders": 0}, BUDGETS, "StateLost", "node", "step 10"),
    "every rank raised after the first step":
        (EVERY_RANK_CRASHED, {"holders": 0}, BUDGETS, "TrainingFailed", "crash", "ValueError on node-0"),
    "no retry can mend it":
        ([node("node-0"), crash("node-1", fatal=True)], {"spares": ("node-3",)}, BUDGETS, "TrainingFailed", "crash",
         "ValueError on node-1"),
    "a fatal error comes before an empty budget":
        ([crash("node-1", fatal=True)], {}, {}, "TrainingFailed", "crash", "ValueError on node-1"),
    "a cause that nobody budgeted":
        ([Failure(cause="gremlin", node="node-1")], {}, BUDGETS, "RecoveryExhausted", "gremlin", "'gremlin'"),
}


@pytest.mark.parametrize(("failures", "moment", "budgets", "error", "cause", "words"), REFUSALS.values(),
                         ids=REFUSALS.keys())
def test_the_policy_gives_up_when(failures, moment, budgets, error, cause, words):
    action = decide(replace(CALM, failures=tuple(failures), **moment), budgets)
    assert isinstance(action, Abort)
    assert (action.error, action.cause) == (error, cause)
    assert words in action.reason


@pytest.mark.parametrize("failure", [node("node-1"), crash("node-1"), stall("node-1"), LINK], ids=lambda it: it.cause)
def test_an_exhausted_budget_names_its_cause_and_the_last_failure(failure):
    moment = replace(CALM, failures=(failure,), spares=("node-3",))
    spent = {**BUDGETS, failure.cause: 0}
    action = decide(moment, spent)
    assert isinstance(action, Abort)
    assert (action.error, action.cause) == ("RecoveryExhausted", failure.cause)
    assert f"'{failure.cause}'" in action.reason and failure.detail in action.reason
    assert not isinstance(decide(moment, {**spent, failure.cause: 1}), Abort), "the last recovery may be used"


def test_budgets_of_other_causes_do_not_matter():
    moment = replace(CALM, failures=(crash("node-1"),))
    assert decide(moment, {"crash": 1}) == Restart(restart=WORKER)


@pytest.mark.parametrize(("failures", "moment", "action"), TABLE.values(), ids=TABLE.keys())
def test_the_policy_is_pure(failures, moment, action):
    snapshot, budgets = replace(CALM, failures=tuple(failures), **moment), dict(BUDGETS)
    before = copy.deepcopy(snapshot)
    assert decide(snapshot, budgets) == decide(snapshot, budgets)
    assert snapshot == before and budgets == BUDGETS


# ---- what a policy may return --------------------------------------------------------------------------------------

DEAD = {"failures": (node("node-1"),), "spares": ("node-3", "node-4")}
CRASHED = {"failures": (crash("node-1"),), "spares": ("node-3",)}
POSSIBLE = {
    "a spare for a dead node": (Replace(seats={"node-1": "node-3"}), DEAD),
    "the other spare": (Replace(seats={"node-1": "node-4"}), DEAD),
    "a new node for a dead one": (Replace(seats={"node-1": None}), {**DEAD, "can_start": True}),
    "a spare and a new node": (
        Replace(seats={"node-1": None, "node-2": "node-3"}), {**DEAD, "can_start": True}),
    "a living member replaced together with the dead one": (
        Replace(seats={"node-0": "node-3", "node-1": "node-4"}), DEAD),
    "a replacement and a restart elsewhere": (Replace(seats={"node-1": "node-3"}, restart=(("node-0", 0),)), DEAD),
    "shrinking although there are spares": (Shrink(lost=("node-1",)), DEAD),
    "shrinking to one": (Shrink(lost=("node-1", "node-2")), DEAD),
    "shrinking and a restart elsewhere": (Shrink(lost=("node-1",), restart=(("node-2", 0),)), DEAD),
    "a restart": (Restart(restart=WORKER), CRASHED),
    "a node replaced whose worker crashed": (Replace(seats={"node-1": "node-3"}), CRASHED),
    "going on": (Continue(), {"failures": (LINK,)}),
    "going on when a node without a seat died": (Continue(), {"failures": (node("node-7"),)}),
    "growing by one of two": (Grow(added=("node-4",)), {"wanted": 4, "spares": ("node-3", "node-4")}),
    "growing by a node and restarting a worker": (
        Grow(added=("node-3",), restart=WORKER), {"wanted": 4, "spares": ("node-3",)}),
    "waiting, whatever broke": (Wait(reason="let us see"), DEAD),
    "waiting when nothing did": (Wait(), {}),
    "giving up": (Abort(error="StateLost", reason="enough"), DEAD),
}

NO_SENSE = "its fields make no sense"
IMPOSSIBLE = {
    "nothing": (None, DEAD, "it is no Action"),
    "a text": ("Replace", DEAD, "it is no Action"),
    "a class": (Continue, DEAD, "it is no Action"),
    "a stranger in a seat": (Replace(seats={"node-1": "ghost"}), DEAD, "which are ['node-3', 'node-4']"),
    "a member in another's seat": (Replace(seats={"node-1": "node-0"}), DEAD, "replacements must be different spares"),
    "one spare in two seats": (
        Replace(seats={"node-0": "node-3", "node-1": "node-3"}), DEAD, "replacements must be different spares"),
    "a new node where none can be had": (Replace(seats={"node-1": None}), DEAD, "no new node can be had"),
    "a replacement for a stranger": (
        Replace(seats={"ghost": "node-3", "node-1": "node-4"}), DEAD, "it must name members"),
    "a replacement for nobody": (Replace(seats={}), DEAD, "it must name members"),
    "a replacement for the wrong one": (
        Replace(seats={"node-0": "node-3"}), DEAD, "node-1 is dead and would keep its seat"),
    "seats that are none": (Replace(seats=None), DEAD, NO_SENSE),
    "seats as a list": (Replace(seats=["node-1"]), DEAD, NO_SENSE),
    "seats for lists": (Replace(seats={"node-1": ["node-3"]}), DEAD, NO_SENSE),
    "shrinking by nobody": (Shrink(lost=()), DEAD, "it must name members"),
    "shrinking by all": (Shrink(lost=("node-0", "node-1", "node-2")), DEAD, "nobody would be left"),
    "shrinking by a stranger": (Shrink(lost=("node-1", "ghost")), DEAD, "it must name members"),
    "shrinking by the wrong one": (Shrink(lost=("node-0",)), DEAD, "node-1 is dead and would keep its seat"),
    "a name instead of a list of names": (Shrink(lost="node-1"), DEAD, "it must name members"),
    "shrinking by a number": (Shrink(lost=1), DEAD, NO_SENSE),
    "growing by a stranger": (Grow(added=("ghost",)), {"spares": ("node-3",)}, "which are ['node-3']"),
    "growing by a member": (Grow(added=("node-0",)), {"spares": ("node-3",)}, "only spares can be added"),
    "growing by nobody": (Grow(added=()), {"spares": ("node-3",)}, "only spares can be added"),
    "growing around a dead node": (Grow(added=("node-3",)), DEAD, "node-1 is dead and would keep its seat"),
    "growing by a number": (Grow(added=3), DEAD, NO_SENSE),
    "going on with a dead node": (Continue(), DEAD, "node-1 is dead and would keep its seat"),
    "a restart on a dead node": (Restart(restart=WORKER), DEAD, "node-1 is dead and would keep its seat"),
    "a restart at a stranger's": (Restart(restart=(*WORKER, ("ghost", 0))), CRASHED, "no such workers"),
    "a restart of a spare's worker": (Restart(restart=(*WORKER, ("node-3", 0))), CRASHED, "no such workers"),
    "a restart of a rank that is not there": (Restart(restart=(*WORKER, ("node-1", 7))), CRASHED, "no such workers"),
    "a crashed worker that nobody mends": (Continue(), CRASHED, "neither restarted nor replaced"),
    "an end without a reason": (Abort(error="StateLost", reason=None), CRASHED, "must give a reason"),
    "a restart of a number": (Restart(restart=5), CRASHED, NO_SENSE),
    "a restart of names without ranks": (Restart(restart=("node-1",)), CRASHED, NO_SENSE),
}


@pytest.mark.parametrize(("action", "moment"), POSSIBLE.values(), ids=POSSIBLE.keys())
def test_no_problem_is_found_with(action, moment):
    assert find_problem(action, replace(CALM, **moment)) == ""


@pytest.mark.parametrize(("action", "moment", "words"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_a_problem_is_found_with(action, moment, words):
    assert words in find_problem(action, replace(CALM, **moment))


@pytest.mark.parametrize(("failures", "moment", "action"), TABLE.values(), ids=TABLE.keys())
def test_no_problem_is_found_with_what_the_reference_policy_decides(failures, moment, action):
    assert find_problem(action, replace(CALM, failures=tuple(failures), **moment)) == ""


NAN = Failure(cause="numbers", detail="the loss is NaN")
FULL = Failure(cause="oom", detail="DefaultCPUAllocator: can't allocate memory")
RAISED = Failure(cause="crash", detail="ValueError: no such column")
SLOW = Failure(cause="straggler", node="node-1", detail="rank 1 takes 80 ms, the others 20 ms")
KILLED = Failure(cause="oom", node="node-1", local_rank=0, detail="worker killed by the kernel for memory")

STEPS: dict[str, tuple[Failure, dict[str, Any], Action]] = {
    "bad numbers: the first time the step is tried again": (NAN, {}, Retry()),
    "bad numbers: the first time also right after a load": (NAN, {"since_load": 0, "saved": 8}, Retry()),
    "bad numbers again: it is the batch": (NAN, {"tries": 1}, Skip()),
    "bad numbers again, with a checkpoint: still the batch": (NAN, {"tries": 1, "saved": 8}, Skip()),
    "bad numbers again right after a load: it is the checkpoint":
        (NAN, {"tries": 1, "since_load": FEW_STEPS, "saved": 8}, Rollback(condemn=True)),
    "bad numbers again some time after a load: the batch":
        (NAN, {"tries": 1, "since_load": FEW_STEPS + 1, "saved": 8}, Skip()),
    "bad numbers again right after a load, and nothing older is left: the batch":
        (NAN, {"tries": 1, "since_load": 1}, Skip()),
    "a batch after another is bad: still the batch": (NAN, {"tries": 1, "skipped": MANY_SKIPS - 1}, Skip()),
    "too many batches in a row: it is the state":
        (NAN, {"tries": 1, "skipped": MANY_SKIPS, "saved": 8}, Rollback(steps=BACK_STEPS, skip=True)),
    "too many batches in a row, and no checkpoint: a lower learning rate":
        (NAN, {"tries": 1, "skipped": MANY_SKIPS}, LowerRate()),
    "out of memory: smaller pieces": (FULL, {"can_split": True}, Split()),
    "out of memory again: smaller pieces again": (FULL, {"can_split": True, "tries": 3}, Split()),
    "an exception, with a checkpoint: back to it": (RAISED, {"saved": 8, "members": ("self",)}, Rollback()),
    "a worker that was killed for memory is started again": (KILLED, {}, Restart(restart=(("node-1", 0),))),
    "a slow node gives its seat to a spare": (SLOW, {"spares": ("node-3",)}, Replace(seats={"node-1": "node-3"})),
    "a slow node without a spare stays": (SLOW, {"can_start": True}, Wait(reason="a slow node is better than none")),
}
STEP_ENDS: dict[str, tuple[Failure, dict[str, Any], str]] = {
    "not even one sample fits": (FULL, {"can_split": False}, "OutOfMemory"),
    "an exception without a checkpoint": (RAISED, {"members": ("self",)}, "TrainingFailed"),
}


def moment_of(failure: Failure, moment: dict[str, Any]) -> Snapshot:
    return replace(CALM, failures=(failure,), holders=1, **moment)


@pytest.mark.parametrize(("failure", "moment", "action"), STEPS.values(), ids=STEPS.keys())
def test_in_a_step_the_policy_decides(failure, moment, action):
    snapshot = moment_of(failure, moment)
    assert decide(snapshot, BUDGETS) == action
    assert decide(snapshot, dict.fromkeys(BUDGETS, 1)) == action, "one recovery is enough for this one"
    assert find_problem(action, snapshot) == ""


@pytest.mark.parametrize(("failure", "moment", "action"), STEPS.values(), ids=STEPS.keys())
def test_without_a_budget_every_cause_ends_the_job_and_names_itself(failure, moment, action):
    answer = decide(moment_of(failure, moment), {**BUDGETS, failure.cause: 0})
    assert isinstance(answer, Abort)
    assert (answer.error, answer.cause) == ("RecoveryExhausted", failure.cause) and failure.detail in answer.reason


@pytest.mark.parametrize(("failure", "moment", "error"), STEP_ENDS.values(), ids=STEP_ENDS.keys())
def test_in_a_step_the_policy_gives_up_when(failure, moment, error):
    answer = decide(moment_of(failure, moment), BUDGETS)
    assert isinstance(answer, Abort) and answer.error == error and failure.detail in answer.reason


@pytest.mark.parametrize("failure", [NAN, FULL, RAISED], ids=lambda it: it.cause)
@pytest.mark.parametrize("left", [0, 1, 8])
def test_at_every_moment_the_answer_can_be_carried_out(failure, left):
    few, switch = FEW_STEPS, [False, True]
    moments = itertools.product([None, 8], [None, 0, few, few + 1], [0, 1, 5], [0, MANY_SKIPS], switch)
    for saved, since_load, tries, skipped, can_split in moments:
        snapshot = moment_of(failure, {"saved": saved, "since_load": since_load, "tries": tries, "skipped": skipped,
                                       "can_split": can_split})
        action, problem = decide_step(decide, snapshot, dict.fromkeys(BUDGETS, left))
        assert problem == "", snapshot
        assert isinstance(action, Abort) or left > 0, snapshot


WRONG_STEPS: dict[str, tuple[Any, Failure, dict[str, Any], str]] = {
    "nothing": (None, NAN, {}, "it is no Action"),
    "a word": ("skip", NAN, {}, "it is no Action"),
    "an action for nodes": (Continue(), NAN, {}, "a step needs one of Retry, Skip"),
    "waiting": (Wait(), NAN, {}, "a step needs one of"),
    "going back without a checkpoint": (Rollback(), NAN, {}, "there is no checkpoint"),
    "going forward": (Rollback(steps=-1), NAN, {"saved": 8}, "must not be negative"),
    "condemning what was never loaded": (Rollback(condemn=True), NAN, {"saved": 8}, "no checkpoint was loaded"),
    "splitting one sample": (Split(), FULL, {}, "cannot be cut any further"),
    "a higher learning rate": (LowerRate(factor=2.0), NAN, {}, "between 0 and 1"),
    "a learning rate that is a word": (LowerRate(factor="low"), NAN, {}, "make no sense"),
}


@pytest.mark.parametrize(("answer", "failure", "moment", "words"), WRONG_STEPS.values(), ids=WRONG_STEPS.keys())
def test_a_policy_that_answers_nonsense_about_a_step_is_found_out(answer, failure, moment, words):
    _, problem = decide_step(lambda snapshot, budgets: answer, moment_of(failure, moment), BUDGETS)
    assert words in problem and "the policy returned" in problem


def test_a_policy_that_raises_about_a_step_is_found_out():
    def raises(snapshot, budgets):
        raise KeyError("numbers")

    _, problem = decide_step(raises, moment_of(NAN, {}), BUDGETS)
    assert problem == "the policy raised KeyError: 'numbers'"


@pytest.mark.parametrize("action", [Retry(), Skip(), Split(), Rollback()], ids=lambda it: type(it).__name__)
def test_actions_for_a_step_do_not_mend_a_dead_node(action):
    assert find_problem(action, replace(CALM, failures=(node("node-1"),))) == "nothing is wrong with a step"
