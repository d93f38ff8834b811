"""The catalogue of faults: plans that are checked when they are made."""

from __future__ import annotations

import pytest

from ftlab import faults
from ftlab.errors import ConfigError, FaultError, FaultUnavailable, UnknownFault, UnknownNode
from ftlab.faults import KINDS, Fault, make
from ftlab.faults.catalogue import HEALABLE, WAYS


@pytest.mark.parametrize("kind", ["meteor", "", "Kill", "kill "])
def test_an_unknown_fault_is_refused_with_the_known_ones(kind):
    with pytest.raises(UnknownFault, match=f"no fault is called {kind!r}") as refusal:
        make(kind, "node-1")
    assert all(known in refusal.value.hint for known in KINDS)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(HEALABLE)))
def test_what_cannot_be_healed_refuses_a_time_to_heal(kind):
    with pytest.raises(ConfigError, match=f"a {kind} cannot be healed"):
        make(kind, "node-1", heal_after=1.0, way=WAYS.get(kind, ("",))[0])


@pytest.mark.parametrize("kind", HEALABLE)
def test_hangs_and_partitions_can_be_healed(kind):
    assert make(kind, "node-1", heal_after=1.5, way=WAYS.get(kind, ("",))[0]).heal_after == 1.5


@pytest.mark.parametrize(("fault", "words"), [
    (faults.kill("node-2"), "kill node-2"),
    (faults.kill("rank-3", at_step=40), "kill rank-3 at step 40"),
    (faults.crash("node-1", local_rank=1, after=0.25), "crash node-1 after 0.25 s"),
    (faults.hang("node-2", 2.0, at_step=40), "hang node-2 at step 40, healed after 2 s"),
    (faults.partition("node-0", heal_after=3, at_step=5, after=0.5),
     "partition node-0 at step 5 after 0.5 s, healed after 3 s"),
    (faults.stall("node-1", at_step=0), "stall node-1 at step 0"),
    (faults.controller(at_step=9), "controller controller at step 9"),
    (faults.blackout(), "blackout all"),
    (faults.corrupt("swap", at_step=30), "corrupt all by swap at step 30"),
    (faults.nan("rank-1", "again"), "nan rank-1 by again"),
    (faults.straggler("node-2", heal_after=2), "straggler node-2, healed after 2 s"),
    (faults.partition(["node-1", "rank-2"], way="sends"), "partition node-1,rank-2 by sends"),
    (faults.link("node-1", loss=0.3, at_step=5), "link node-1 at step 5"),
    (faults.disk("node-1", 2.0), "disk node-1, healed after 2 s"),
])
def test_a_fault_describes_itself(fault, words):
    assert fault.describe() == words


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_maker_of_its_name_that_makes_it(kind):
    maker = getattr(faults, kind)
    fault = maker() if kind in ("controller", "blackout", "corrupt") else maker("node-1")
    same = make(kind, "node-1", way=WAYS.get(kind, ("",))[0])
    assert fault == same and isinstance(fault, Fault) and fault.kind == kind


@pytest.mark.parametrize(("kind", "way"), [("nan", ""), ("nan", "flip"), ("oom", "again"), ("kill", "kernel"),
                                           ("corrupt", "once")])
def test_a_way_that_a_fault_does_not_have_is_refused(kind, way):
    with pytest.raises(ConfigError, match=f"{way!r} is no way to {kind}"):
        make(kind, "node-1", way=way)


@pytest.mark.parametrize("share", [0, 1, -0.5, 2])
def test_a_straggler_must_have_some_of_its_time_and_not_all(share):
    with pytest.raises(ConfigError, match="share must be between 0 and 1"):
        faults.straggler("node-1", share)


def test_faults_without_a_choice_have_a_fixed_target():
    assert make("controller", "node-1").target == "controller" and make("blackout", "node-1").target == "all"


class Hands:
    """A cluster that takes note of what is done to it."""

    running = True
    gap = ""  # why it cannot do what is asked

    def missing(self, needs):
        return f"{needs[0]}: {self.gap}" if self.gap else ""

    def __init__(self) -> None:
        self.job: dict[str, object] | None = {"status": "running", "world": 3}  # of four: it has shrunk
        self.orders: list[dict[str, object]] = []
        self.records: list[tuple[str, dict[str, object]]] = []

    def order(self, **request):
        self.orders.append(request)
        return {"at": 5.0, "seen": "stopped"}

    def status(self):
        def node(number: int, ranks: list[int], **more: object) -> dict[str, object]:
            return {"name": f"node-{number}", "verdict": "ALIVE", "joined": True, "ranks": ranks,
                    "workers": {"0": {"pid": 100 + number}}, **more}
        return {"nodes": [node(0, [0]), node(1, [1], verdict="DEAD"), node(2, [2]), node(3, [])],
                "job": self.job, "config": {"nodes": 4, "procs_per_node": 1}}

    def record(self, kind, **fields):
        self.records.append((kind, fields))


@pytest.mark.parametrize(("fault", "order"), [
    (faults.kill("node-2"), {"do": "kill", "node": "node-2"}),
    (faults.kill("rank-2"), {"do": "kill", "node": "node-2"}),
    (faults.kill("rank-1"), {"do": "kill", "node": "node-2"}),  # whoever sat there is dead: the next one
    (faults.crash("rank-2"), {"do": "crash", "node": "node-2", "pid": 102}),
    (faults.stall("node-3"), {"do": "stall", "node": "node-3", "pid": 103}),
    (faults.nan("node-3"), {"do": "nan", "node": "node-3", "pid": 103}),
    (faults.nan("node-3", "again"), {"do": "poison", "node": "node-3", "pid": 103}),
    (faults.oom("node-3"), {"do": "squeeze", "node": "node-3", "pid": 103, "room_mb": 36}),
    (faults.oom("node-3", "kernel", room_mb=99), {"do": "cage", "node": "node-3", "pid": 103, "room_mb": 99}),
    (faults.straggler("node-3", 0.5), {"do": "straggler", "node": "node-3", "pid": 103, "share": 0.5}),
    (faults.hang("node-0"), {"do": "hang", "node": "node-0"}),
    (faults.partition("node-0"), {"do": "cut", "node": "node-0"}),
    (faults.partition(["rank-0", "rank-2"]), {"do": "cut", "node": "node-0,node-2"}),
    (faults.partition(["rank-1", "rank-2"], way="sends"), {"do": "cut", "node": "node-2", "way": "sends"}),
    (faults.link("rank-2", 0.3), {"do": "link", "node": "node-2", "loss": 0.3, "delay_ms": 0.0, "rate_mbit": 0.0}),
    (faults.disk("node-3"), {"do": "disk", "node": "node-3"}),
    (faults.controller(), {"do": "kill_controller"}),
    (faults.blackout(), {"do": "kill_all"}),
], ids=lambda it: it.describe() if isinstance(it, Fault) else "")
def test_an_injection_orders_one_thing_and_keeps_the_receipt(fault, order):
    hands = Hands()
    injection = fault.inject(hands)
    assert hands.orders == [order]
    assert (injection.fault, injection.at, injection.receipt) == (fault.kind, 5.0, {"at": 5.0, "seen": "stopped"})
    ((kind, fields),) = hands.records
    assert kind == "fault.injected" and fields["at"] == 5.0
    assert fields["data"] == {"fault": fault.kind, "target": injection.target, "receipt": injection.receipt}


@pytest.mark.parametrize(("fault", "needs"), [
    (faults.kill("node-1"), ()),
    (faults.partition("node-1"), ("partition",)),
    (faults.partition("node-1", way="receives"), ("split",)),
    (faults.partition(["node-1", "node-2"]), ("split",)),
    (faults.link("node-1", loss=0.2, delay_ms=5), ("loss", "delay")),
    (faults.link("node-1", loss=0, rate_mbit=1), ("rate",)),
    (faults.oom("node-1"), ()),
    (faults.oom("node-1", "kernel"), ("cage",)),
    (faults.disk("node-1"), ("disk",)),
])
def test_a_fault_names_what_it_needs(fault, needs):
    assert fault.needs == needs


@pytest.mark.parametrize("when", [{}, {"at_step": 100}, {"after": 60.0}])
def test_what_cannot_be_done_is_refused_at_once_and_not_when_its_time_comes(when):
    hands = Hands()
    hands.gap = "this kernel cannot"
    with pytest.raises(FaultUnavailable, match="delay: this kernel cannot"):
        faults.link("node-1", loss=0, delay_ms=5, **when).inject(hands)
    assert hands.orders == hands.records == []


@pytest.mark.parametrize(("make_it", "words"), [
    (lambda: faults.link("node-1", loss=0), "nothing is wrong with it"),
    (lambda: faults.link("node-1", loss=1.5), "loss must be between 0 and 1"),
    (lambda: faults.link("node-1", delay_ms=-1), "delay_ms must not be negative"),
    (lambda: faults.kill("node-1,node-2"), "only a partition takes several"),
    (lambda: faults.kill("node-1", loss=0.5), "a kill has no loss: loss is for link"),
    (lambda: faults.kill("node-1", local_rank=1), "a kill has no local_rank"),
    (lambda: faults.kill("node-1", at_stp=3), "unknown setting 'at_stp'"),
    (lambda: faults.kill("node-1", at_step=-1), "at_step must not be negative"),
    (lambda: faults.kill("node-1", at_step=2.5), "at_step must be a whole number or None: got 2.5"),
    (lambda: faults.kill("node-1", at_step=True), "at_step must be a whole number"),
    (lambda: faults.kill("node-1", after=float("nan")), "after must be a finite number"),
    (lambda: faults.kill("node-1", after="soon"), "after must be a finite number"),
    (lambda: faults.hang("node-1", heal_after=-1), "heal_after must not be negative"),
    (lambda: faults.crash("node-1", local_rank=-1), "local_rank must not be negative"),
    (lambda: faults.oom("node-1", room_mb=0), "room_mb must be at least 1"),
    (lambda: Fault(kind="blackout", target="node-1"), "a blackout has no target to choose"),
])
def test_a_plan_that_makes_no_sense_is_refused(make_it, words):
    with pytest.raises(ConfigError, match=words):
        make_it()


@pytest.mark.parametrize("target", ["", "rank-x", "rank-", "rank--1", "rank-1.5", "node-", "node", "spare", "all", "2",
                                    "Node-1", " node-1", "node-1 ", "node-01", 2, None, True, b"node-1", ["node-1"]])
def test_what_cannot_be_the_name_of_a_node_is_refused_when_the_fault_is_planned(target):
    with pytest.raises(ConfigError, match=r'a kill needs a target.*such as "node-2"') as refusal:
        faults.kill(target)
    assert repr(target) in str(refusal.value)


@pytest.mark.parametrize("group", [[], ["node-1", 3], ["node-1", "node-x"], "node-1,,node-2", None, 7, {"node-1": 2}])
def test_a_group_needs_names_of_nodes(group):
    with pytest.raises(ConfigError, match="a partition needs a target"):
        faults.partition(group)


@pytest.mark.parametrize("when", [{}, {"at_step": 3}, {"after": 60.0}])
@pytest.mark.parametrize("target", ["rank-4", "rank-9"])
def test_a_rank_that_no_node_can_have_hits_nobody(target, when):
    hands = Hands()
    with pytest.raises(UnknownNode, match=f"no rank {target[5:]} on this cluster"):
        faults.kill(target, **when).inject(hands)
    assert hands.orders == hands.records == []


def test_a_rank_that_was_lost_when_the_job_shrank_hits_nobody(monkeypatch):
    monkeypatch.setattr("ftlab.faults.injection._FIND_SEAT_S", 0.0)
    hands = Hands()
    with pytest.raises(UnknownNode, match="no node has rank 3 at the moment"):
        faults.kill("rank-3").inject(hands)
    assert hands.orders == hands.records == []


@pytest.mark.parametrize("job", [None, {"status": "finished", "world": 3}, {"status": "failed", "world": 3}])
@pytest.mark.parametrize("fault", [faults.kill("rank-1"), faults.partition(["rank-0", "rank-1"])])
def test_without_a_job_a_rank_hits_nobody(fault, job):
    hands = Hands()
    hands.job = job
    with pytest.raises(FaultError, match="no job is running"):
        fault.inject(hands)
    assert hands.orders == hands.records == []


@pytest.mark.parametrize("target", ["node-9", "node-1"])  # never there, and dead
def test_a_fault_of_later_names_a_node_that_is_there_now(target):
    hands = Hands()
    with pytest.raises(UnknownNode, match=f"no node is called '{target}'"):
        faults.kill(target, at_step=3).inject(hands)


def test_a_worker_that_a_node_cannot_have_is_refused_at_once():
    hands = Hands()
    with pytest.raises(FaultError, match="node-0 has no worker 5: local_rank goes from 0 to 0"):
        faults.crash("node-0", local_rank=5).inject(hands)
    assert hands.orders == []
