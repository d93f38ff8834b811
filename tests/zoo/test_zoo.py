"""The zoo of user loops: whatever breaks, each ends in the bits of its undisturbed run, or says that it cannot."""

from __future__ import annotations

import random

import pytest

import ftlab
from ftlab import errors, faults
from tests.limits import JOB_S
from tests.zoo.loops import RIGHT, WRONG

GENEROUS = {"node": 50, "crash": 50, "stall": 50, "link": 50}
UNREHEARSED = ("checks_below_that_the_block_was_done",)  # it begins anew when its step is cut short
KINDS = {"kill": faults.kill, "crash": faults.crash, "hang": faults.hang}


@pytest.fixture(scope="module")
def cluster():
    with ftlab.Cluster(nodes=3, spares=2, echo=None) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def digest_of(cluster):
    """The digest of an undisturbed run; trained once."""
    known: dict[str, str] = {}

    def look_up(name: str) -> str:
        if name not in known:
            report = cluster.submit(RIGHT[name], budgets=GENEROUS).result(timeout=JOB_S)
            told = [event.data for event in report.events if event.kind == "rehearsal.finished"]
            assert report.digest is not None
            assert [each["verdict"] for each in told][:1] == ["identical"] or name in UNREHEARSED, told
            known[name] = report.digest
        return known[name]

    return look_up


@pytest.mark.parametrize("kind", ["kill", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("crash", "hang"))])
@pytest.mark.parametrize("name", RIGHT)
def test_a_loop_ends_in_the_same_bits_whatever_breaks(cluster, digest_of, name, kind):
    draw = random.Random(f"{name} {kind}")
    job = cluster.submit(RIGHT[name], budgets=GENEROUS)
    step, rank = draw.randint(1, 10), draw.randint(0, 2)
    receipt = cluster.inject(KINDS[kind](f"rank-{rank}", at_step=step))
    report = job.result(timeout=JOB_S)
    assert receipt.wait(JOB_S) and report.injected == 1 and report.recoveries >= 1
    assert report.digest == digest_of(name), f"{kind} of rank {rank} at step {step}"


@pytest.mark.parametrize("name", WRONG)
def test_a_loop_that_cannot_survive_is_told_so_in_its_first_steps(cluster, name):
    loop, error, word = WRONG[name]
    with pytest.raises(getattr(errors, error)) as caught:
        cluster.submit(loop, budgets=GENEROUS).result(timeout=JOB_S)
    assert word in str(caught.value), caught.value
