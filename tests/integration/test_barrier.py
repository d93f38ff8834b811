"""The periodic barrier between real gloo processes: all arrive, one is stopped, some are dead, and who is named.

The store is hosted by a process of its own, unless a test is about the death of its host.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ftlab.elastic.barrier import PeriodicBarrier
from ftlab.errors import ConfigError, MissingRanks
from tests.unit.elastic.forks import Line, host_store, ranks, run, store_of_its_own

TIMEOUT_S = 2.0  # until the missing are named; whoever is there arrives much sooner, even on a busy machine
SLACK_S = 10.0  # for a busy machine


@pytest.fixture
def store() -> Iterator[int]:
    with store_of_its_own() as port:
        yield port


def join(rank: int, world: int, store: Any) -> None:
    """Become a rank of a gloo group, through a store or the port of one."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if isinstance(store, int):
        store = dist.TCPStore("127.0.0.1", store, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=world)


def attempt(check: Callable[[], object]) -> tuple[list[int], str, float] | None:
    """Whom a check misses, in what words, after how long; None if it misses nobody."""
    begin = time.monotonic()
    try:
        check()
    except MissingRanks as error:
        assert error.timeout_s > 0
        return error.ranks, str(error), time.monotonic() - begin
    return None


# ---- all are there -------------------------------------------------------------------------------------------------


def test_ranks_meet_every_so_many_batches_in_every_epoch(store):
    def work(rank: int, line: Line) -> list[tuple[int, int]]:
        join(rank, 3, store)
        barrier = PeriodicBarrier(every=10, timeout_s=30.0)
        return [(epoch, batch) for epoch in range(2) for batch in range(31) if barrier.check(batch)]

    assert run(work, 3) == [[(epoch, batch) for epoch in range(2) for batch in (10, 20, 30)]] * 3


def test_nobody_leaves_before_the_last_has_come(store):
    def work(rank: int, line: Line) -> tuple[float, float]:
        join(rank, 3, store)
        barrier = PeriodicBarrier(every=1, timeout_s=30.0)
        barrier.check(1)
        time.sleep(0.3 * rank)
        came = time.monotonic()
        barrier.check(2)
        return came, time.monotonic()

    came, left = zip(*run(work, 3), strict=True)
    assert max(came) <= min(left) and max(came) - min(came) > 0.2


def test_old_keys_are_removed(store):
    def work(rank: int, line: Line) -> None:
        join(rank, 3, store)
        barrier = PeriodicBarrier(every=1, timeout_s=30.0)
        for batch in range(1, 61):
            barrier.check(batch)
            if batch in (10, 60):
                dist.barrier()
                line.tell("met")
                line.hear()

    counts = []
    with ranks(work, 3) as lines:
        for _ in range(2):
            assert [line.hear() for line in lines] == ["met"] * 3
            counts.append(dist.TCPStore("127.0.0.1", store, wait_for_workers=False).num_keys())
            for line in lines:
                line.tell("go on")
        assert [line.result() for line in lines] == [None] * 3
    # what gloo keeps itself is the same both times but for the keys of its own barrier
    assert counts[1] - counts[0] <= 3, f"{counts[0]} keys after 10 rounds, {counts[1]} after 60"


def test_barriers_can_stand_side_by_side_and_meet_through_any_store(store, tmp_path):
    def work(rank: int, line: Line) -> int:
        join(rank, 2, store)
        first, second = PeriodicBarrier(every=2, timeout_s=30.0), PeriodicBarrier(every=3, timeout_s=30.0)
        own = PeriodicBarrier(every=5, timeout_s=30.0, store=dist.FileStore(str(tmp_path / "store"), 2))
        return sum(barrier.check(batch) for batch in range(31) for barrier in (first, second, own))

    assert run(work, 2) == [15 + 10 + 6] * 2


def test_who_came_to_one_barrier_has_not_come_to_another(store):
    def work(rank: int, line: Line) -> Any:
        join(rank, 2, store)
        first, second = (PeriodicBarrier(every=1, timeout_s=TIMEOUT_S) for _ in range(2))
        met = first.check(1)
        return met, attempt(lambda: second.check(1))[0] if rank == 0 else line.hear()

    with ranks(work, 2) as lines:
        assert lines[0].result() == (True, [1])
        lines[1].tell("done")
        assert lines[1].result() == (True, "done")


def test_a_world_of_one_meets_itself():
    def work(rank: int, line: Line) -> bool:
        join(rank, 1, dist.HashStore())
        return PeriodicBarrier(every=1).check(1)

    assert run(work, 1) == [True]


# ---- some are not --------------------------------------------------------------------------------------------------


def test_a_stopped_rank_is_named_by_all_others_and_learns_it_when_it_goes_on(store):
    def work(rank: int, line: Line) -> Any:
        join(rank, 3, store)
        barrier = PeriodicBarrier(every=10, timeout_s=TIMEOUT_S)
        barrier.check(10)
        line.tell(os.getpid())
        line.hear()
        missed = attempt(lambda: barrier.check(20))
        line.tell("noticed")
        line.hear()
        return missed, barrier.check(30)

    with ranks(work, 3) as lines:
        pids = [line.hear() for line in lines]
        os.kill(pids[1], signal.SIGSTOP)
        for line in lines:
            line.tell("go on")
        assert [lines[rank].hear() for rank in (0, 2)] == ["noticed"] * 2
        os.kill(pids[1], signal.SIGCONT)
        assert lines[1].hear() == "noticed"
        for line in lines:
            line.tell("again")
        missed, again = zip(*[line.result() for line in lines], strict=True)
    assert [named for named, _, _ in missed] == [[1]] * 3
    assert again == (True,) * 3, "ranks that all know may meet again"
    for _, words, took in (missed[0], missed[2]):
        assert TIMEOUT_S - 0.1 < took < TIMEOUT_S + SLACK_S
        assert "rank 1 of 3 did not come to the barrier at batch 20 within 2 s" in words and "2/3 ranks" in words
        assert "too late" not in words
    assert "this rank is one of them: it came too late" in missed[1][1]


@pytest.mark.parametrize("dead", [[0], [3], [0, 2]])
def test_dead_ranks_are_named_by_every_survivor(store, dead):
    def work(rank: int, line: Line) -> Any:
        join(rank, 4, store)
        barrier = PeriodicBarrier(every=1, timeout_s=TIMEOUT_S)
        barrier.check(1)
        if rank in dead:
            os.kill(os.getpid(), signal.SIGKILL)
        return attempt(lambda: barrier.check(2))

    with ranks(work, 4) as lines:
        missed = [lines[rank].result() for rank in range(4) if rank not in dead]
    assert [named for named, _, _ in missed] == [dead] * (4 - len(dead))
    assert all(took < TIMEOUT_S + SLACK_S for _, _, took in missed)


def test_a_rank_that_comes_at_the_deadline_is_judged_alike_by_all(store):
    draw = random.Random(11)
    edge = [draw.uniform(-0.01, 0.01) for _ in range(20)]
    timeout_s, delays = 0.15, [-0.15, 0.1, *edge, -0.15, 0.1, -0.15, 0.1]  # around the deadline, and clearly not

    def work(rank: int, line: Line) -> list[list[int] | None]:
        join(rank, 3, store)
        barrier, meeting = PeriodicBarrier(every=1, timeout_s=timeout_s), PeriodicBarrier(every=1, timeout_s=30.0)
        found = []
        for batch, delay in enumerate(delays, start=1):
            meeting.check(batch)
            if rank == 2:
                time.sleep(timeout_s + delay)
            missed = attempt(lambda batch=batch: barrier.check(batch))
            found.append(missed[0] if missed else None)
        return found

    first, *others = run(work, 3)
    assert others == [first] * 2
    assert None in first and [2] in first, f"it was too late in some rounds and not in others (seed 11): {first}"


def test_the_members_of_a_subgroup_are_named_by_their_numbers_in_the_world(store):
    def work(rank: int, line: Line) -> Any:
        join(rank, 4, store)
        odd = dist.new_group([1, 3])
        dist.barrier()  # all are connected: to one who still connects, the death below would be its own failure
        if rank not in (1, 3):
            with pytest.raises((ConfigError, ValueError)):
                PeriodicBarrier(every=1, group=odd)
            return line.hear()
        barrier = PeriodicBarrier(every=1, timeout_s=TIMEOUT_S, group=odd)
        met = barrier.check(1)
        if rank == 3:
            os._exit(1)
        return met, attempt(lambda: barrier.check(2))[0]

    with ranks(work, 4) as lines:
        assert lines[1].result() == (True, [3])
        for rank in (0, 2):
            lines[rank].tell("done")
            assert lines[rank].result() == "done"


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_when_the_host_of_the_store_is_gone_nobody_is_named_and_nobody_waits_for_ever(fate):
    def work(rank: int, line: Line) -> Any:
        if rank == 0:
            kept, port = host_store()
            line.tell((os.getpid(), port))
        join(rank, 3, kept if rank == 0 else line.hear())
        barrier = PeriodicBarrier(every=1, timeout_s=TIMEOUT_S)
        barrier.check(1)
        torch.distributed.barrier()  # the store has nothing left to do for the others
        if rank == 0:
            line.tell("met")
            line.hear()
        line.hear()
        return attempt(lambda: barrier.check(2))

    with ranks(work, 3) as lines:
        pid, port = lines[0].hear()
        for line in lines[1:]:
            line.tell(port)
        assert lines[0].hear() == "met"
        os.kill(pid, fate)
        try:
            for line in lines[1:]:
                line.tell("go on")
            missed = [line.result() for line in lines[1:]]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert [named for named, _, _ in missed] == [[], []]
    assert all("the store through which ranks meet is gone" in words and took < TIMEOUT_S + SLACK_S
               for _, words, took in missed)


# ---- what cannot work ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "message"), [
    ({"every": 0}, "every must be at least 1"), ({"timeout_s": 0}, "timeout_s must be positive"),
    ({}, "there is no process group"),
])
def test_a_barrier_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PeriodicBarrier(**settings)
