"""Drills: start a cluster, train an undisturbed twin, train again under a fault, compare bit by bit, and count what
was left behind.

    report = ftlab.drill.run_drill("kill", nodes=4, spares=1, seed=3)

A drill states what it expects; the report lists what did not hold.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from ftlab.cluster.abilities import missing, why_not
from ftlab.cluster.cluster import Cluster
from ftlab.cluster.engine import look
from ftlab.cluster.job import Job
from ftlab.cluster.runs import labelled
from ftlab.cluster.temporary import TemporaryFolder
from ftlab.config import DEFAULT_BUDGETS, DISK, CheckpointConfig, ClusterConfig, HealthConfig, runs_dir
from ftlab.errors import FaultError, FaultUnavailable, FtlabError, UnknownFault, WaitInterrupted
from ftlab.events import events_after
from ftlab.faults import Fault, Pending, Schedule, make, random_schedule
from ftlab.faults.catalogue import WAYS
from ftlab.report.report import Report
from ftlab.report.verdict import compare
from ftlab.train.example import TIGHT, train_network
from ftlab.validation import Checked, check, check_least

DRILLS: dict[str, str] = {
    "kill": "a whole node is killed",
    "crash": "one worker is killed, its node lives on",
    "hang": "a whole node stops, and goes on later as a new one",
    "stall": "the training thread of one worker blocks",
    "nan": "a gradient of one worker turns into NaN, once or each time the step is tried",
    "oom": "one worker runs out of memory: an allocation fails, or the kernel kills it",
    "straggler": "one worker becomes slow, is found by its step times, and its node is replaced",
    "partition": "a node is cut off from everybody, and comes back later as a new one",
    "split": "two nodes together are cut off from the rest, and come back later as new ones",
    "link": "the link of a node loses packets for a while",
    "disk": "the disk that nodes save to is full for a while; training goes on, and later so does saving",
    "controller": "the controller is killed and comes back from its journal",
    "blackout": "all nodes die at once; training goes on from the newest checkpoint",
    "corrupt": "all nodes die, and the newest checkpoint is damaged: training goes on from an older one",
}
_HEAL_S = 1.5
_NO_RECOVERY = ("controller", "link", "disk")  # training need not stop
_HEALED = ("hang", "partition", "split", "link", "disk")
_RETURNS = ("hang", "partition")  # kinds of faults after which a node comes back as a new one
_LOSS = 0.2  # of the packets of a bad link
_DISK_MB = 24  # holds the checkpoints that are kept, of the network that drills train
_FROM_STORAGE = ("blackout", "corrupt")  # nothing live is left
_SAVE_EVERY = 10  # steps, in these
_SLOW_STEPS = 20  # compared between ranks, in a drill that has not many
_SETTLE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class DrillPlan(Checked):
    """How a drill is run; `say` hears what is going on."""

    nodes: int = 4
    spares: int = 1
    procs_per_node: int = 1
    steps: int = 150
    step_s: float = 0.02
    seed: int = 0
    exact: bool = False
    way: str = ""  # of a fault that has several; empty: chosen by the seed
    settings: dict[str, Any] = field(default_factory=dict)  # of the cluster
    say: Callable[[str], None] = lambda text: None
    echo: TextIO | None = None

    @property
    def backend(self) -> str:
        """What a node is."""
        return str(self.settings.get("backend", "process"))

    def __post_init__(self) -> None:
        self.check_types()
        ClusterConfig(nodes=self.nodes, spares=self.spares, procs_per_node=self.procs_per_node, **self.settings)
        self.require(self.steps >= 20, f"steps must be at least 20: a fault needs steps before and after it (got "
                                       f"{self.steps})")
        self.require(self.step_s >= 0, f"step_s must not be negative (got {self.step_s})")


def run_drill(name: str, twin: Report | None = None, **plan: Any) -> Report:
    """Run one drill; its report. `twin` is the report of an undisturbed run with the same plan, if there is one."""
    check("twin", twin, Report | None)
    if not isinstance(name, str) or name not in DRILLS:
        raise UnknownFault(f"no drill is called {name!r}", hint=f"drills are {', '.join([*DRILLS, 'random', 'all'])}")
    details = DrillPlan(**plan)
    with _stoppable(name):
        return _run(name, Schedule((_plan_fault(name, details),), details.seed), details, twin)


def unavailable(name: str, **plan: Any) -> str:
    """Why a drill cannot be run on this machine; empty if it can."""
    details = DrillPlan(**plan)
    return missing(_plan_fault(name, details).needs, _config(name, details))


def _plan_fault(name: str, plan: DrillPlan) -> Fault:
    """The fault of a drill: its victim and its moment come from the seed."""
    draw = random.Random(f"{name}-{plan.seed}")
    at_step = _moment(name, plan.steps)
    way = plan.way or (draw.choice(_ways(name, plan)) if name in WAYS and name != "partition" else "")
    more: dict[str, Any] = {"room_mb": int(TIGHT[way]["room_mb"])} if name == "oom" and way in TIGHT else {}
    if name == "link":
        more["loss"] = _LOSS
    return make({"split": "partition"}.get(name, name), _victims(name, plan.nodes, draw), at_step=at_step, way=way,
                after=round(draw.uniform(0.0, plan.step_s), 4), heal_after=_HEAL_S if name in _HEALED else None, **more)


def _moment(name: str, steps: int) -> int:
    """The step at which a drill's fault comes."""
    first = 3 * _SAVE_EVERY if name in _FROM_STORAGE else 5
    at_step = max(first, steps // (10 if name == "straggler" else 3))  # a slow rank takes long to be sure of
    if name == "disk":  # just before a save: the disk is full for a while only, and steps may take long
        at_step += -at_step % _SAVE_EVERY - 1
    return at_step


def _victims(name: str, nodes: int, draw: random.Random) -> str:
    """Who is hit: two at once in a split, in `disk` the one who saves."""
    if name == "split":
        return ",".join(f"rank-{rank}" for rank in sorted(draw.sample(range(nodes), min(2, nodes))))
    return "rank-0" if name == "disk" else f"rank-{draw.randrange(nodes)}"


def _ways(name: str, plan: DrillPlan) -> tuple[str, ...]:
    """The ways of a fault that can be had here: the kernel kills for memory only where cgroups can be made."""
    return WAYS[name] if name != "oom" or not why_not("cage", plan.backend) else ("allocation",)


def _config(name: str, plan: DrillPlan) -> ClusterConfig:
    """The settings of a drill's cluster, before it has a folder to share."""
    disk = {"disk_mb": _DISK_MB} if name == "disk" and plan.backend == "docker" else {}
    return ClusterConfig(nodes=plan.nodes, spares=plan.spares, procs_per_node=plan.procs_per_node,
                         **{**plan.settings, **disk})


def run_drills(names: Sequence[str], **plan: Any) -> list[Report]:
    """Run several drills against one twin."""
    check("names", names, tuple[str, ...])
    reports: list[Report] = []
    twin: Report | None = None
    for name in names:
        report = run_drill(name, twin=twin, **plan)
        twin = report.twin
        reports.append(report)
    return reports


def run_random(faults: int = 3, twin: Report | None = None, **plan: Any) -> Report:
    """A random schedule from the seed, over all kinds of faults; those that cannot be done here are left out."""
    details = DrillPlan(**plan)
    check_least("faults", faults, 1)
    check("twin", twin, Report | None)
    ranks = [f"rank-{rank}" for rank in range(details.nodes)]
    drawn = random_schedule(details.seed, faults, ranks, details.steps)
    with _stoppable("random"):
        return _run("random", _possible(drawn, details), details, twin)


@contextmanager
def _stoppable(name: str) -> Iterator[None]:
    """Who stops a drill is not told of its job, which ends with its cluster."""
    try:
        yield
    except KeyboardInterrupt:
        raise WaitInterrupted(f"the drill {name} was stopped, and its cluster is closed") from None


def _possible(schedule: Schedule, plan: DrillPlan) -> Schedule:
    """The schedule without what this machine cannot do; as it is if nothing would be left."""
    config = _config("random", plan)
    reasons = [missing(fault.needs, config) for fault in schedule.faults]
    if all(reasons):
        return schedule
    judged = list(zip(schedule.faults, reasons, strict=True))
    for fault, reason in judged:
        if reason:
            plan.say(f"left out: {fault.describe()}: {reason}")
    return replace(schedule, faults=tuple(fault for fault, reason in judged if not reason),
                   left_out=tuple(fault for fault, reason in judged if reason))


def _run(name: str, schedule: Schedule, plan: DrillPlan, twin: Report | None) -> Report:
    config = _config(name, plan)
    for fault in schedule.faults:  # before anything is started
        if reason := missing(fault.needs, config):
            raise FaultUnavailable(reason, hint="`ftlab doctor` tells what this machine can do")
    with ExitStack() as stack:
        folder = str(stack.enter_context(TemporaryFolder("drill"))) if name in _FROM_STORAGE else ""
        more: dict[str, Any] = {"share": _shared(folder)} if folder and plan.backend == "docker" else {}
        more |= {"disk_mb": config.disk_mb} if config.disk_mb else {}
        cluster = stack.enter_context(Cluster(plan.nodes, plan.spares, plan.procs_per_node, echo=plan.echo,
                                              **{**plan.settings, **more}))
        options = _options(schedule.faults[0]) if len(schedule.faults) == 1 else {}
        alike = not {"noisy", "sample_mb"} & set(options)  # as in the other drills, with which the twin is shared
        if twin is None or not alike:
            plan.say("training the undisturbed twin")
            own = submit_example(cluster, plan, **_without_ballast(options)).result(timeout=_time_limit(plan))
            twin, reference = (own if alike else twin), own
        else:
            reference = twin
        plan.say(schedule.describe())
        pending = [cluster.inject(fault) for fault in schedule.faults]  # before the job: no step can have passed
        job = submit_example(cluster, plan, f"{DISK}/checkpoints" if name == "disk" else folder, **options)
        values, error = _result(job, plan)
        not_fired = _not_fired(pending)
        returned = _wait_for_return(cluster, schedule.faults)
        events, cluster_name = events_after(cluster.events, job.first_event), cluster.name
        report = Report.of(name, events, config=cluster.config.to_dict(), values=values)
    facts = {**report.facts, "drill": name, "seed": plan.seed, "leaked": _count_leaks(cluster_name, plan.backend),
             "twin_digest": reference.digest, **compare(report, reference), "repeat": _repeat(name, schedule, plan),
             "error": error.to_dict() if error else None}
    facts["failed_expectations"] = _check(name, facts, not_fired, returned, schedule.faults)
    facts["held"] = not facts["failed_expectations"]
    return Report(facts, events, report.values, twin)


def _shared(folder: str) -> list[str]:
    """A folder that containers can write to, whoever they run as."""
    os.chmod(folder, 0o777)
    return [folder]


def _result(job: Job, plan: DrillPlan) -> tuple[dict[int, Any], FtlabError | None]:
    try:
        return job.result(timeout=_time_limit(plan)).values, None
    except FtlabError as error:
        return {}, error


def _options(fault: Fault) -> dict[str, Any]:
    """What the job of a drill needs beside the twin's: memory to run out of, or leave to replace a slow node."""
    if fault.kind == "oom":
        return {"sample_mb": TIGHT[fault.way]["sample_mb"], "noisy": False}
    slow = HealthConfig(replace_stragglers=True, straggler_steps=_SLOW_STEPS)
    return {"health": slow} if fault.kind == "straggler" else {}


def _without_ballast(options: dict[str, Any]) -> dict[str, Any]:
    """The same arithmetic without the memory that is to run out: a twin has no need of it."""
    return {name: value for name, value in options.items() if name != "sample_mb"}


def submit_example(cluster: Cluster, plan: DrillPlan, checkpoints: str = "", **options: Any) -> Job:
    """Start the job that drills and benches train, with budgets that do not end it."""
    saving = CheckpointConfig(directory=checkpoints, every=_SAVE_EVERY) if checkpoints else None
    return cluster.submit(train_network, steps=plan.steps, step_s=plan.step_s, exact=plan.exact, checkpoint=saving,
                          record_samples=True, budgets=dict.fromkeys(DEFAULT_BUDGETS, 100), **options)


def _time_limit(plan: DrillPlan) -> float:
    """Generous: on a machine that is busy with other things a step takes many times as long, and that is no failure."""
    return 240.0 + 20 * plan.steps * max(plan.step_s, 0.02)


def _not_fired(pending: Sequence[Pending]) -> list[str]:
    problems = []
    for each in pending:
        try:
            each.wait(timeout=5)
        except TimeoutError:
            problems.append(f"{each.fault.describe()} did not happen before the job ended")
        except FaultError as error:
            problems.append(f"{each.fault.describe()} could not be injected: {error.message}")
    return problems


def _wait_for_return(cluster: Cluster, faults: Sequence[Fault]) -> bool:
    """Whether every node that was healed has come back as a new one."""
    healing = sum(len(fault.target.split(",")) for fault in faults if fault.kind in _RETURNS and fault.heal_after)
    deadline = time.monotonic() + _SETTLE_S
    while healing and time.monotonic() < deadline:
        if sum(event.kind == "node.fenced" for event in cluster.events) >= healing:
            return True
        time.sleep(0.02)
    return not healing


def _check(name: str, facts: dict[str, Any], not_fired: list[str], returned: bool,
           faults: Sequence[Fault]) -> list[str]:
    """What was expected and did not hold."""
    wrong = list(not_fired)

    def expect(holds: bool, text: str) -> None:
        if not holds:
            wrong.append(text)

    expect(facts["injected"] == len(faults) - len(not_fired), "a fault left no receipt")
    expect(facts["leaked"] == 0, f"{facts['leaked']} processes, folders or segments were left behind")
    expect(facts["recovered"], f"training did not go on: {(facts['error'] or {}).get('message', 'it did not finish')}")
    skipped, wanted = len(facts["skipped"]), _wanted_verdicts(faults)
    expect(facts["verdict"] in wanted, f"the end state is {facts['verdict']}, not {' or '.join(wanted)} to the twin's")
    expect((facts["samples_lost"] or 0) == skipped, f"{facts['samples_lost']} samples were lost, of which {skipped} on "
                                                    f"purpose")
    expect(facts["samples_repeated"] == 0, f"{facts['samples_repeated']} samples were repeated")
    if name in _FROM_STORAGE:
        expect(facts["source"] == "storage", f"the state came from {facts['source']}, not from storage")
        expect(facts["steps_lost"] <= 3 * _SAVE_EVERY, f"{facts['steps_lost']} steps were lost, too many")
        expect(facts["damaged"] >= (name == "corrupt"), "the damaged checkpoint was not noticed")
    else:
        expect(facts["steps_lost"] == 0, f"{facts['steps_lost']} committed steps were lost")
    if len(faults) == 1:
        seen = [row["detection_s"] for row in facts["injections"]]
        expect(None not in seen or name == "link", "the fault was not detected")
        mended = bool(facts["spoiled"]) and name in ("nan", "oom")
        expect(name in _NO_RECOVERY or mended or facts["recoveries"] >= 1, "no recovery took place")
        expect(name != "oom" or "oom" in [*facts["causes"], *(row["cause"] for row in facts["spoiled"])],
               f"what ran out of memory was taken for {', '.join(facts['causes']) or 'nothing'}")
        expect(name != "straggler" or bool(facts["stragglers"]), "the slow rank was not found")
        expect(name != "nan" or bool(skipped) == (faults[0].way == "again"), f"{skipped} samples were passed over")
        expect(name != "disk" or bool(facts["unsaved"]), "no checkpoint failed")
        expect(returned, "the healed node did not come back as a new one")
    return wrong


def _wanted_verdicts(faults: Sequence[Fault]) -> tuple[str, ...]:
    """A batch in smaller pieces is added up in another order; one that is passed over leaves another state."""
    if any(fault.kind == "nan" and fault.way == "again" for fault in faults):
        return ("diverged",)
    return ("identical", "equivalent") if any(fault.kind == "oom" for fault in faults) else ("identical",)


def _count_leaks(cluster: str, backend: str) -> int:
    """Processes, folders, shared memory, containers and networks that outlived the cluster for more than a moment."""
    deadline = time.monotonic() + 3.0
    while True:
        shm = [name for name in os.listdir("/dev/shm") if cluster in name] if Path("/dev/shm").is_dir() else []
        left = len(labelled().get(cluster, ())) + (runs_dir() / cluster).exists() + len(shm)
        left += sum(len(each) for each in look() if each.cluster == cluster) if backend == "docker" else 0
        if left == 0 or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _repeat(name: str, schedule: Schedule, plan: DrillPlan) -> str:
    more = f" --faults {len(schedule.faults) + len(schedule.left_out)}" if name == "random" else ""
    more += f" --backend {plan.backend}" if plan.backend != "process" else ""
    more += f" --network {plan.settings['network']}" if plan.settings.get("network", "auto") != "auto" else ""
    return (f"ftlab drill {name} --seed {plan.seed}{more} --nodes {plan.nodes} --spares {plan.spares} "
            f"--steps {plan.steps}{' --exact' if plan.exact else ''}{f' --way {plan.way}' if plan.way else ''}")
