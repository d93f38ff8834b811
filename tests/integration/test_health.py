"""What goes wrong while all nodes are up: bad numbers, memory, slow and stuck ranks. Each fault fired (receipt), was
found (event), and ended as it should."""

from __future__ import annotations

import pytest
import torch

import ftlab
from ftlab import faults
from ftlab.checkpoint.state import TrainingState
from ftlab.cluster.cgroups import available as cages_available
from ftlab.config import CheckpointConfig, HealthConfig
from ftlab.errors import BadPolicy, HealthError, OutOfMemory, RecoveryExhausted
from ftlab.policy import LowerRate, Rollback, Skip, decide
from tests import trains
from tests.conftest import require
from tests.limits import JOB_S


@pytest.fixture(scope="module")
def cluster():
    with ftlab.Cluster(nodes=3, spares=1, echo=None) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Reports of undisturbed runs, trained once."""
    known: dict[str, ftlab.Report] = {}

    def look_up(train, **options) -> ftlab.Report:
        key = f"{train.__name__} {sorted(options.items())}"
        if key not in known:
            known[key] = cluster.submit(train, **options).result(timeout=JOB_S)
        return known[key]

    return look_up


def run_with(cluster, train, fault, policy=None, **options) -> ftlab.Report:
    job = cluster.submit(train, policy=policy, **options)
    pending = cluster.inject(fault)
    report = job.result(timeout=JOB_S)
    assert pending.wait(5).receipt["status"]
    return report


def spoiled(report) -> list[tuple[str, str]]:
    return [(row["cause"], row["action"]) for row in report.facts["spoiled"]]


@pytest.mark.parametrize("ddp", [False, True])
def test_a_nan_that_comes_once_leaves_no_trace(cluster, undisturbed, ddp):
    wanted = undisturbed(trains.network, ddp=ddp)
    report = run_with(cluster, trains.network, faults.nan("rank-1", at_step=20), ddp=ddp)
    assert spoiled(report) == [("numbers", "Retry")] and report.facts["skipped"] == []
    assert report.digest == wanted.digest and report.recoveries == 0 and report.generations == 1


def test_a_nan_that_comes_again_costs_one_batch_which_is_named(cluster):
    report = run_with(cluster, trains.network, faults.nan("rank-2", "again", at_step=20))
    assert spoiled(report) == [("numbers", "Retry"), ("numbers", "Skip")]
    skipped = [event for event in report.events if event.kind == "step.committed" and event.data.get("skipped")]
    assert len(skipped) == 1 and skipped[0].data["passed_over"] == report.facts["skipped"]
    assert len(set(report.facts["skipped"])) == 48, "the whole batch, all ranks' parts of it"
    assert report.facts["steps"] == 60 and report.digest is not None, "all ranks passed over the same batch"


def test_a_policy_may_lower_the_learning_rate(cluster):
    def careful(snapshot, budgets):
        return LowerRate(factor=0.1) if snapshot.failures[0].cause == "numbers" else decide(snapshot, budgets)

    report = run_with(cluster, trains.roomy, faults.nan("rank-0", at_step=20), careful, sample_mb=0.01)
    assert spoiled(report) == [("numbers", "LowerRate")]
    assert [value["lr"] for value in report.values.values()] == [pytest.approx(0.005)] * 3


def test_a_policy_may_go_back_and_pass_over_the_batch(cluster, tmp_path):
    def back(snapshot, budgets):
        if snapshot.failures[0].cause != "numbers":
            return decide(snapshot, budgets)
        return Rollback(steps=8, skip=True) if snapshot.saved is not None else Skip()

    report = run_with(cluster, trains.network, faults.nan("rank-1", at_step=33), back,
                      checkpoint=CheckpointConfig(directory=str(tmp_path), every=10))
    assert spoiled(report) == [("numbers", "Rollback")]
    at = next(row["step"] for row in report.facts["spoiled"])
    (loaded,) = [event for event in report.events if event.kind == "checkpoint.loaded"]
    assert loaded.step == 20 and loaded.step <= at - 8 and report.source == "storage"
    skipped = [event.step - 1 for event in report.events
               if event.kind == "step.committed" and event.data.get("skipped")]
    assert skipped == [at] and report.digest is not None and report.facts["steps"] == 60


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("answer", [Rollback(steps=8, skip=True), Skip()], ids=["go back", "skip"])
def test_when_the_world_breaks_while_the_answer_travels_all_ranks_still_do_the_same(cluster, tmp_path, answer, rank):
    def decided(snapshot, budgets):
        return answer if snapshot.failures[0].cause == "numbers" else decide(snapshot, budgets)

    report = run_with(cluster, trains.deaf, faults.nan("rank-1", at_step=33), decided, rank=rank,
                      checkpoint=CheckpointConfig(directory=str(tmp_path), every=10))
    (bad,) = [row["step"] for row in report.facts["spoiled"]]
    loaded = [event.step for event in report.events if event.kind == "checkpoint.loaded"]
    assert loaded == ([20] if isinstance(answer, Rollback) else []) and report.recoveries == 1
    skipped = [event.step - 1 for event in report.events
               if event.kind == "step.committed" and event.data.get("skipped")]
    assert skipped == [bad] and report.facts["steps"] == 60 and report.digest is not None, "all ranks agree"


def test_a_checkpoint_whose_numbers_turn_bad_at_once_is_condemned_and_an_older_one_used(cluster, undisturbed, tmp_path):
    saving = CheckpointConfig(directory=str(tmp_path), every=10, keep_last_n=10)
    cluster.submit(trains.network, 30, checkpoint=saving).result(timeout=JOB_S)
    poisoned = trains.poison_newest(str(tmp_path))
    report = cluster.submit(trains.network, checkpoint=saving).result(timeout=JOB_S)
    assert spoiled(report) == [("numbers", "Retry"), ("numbers", "Rollback")]
    (condemned,) = [event for event in report.events if event.kind == "checkpoint.damaged"]
    assert condemned.data["name"] == poisoned and "NaN" in condemned.data["reason"]
    loaded = [event for event in report.events if event.kind == "checkpoint.loaded"]
    assert loaded[0].data["name"] == poisoned != loaded[1].data["name"] and len(loaded) == 2
    assert report.digest == undisturbed(trains.network).digest


@pytest.mark.parametrize("saving", [False, True])
def test_bad_numbers_without_end_use_up_their_budget(cluster, tmp_path, saving):
    checkpoint = CheckpointConfig(directory=str(tmp_path), every=10) if saving else None
    with pytest.raises(RecoveryExhausted, match="no recovery from 'numbers' is left") as ended:
        job = cluster.submit(trains.network, bad_from=25, checkpoint=checkpoint, budgets={"numbers": 10})
        job.result(timeout=JOB_S)
    assert ended.value.cause == "numbers" and "learning rate" in ended.value.hint


@pytest.mark.parametrize(("policy", "words"), [
    (lambda snapshot, budgets: "skip it", "it is no Action"),
    (lambda snapshot, budgets: Rollback(), "there is no checkpoint"),
    (lambda snapshot, budgets: {}["numbers"], "the policy raised KeyError"),
])
def test_a_policy_that_talks_nonsense_about_a_step_ends_the_job_with_a_clear_error(cluster, policy, words):
    job = cluster.submit(trains.network, policy=policy)
    cluster.inject(faults.nan("rank-1", at_step=20))
    with pytest.raises(BadPolicy, match=words):
        job.result(timeout=JOB_S)


def test_a_spike_is_found_when_it_is_looked_for(cluster):
    health = HealthConfig(loss_spike=20, settle=10)
    report = cluster.submit(trains.network, spike_at=25, health=health).result(timeout=JOB_S)
    assert spoiled(report) == [("numbers", "Retry"), ("numbers", "Skip")]
    assert "deviations above" in report.facts["spoiled"][0]["reason"]
    calm = cluster.submit(trains.network, spike_at=25).result(timeout=JOB_S)
    assert spoiled(calm) == []


def test_a_failed_allocation_cuts_the_batch_and_the_result_stays_the_same(cluster, undisturbed):
    wanted = undisturbed(trains.roomy, record_samples=True)
    report = run_with(cluster, trains.roomy, faults.oom("rank-1", room_mb=36, at_step=20), record_samples=True)
    assert set(spoiled(report)) == {("oom", "Split")} and report.recoveries == 0
    (first, *_) = [event for event in report.events if event.kind == "memory.failed"]
    assert first.data["rank_failed"] == 1 and "can't allocate memory" in first.data["detail"]
    assert all(value["pieces"] >= 2 for value in report.values.values())
    assert torch.allclose(torch.tensor(report.value["weights"]), torch.tensor(wanted.value["weights"]), atol=1e-5)
    assert report.digest is not None and report.samples() == wanted.samples()


def test_a_batch_that_cannot_be_cut_ends_the_job_with_advice(cluster):
    job = cluster.submit(trains.roomy, whole=True)
    cluster.inject(faults.oom("rank-1", room_mb=36, at_step=20))
    with pytest.raises(OutOfMemory, match="does not fit into memory") as ended:
        job.result(timeout=JOB_S)
    assert "data.shards(step)" in ended.value.hint


def test_the_kernel_kills_for_memory_and_the_worker_comes_back_with_smaller_pieces(cluster, undisturbed):
    require("cgroups", not cages_available(), cages_available())
    wanted = undisturbed(trains.roomy, sample_mb=12.0, steps=40)
    job = cluster.submit(trains.roomy, sample_mb=12.0, steps=40)
    pending = cluster.inject(faults.oom("rank-1", "kernel", room_mb=150, at_step=10))
    report = job.result(timeout=JOB_S)
    assert "may take 150 MB" in pending.wait().receipt["status"]
    (failed,) = [event for event in report.events if event.kind == "worker.failed"]
    assert (failed.data["cause"], failed.data["detail"]) == ("oom", "worker killed by the kernel for memory")
    assert report.recoveries == 1 and report.source == "live" and report.digest is not None
    assert {value["pieces"] for value in report.values.values()} == {2}
    assert torch.allclose(torch.tensor(report.value["weights"]), torch.tensor(wanted.value["weights"]), atol=1e-5)


def test_a_worker_killed_by_somebody_is_not_taken_for_one_killed_for_memory(cluster, undisturbed):
    report = run_with(cluster, trains.network, faults.crash("rank-1", at_step=20))
    (failed,) = [event for event in report.events if event.kind == "worker.failed"]
    assert failed.data["cause"] == "crash" and "SIGKILL" in failed.data["detail"]
    assert report.digest == undisturbed(trains.network).digest


def test_a_slow_rank_is_found_with_its_cause_and_its_node_replaced(cluster, undisturbed):
    wanted = undisturbed(trains.network, steps=150)
    report = run_with(cluster, trains.network, faults.straggler("rank-1", at_step=20), steps=150,
                      health=HealthConfig(replace_stragglers=True, straggler_steps=20))
    slow = report.facts["stragglers"][0]
    assert slow["rank"] == 1 and slow["ratio"] > 1.5 and slow["cause"] == "stopped"
    tables = [event.data["table"]["seats"] for event in report.events if event.kind == "membership.changed"]
    first, second = tables[:2]
    assert first[1]["node"] != second[1]["node"], "another node sits on rank 1"
    assert report.digest == wanted.digest


def test_without_leave_a_slow_rank_is_only_told(cluster, undisturbed):
    wanted = undisturbed(trains.network, steps=250)
    report = run_with(cluster, trains.network, faults.straggler("rank-1", at_step=20, heal_after=4), steps=250,
                      health=HealthConfig(straggler_steps=20))
    assert report.facts["stragglers"][0]["rank"] == 1 and report.generations == 1
    assert [event.kind for event in report.events if event.kind == "fault.healed"] == ["fault.healed"]
    assert report.digest == wanted.digest


def test_a_stuck_rank_is_caught_with_the_line_it_is_in(cluster, undisturbed, tmp_path):
    report = cluster.submit(trains.stuck, str(tmp_path / "marker")).result(timeout=JOB_S)
    (line,) = report.facts["caught"]
    assert line.startswith("rank 1 is in `threading.Event().wait() # a lock that nobody releases` (trains.py:")
    assert report.recoveries == 1 and "rank 1 is in" in str(report) and "a lock that nobody" in report._repr_html_()
    assert report.digest == cluster.submit(trains.stuck, str(tmp_path / "marker")).result(timeout=JOB_S).digest


def test_a_rank_that_gets_stuck_in_the_first_step_after_a_recovery_is_caught_as_soon(cluster, tmp_path):
    marker = str(tmp_path / "marker")
    report = run_with(cluster, trains.stuck, faults.crash("rank-2", at_step=20), marker=marker, recovered=True)
    causes = [event.data["cause"] for event in report.events if event.kind == "recovery.started"]
    assert causes == ["crash", "stall"], "not only when the recovery itself has taken too long"
    assert report.facts["caught"][0].startswith("rank 1 is in `threading.Event().wait()")
    assert report.digest == cluster.submit(trains.stuck, marker, recovered=True).result(timeout=JOB_S).digest


def test_ranks_that_take_different_numbers_of_steps_end_in_an_error_and_not_in_silence(cluster):
    with pytest.raises(RecoveryExhausted, match="link") as ended:
        cluster.submit(trains.uneven, budgets={"link": 2}).result(timeout=JOB_S)
    assert ended.value.cause == "link" and "wait for one" in str(ended.value)


@pytest.mark.parametrize(("kind", "words"), [("vector", "loss.mean"), ("whole", "counts")])
def test_a_loss_that_cannot_be_one_is_refused_with_advice(cluster, kind, words):
    with pytest.raises(HealthError) as refusal:
        cluster.submit(trains.wrong_loss, kind).result(timeout=JOB_S)
    assert words in str(refusal.value)


@pytest.mark.parametrize("fault", [faults.kill("rank-1", at_step=20), faults.crash("rank-0", at_step=20),
                                   faults.nan("rank-2", at_step=20)], ids=lambda fault: fault.kind)
def test_auto_recovery_in_a_cluster_ends_in_the_bits_of_an_undisturbed_run(cluster, undisturbed, fault):
    wanted = undisturbed(trains.epochs)
    report = run_with(cluster, trains.epochs, fault)
    assert report.digest == wanted.digest and report.value == wanted.value == {"steps": 64, "epochs": 4, "skipped": []}


def test_auto_recovery_in_a_cluster_names_the_batch_it_passed_over(cluster):
    report = run_with(cluster, trains.epochs, faults.nan("rank-2", "again", at_step=20))
    (row,) = [row for row in report.facts["spoiled"] if row["action"] == "Skip"]
    assert report.value["skipped"] == [divmod(row["step"], 16)]


def test_what_travels_beside_the_state_is_no_part_of_its_digest():
    state = TrainingState()
    state.protect({"model": torch.nn.Linear(2, 2)})
    before = state.digest()

    class Rider:
        def state_dict(self):
            return {"pieces": 4}

    state.rider = Rider()
    assert state.digest() == before and state.capture()["rider"] == {"pieces": 4}


def test_a_cluster_may_go_by_the_rhythm_of_heartbeats():
    with ftlab.Cluster(nodes=3, spares=1, echo=None, detector="phi") as cluster:
        wanted = cluster.submit(trains.network).result(timeout=JOB_S)
        report = run_with(cluster, trains.network, faults.hang("rank-1", at_step=20))
        assert report.digest == wanted.digest and report.recoveries == 1
        (died,) = [event for event in report.events if event.kind == "node.died"]
        assert "no heartbeat for" in died.data["reason"]
