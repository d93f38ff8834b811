"""What to do about failures: a pure decision, `decide(snapshot, budgets) -> Action`. No clock, no I/O.

The controller asks it about nodes and workers; a worker asks it about its own step (bad numbers, out of memory), where
all ranks see the same snapshot and so reach the same answer; `train_with_auto_recovery` asks it about everything. A
student's own function with the same signature can be handed to each of them: `cluster.submit(train, policy=mine)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Something that broke."""

    cause: str  # "node", "crash", "stall", "link", "straggler"; in a step: "numbers", "oom"
    node: str = ""
    local_rank: int | None = None  # of one worker; None: the whole node, or the group
    detail: str = ""
    fatal: bool = False  # no retry can mend it


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that a decision may look at."""

    failures: tuple[Failure, ...]
    members: tuple[str, ...]  # nodes with a seat, in rank order, the failed ones included
    spares: tuple[str, ...]  # nodes without a seat that live, the warmest first
    wanted: int  # nodes the job was started with
    minimum: int  # nodes below which the job must not go on
    can_start: bool  # whether new nodes can be had
    step: int  # committed steps
    holders: int  # workers that live and hold the state
    saved: int | None = None  # the newest step that can be had from a node's memory or from storage
    repeats: Mapping[str, int] = field(default_factory=dict)  # per node, how often before, lately, from the same cause
    procs_per_node: int = 1
    tries: int = 0  # how often this very step has already failed
    skipped: int = 0  # batches in a row that were passed over just before this step
    since_load: int | None = None  # steps committed since the state came from a checkpoint; None: it never did
    can_split: bool = False  # whether the batch can be cut into smaller pieces


@dataclass(frozen=True, kw_only=True, repr=False)
class Action:
    """What to do; `restart` names workers to start again on their own node, in every kind of action."""

    restart: tuple[tuple[str, int], ...] = ()

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value not in ((), None, False))
        return f"{type(self).__name__}({said})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Continue(Action):
    """Build the group again with the same members."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Replace(Action):
    """Give the seats of lost nodes to others: spares first, new nodes (None) where there are not enough."""

    seats: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True, repr=False)
class Shrink(Action):
    """Go on without the lost nodes."""

    lost: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Grow(Action):
    """Give seats to nodes that are free."""

    added: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Restart(Action):
    """Start the named workers again and go on."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Retry(Action):
    """Run the same step again: a flipped bit does not come twice."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Skip(Action):
    """Pass over this step's batch: the step counts, and changes nothing."""


@dataclass(frozen=True, kw_only=True, repr=False)
class LowerRate(Action):
    """Multiply the learning rate by `factor`, and pass over this step's batch."""

    factor: float = 0.5


@dataclass(frozen=True, kw_only=True, repr=False)
class Split(Action):
    """Cut the batch into twice as many pieces, and run the same step again."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Rollback(Action):
    """Load the newest good checkpoint that is at least `steps` old, and go on from there."""

    steps: int = 0
    skip: bool = False  # pass over the batch that failed when it comes again
    condemn: bool = False  # the checkpoint that was loaded last is bad: set it aside, take an older one


@dataclass(frozen=True, kw_only=True, repr=False)
class Wait(Action):
    """Do nothing until something changes."""

    reason: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Abort(Action):
    """End the job."""

    error: str  # the name of a JobError
    reason: str
    cause: str = ""


IN_A_STEP = (Retry, Skip, LowerRate, Split, Rollback, Abort)  # what can be done about one step
OF_A_STEP = ("numbers", "oom", "crash")  # causes that can lie in one step, with every node and worker well
FEW_STEPS = 3  # numbers that turn bad so soon after a load speak against the checkpoint
MANY_SKIPS = 3  # so many batches in a row are not bad by chance: the state is
BACK_STEPS = 10  # then training goes back at least so far

Policy = Callable[[Snapshot, Mapping[str, int]], Action]


def decide(snapshot: Snapshot, budgets: Mapping[str, int]) -> Action:
    """The reference policy; `budgets` maps each cause to the recoveries it has left."""
    if not snapshot.failures:
        return _grow(snapshot)
    refusal = _refuse(snapshot, budgets)
    if refusal:
        return refusal
    if is_of_a_step(snapshot):
        return _mend_step(snapshot)
    if all(failure.cause == "straggler" for failure in snapshot.failures):
        return _replace_straggler(snapshot)
    lost = _lost_nodes(snapshot)
    restart = tuple((failure.node, failure.local_rank) for failure in snapshot.failures
                    if failure.local_rank is not None and failure.node not in lost)
    if not lost:
        return Restart(restart=restart) if restart else Continue()
    if len(snapshot.spares) >= len(lost) or snapshot.can_start:
        spares = list(snapshot.spares)
        return Replace(seats={node: spares.pop(0) if spares else None for node in lost}, restart=restart)
    left = len(snapshot.members) - len(lost)
    if left >= snapshot.minimum:
        return Shrink(lost=lost, restart=restart)
    return Abort(error="RecoveryExhausted", cause="node",
                 reason=f"{left} of {snapshot.wanted} nodes are left, the job needs {snapshot.minimum}, and there is "
                        f"no spare")


def is_of_a_step(snapshot: Snapshot) -> bool:
    """Whether the failure lies in a step alone: no node and no worker is named."""
    return bool(snapshot.failures) and all(failure.cause in OF_A_STEP and not failure.node
                                           for failure in snapshot.failures)


def decide_step(policy: Policy, snapshot: Snapshot, budgets: Mapping[str, int]) -> tuple[Action, str]:
    """What a policy says about one step, and what is wrong with the answer; a policy that raises is no answer."""
    try:
        action = policy(snapshot, budgets)
    except Exception as error:
        return Wait(), f"the policy raised {type(error).__name__}: {error}"
    problem = find_problem(action, snapshot)
    if not problem and not isinstance(action, IN_A_STEP):
        problem = f"a step needs one of {', '.join(kind.__name__ for kind in IN_A_STEP)}"
    return action, f"the policy returned {action!r}: {problem}" if problem else ""


def find_problem(action: object, snapshot: Snapshot) -> str:
    """Why an action cannot be carried out in this situation; empty if it can. Policies may be students' work."""
    if not isinstance(action, Action):
        return "it is no Action"
    if isinstance(action, Abort):
        return "" if isinstance(action.reason, str) and isinstance(action.error, str) else "it must give a reason"
    if isinstance(action, Wait):
        return ""
    try:
        return _find_problem(action, snapshot)
    except (TypeError, ValueError, AttributeError) as error:
        return f"its fields make no sense: {error}"


def _find_problem(action: Action, snapshot: Snapshot) -> str:
    if isinstance(action, IN_A_STEP):
        return _find_step_problem(action, snapshot) if is_of_a_step(snapshot) else "nothing is wrong with a step"
    members, spares = set(snapshot.members), set(snapshot.spares)
    leaving: set[str] = set()
    if isinstance(action, Replace):
        leaving = set(action.seats)
        chosen = [spare for spare in action.seats.values() if spare is not None]
        if len(set(chosen)) < len(chosen) or set(chosen) - spares:
            return f"replacements must be different spares, which are {sorted(spares)}"
        if len(chosen) < len(action.seats) and not snapshot.can_start:
            return "no new node can be had (None stands for one)"
    elif isinstance(action, Shrink):
        leaving = set(action.lost)
        if leaving >= members:
            return "nobody would be left"
    elif isinstance(action, Grow) and (not action.added or set(action.added) - spares):
        return f"only spares can be added, which are {sorted(spares)}"
    if leaving - members or (isinstance(action, Replace | Shrink) and not leaving):
        return f"it must name members, which are {sorted(members)}"
    dead = {failure.node for failure in snapshot.failures if failure.cause == "node"} & members
    if dead - leaving:
        return f"{', '.join(sorted(dead - leaving))} is dead and would keep its seat"
    return _find_restart_problem(action, snapshot, leaving)


def _find_step_problem(action: Action, snapshot: Snapshot) -> str:
    if isinstance(action, Split) and not snapshot.can_split:
        return "the batch cannot be cut any further"
    if isinstance(action, LowerRate) and not 0 < action.factor < 1:
        return f"factor must be between 0 and 1, it is {action.factor!r}"
    if isinstance(action, Rollback):
        if snapshot.saved is None:
            return "there is no checkpoint to go back to"
        if action.condemn and snapshot.since_load is None:
            return "no checkpoint was loaded that could be condemned"
        if action.steps < 0:
            return f"steps must not be negative, it is {action.steps!r}"
    return ""


def _find_restart_problem(action: Action, snapshot: Snapshot, leaving: set[str]) -> str:
    broken = {(failure.node, failure.local_rank) for failure in snapshot.failures if failure.local_rank is not None}
    restarted = {(node, local_rank) for node, local_rank in action.restart}
    unmended = sorted(f"{node}'s worker {local_rank}" for node, local_rank in broken - restarted if node not in leaving)
    if unmended:
        return f"{', '.join(unmended)} failed and is neither restarted nor replaced"
    known = {(node, local_rank) for node in {*snapshot.members, *(node for node, _ in broken)}
             for local_rank in range(snapshot.procs_per_node)}
    return f"there are no such workers: {sorted(map(str, restarted - known))}" if restarted - known else ""


def _grow(snapshot: Snapshot) -> Action:
    missing = snapshot.wanted - len(snapshot.members)
    added = snapshot.spares[:missing] if missing > 0 else ()
    return Grow(added=added) if added else Wait(reason="nothing is wrong")


def _refuse(snapshot: Snapshot, budgets: Mapping[str, int]) -> Abort | None:
    fatal = next((failure for failure in snapshot.failures if failure.fatal), None)
    if fatal:
        return Abort(error="TrainingFailed", reason=fatal.detail, cause=fatal.cause)
    for failure in snapshot.failures:
        if budgets.get(failure.cause, 0) < 1:
            return Abort(error="RecoveryExhausted", cause=failure.cause,
                         reason=f"no recovery from '{failure.cause}' is left; last: {failure.detail}")
    if snapshot.step > 0 and snapshot.holders == 0 and snapshot.saved is None:
        raised = next((failure for failure in snapshot.failures if failure.cause == "crash"), None)
        if raised and len(snapshot.failures) >= len(snapshot.members):
            return Abort(error="TrainingFailed", cause="crash", reason=f"every rank failed: {raised.detail}")
        return Abort(error="StateLost", cause=snapshot.failures[0].cause,
                     reason=f"no worker is left that holds step {snapshot.step}, and there is no checkpoint")
    return None


def _mend_step(snapshot: Snapshot) -> Action:
    causes = {failure.cause for failure in snapshot.failures}
    if "crash" in causes:
        return _mend_crash(snapshot)
    return _mend_memory(snapshot) if "oom" in causes else _mend_numbers(snapshot)


def _mend_crash(snapshot: Snapshot) -> Action:
    """What raised may have left anything behind: go back to a state that was whole."""
    if snapshot.saved is not None:
        return Rollback()
    return Abort(error="TrainingFailed", cause="crash", reason=f"{snapshot.failures[0].detail}; there is no checkpoint "
                                                               f"to go back to")


def _mend_numbers(snapshot: Snapshot) -> Action:
    """Try again; if it is the batch, pass over it; if it is the state, go back to an older one."""
    if not snapshot.tries:
        return Retry()
    loaded = snapshot.since_load
    if loaded is not None and loaded <= FEW_STEPS and snapshot.saved is not None:
        return Rollback(condemn=True)
    if snapshot.skipped < MANY_SKIPS:
        return Skip()
    return Rollback(steps=BACK_STEPS, skip=True) if snapshot.saved is not None else LowerRate()


def _mend_memory(snapshot: Snapshot) -> Action:
    if snapshot.can_split:
        return Split()
    return Abort(error="OutOfMemory", cause="oom",
                 reason=f"one sample at a time does not fit into memory: {snapshot.failures[0].detail}")


def _replace_straggler(snapshot: Snapshot) -> Action:
    slow = [failure.node for failure in snapshot.failures if failure.node in snapshot.members]
    seats = dict(zip(slow, snapshot.spares, strict=False))
    return Replace(seats=seats) if seats else Wait(reason="a slow node is better than none")


def _lost_nodes(snapshot: Snapshot) -> tuple[str, ...]:
    """Nodes that are dead, or whose workers keep failing while others' do not."""
    worker_failures = [failure for failure in snapshot.failures if failure.local_rank is not None]
    alone = len({failure.node for failure in worker_failures}) == 1
    lost = {failure.node for failure in snapshot.failures if failure.cause == "node"}
    if alone and worker_failures[0].cause == "stall":
        lost |= {failure.node for failure in worker_failures if snapshot.repeats.get(failure.node, 0) >= 1}
    return tuple(node for node in snapshot.members if node in lost)
