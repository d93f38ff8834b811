"""A real gloo group that is cut from another thread and built again in the same process.

The store is hosted by a process of its own, as the controller hosts it: no rank is special.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ftlab.elastic import group as group_module
from ftlab.elastic.group import Group, GroupSevered
from ftlab.membership import seat_nodes
from tests.unit.elastic.forks import host_store, ranks, run, store_of_its_own, wait_until


@pytest.fixture
def store() -> Iterator[tuple[str, int]]:
    with store_of_its_own() as port:
        yield "127.0.0.1", port


def build(generation: int, rank: int, world: int, store: tuple[str, int]) -> Group:
    table = seat_nodes(generation, [(f"node-{number}", "127.0.0.1") for number in range(world)], 1)
    group = Group(table, rank, store)
    group.open_store()
    group.connect()
    return group


def add_up(rank: int) -> float:
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return total.item()


@contextlib.contextmanager
def severing(group: Group, after: float = 0.0) -> Iterator[None]:
    """Another thread cuts the group again and again, as the worker's link does, until the block has noticed."""
    noticed = threading.Event()

    def cut() -> None:
        noticed.wait(after)
        while not noticed.is_set():
            group.sever()
            noticed.wait(0.005)

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield
    finally:
        noticed.set()
        thread.join()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    return here, there


def talks(here: socket.socket, there: socket.socket) -> bool:
    here.sendall(b"ping")
    there.settimeout(10.0)
    return there.recv(4) == b"ping"


def test_a_blocked_rank_is_cut_loose_and_builds_the_next_generation_in_the_same_process(store):
    def work(rank, line):
        pid, group = os.getpid(), build(1, rank, 2, store)
        first = add_up(rank)
        if rank == 0:
            with severing(group, after=0.05), pytest.raises(RuntimeError):
                add_up(rank)  # the other rank never comes
            with pytest.raises(RuntimeError):
                add_up(rank)  # nor does a later call work
            line.tell("severed")
        else:
            line.hear()
        assert group.broken()
        group.close()
        group.close()
        second = build(2, rank, 2, store)
        assert not second.broken() and os.getpid() == pid
        return first, add_up(rank)

    with ranks(work, 2) as lines:
        assert lines[0].hear() == "severed"
        lines[1].tell("go on")
        assert [line.result() for line in lines] == [(3.0, 3.0)] * 2


def test_a_group_is_whole_until_a_peer_dies(store):
    def work(rank, line):
        group = build(1, rank, 3, store)
        add_up(rank)
        line.tell(group.broken())
        line.hear()
        if rank == 2:
            os._exit(1)
        wait_until(group.broken, "the loss of a peer is seen")
        return group.severed

    with ranks(work, 3) as lines:
        assert [line.hear() for line in lines] == [False] * 3
        lines[2].tell("die")
        for line in lines[:2]:
            line.tell("look")
            assert line.result() is False


def test_the_death_of_the_stores_process_is_not_the_loss_of_a_peer():
    def keep_store(rank, line):
        kept, port = host_store()
        line.tell((os.getpid(), port))
        return line.hear(), kept.timeout

    def work(rank, line):
        group = build(1, rank, 2, ("127.0.0.1", port))
        add_up(rank)
        line.tell(group.broken())
        line.hear()
        return add_up(rank), group.broken()

    with ranks(keep_store, 1) as (keeper,):
        pid, port = keeper.hear()
        with ranks(work, 2) as lines:
            assert [line.hear() for line in lines] == [False, False]
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            for line in lines:
                line.tell("go on")
            assert [line.result() for line in lines] == [(3.0, False)] * 2


def test_sockets_of_others_survive_a_cut(store):
    def work(rank, line):
        before = tcp_pair()
        group = build(1, rank, 2, store)
        after = tcp_pair()
        add_up(rank)
        if rank == 0:
            with severing(group), pytest.raises(RuntimeError):
                add_up(rank)
        else:
            wait_until(group.broken, "the cut is seen at the other end")
        return talks(*before), talks(*after), talks(*before[::-1])

    assert run(work, 2) == [(True, True, True)] * 2


def test_a_connection_that_the_group_adopted_is_cut_with_it(store):
    def work(rank, line):
        group = build(1, 0, 1, store)
        here, there = tcp_pair()
        group.adopt(here)
        assert talks(here, there) and not group.broken()
        group.sever()
        there.settimeout(10.0)
        assert there.recv(1) == b"", "the other end sees the end"
        late, _ = tcp_pair()
        with pytest.raises(GroupSevered):
            group.adopt(late)
        return True

    assert run(work, 1) == [True]


def test_a_group_that_waits_for_a_member_that_never_comes_can_be_cut(store):
    def work(rank, line):
        table = seat_nodes(1, [("node-0", "127.0.0.1"), ("node-1", "127.0.0.1")], 1)
        group = Group(table, 0, store)
        group.open_store()
        with severing(group, after=0.05), pytest.raises(GroupSevered, match="generation 1 is over"):
            group.connect()
        assert group.broken()
        group.close()
        build(2, 0, 1, store)
        return add_up(0)

    assert run(work, 1) == [1.0]


def test_a_group_that_waits_for_a_store_whose_controller_died_can_be_cut(store):
    def work(rank, line):
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        group = Group(seat_nodes(1, [("node-0", "127.0.0.1")], 1), 0, ("127.0.0.1", port))
        with severing(group, after=0.05), pytest.raises(GroupSevered, match="generation 1 is over"):
            group.open_store()
        group.close()
        build(2, 0, 1, store)
        return add_up(0)

    assert run(work, 1) == [1.0]


def test_a_group_that_was_cut_before_it_began_does_not_begin(store):
    def work(rank, line):
        group = Group(seat_nodes(1, [("node-0", "127.0.0.1")], 1), 0, store)
        group.sever()
        with pytest.raises(GroupSevered):
            group.open_store()
        return group.broken()

    assert run(work, 1) == [True]


def test_those_whose_build_failed_and_those_who_are_new_meet_in_the_next_generation(store):
    def work(rank, line):
        if rank == 0:
            group = Group(seat_nodes(1, [("node-0", "127.0.0.1"), ("node-9", "127.0.0.1")], 1), 0, store)
            group.open_store()
            with severing(group, after=0.02), pytest.raises(GroupSevered):
                group.connect()
            group.close()
        build(2, rank, 2, store)
        return add_up(rank)

    assert run(work, 2) == [3.0, 3.0]


def test_a_group_that_cannot_be_taken_apart_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(group_module, "_buried", [])
    begun, release, ended = threading.Event(), threading.Event(), []

    class Stuck:
        def __del__(self):
            begun.set()
            ended.append(release.wait(5))

    group_module._bury(Stuck())
    assert not begun.is_set(), "somebody may still hold on to the group that was left last"
    group_module._bury(object())
    assert begun.wait(10) and not ended, "leaving the next group waited for the one before"
    release.set()
