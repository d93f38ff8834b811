"""Who sends the state to whom, and the way of one parcel from rank to rank (over a loopback connection)."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError

import pytest
import torch
from torch.distributed import HashStore

from ftlab.checkpoint import tree
from ftlab.elastic import transfer
from ftlab.elastic.transfer import Parcel, TransferFailed, plan_transfers

WORLDS = [([0], 1), ([0], 2), ([3], 8), ([0], 7), ([0], 63), ([0, 1], 9), ([5, 2, 9], 20), (list(range(15)), 1)]


def rounds(holders: list[int], pairs: list[tuple[int, int]]) -> int:
    """Rounds that are needed when a rank does one transfer at a time and sends only what it already has."""
    free = dict.fromkeys(holders, 0)
    for sender, receiver in pairs:
        free[sender] = free[receiver] = free[sender] + 1
    return max(free.values(), default=0)


def cast(holders: list[int], count: int) -> list[int]:
    return [rank for rank in range(100) if rank not in holders][:count]


@pytest.mark.parametrize(("holders", "count"), WORLDS)
def test_every_receiver_is_sent_the_state_exactly_once(holders, count):
    receivers = cast(holders, count)
    assert sorted(receiver for _, receiver in plan_transfers(holders, receivers)) == sorted(receivers)


@pytest.mark.parametrize(("holders", "count"), WORLDS)
def test_nobody_sends_before_it_holds_the_state(holders, count):
    able = set(holders)
    for sender, receiver in plan_transfers(holders, cast(holders, count)):
        assert sender in able and receiver not in able
        able.add(receiver)


@pytest.mark.parametrize(("holders", "count"), WORLDS)
def test_the_number_of_rounds_is_the_logarithm_of_the_world(holders, count):
    pairs = plan_transfers(holders, cast(holders, count))
    assert rounds(holders, pairs) == math.ceil(math.log2((len(holders) + count) / len(holders)))


def test_one_replacement_takes_one_transfer_from_the_first_holder():
    assert plan_transfers([0, 1, 3], [2]) == [(0, 2)]


def test_replacements_are_fed_by_different_holders():
    pairs = plan_transfers([0, 1, 2], [3, 4, 5])
    assert len({sender for sender, _ in pairs}) == 3


def test_nobody_waits_where_all_hold_the_state():
    assert plan_transfers([0, 1, 2], []) == []


# ---- one parcel ----------------------------------------------------------------------------------------------------

STATE = {"w": torch.arange(300_000.0), "bias": torch.tensor(2.5), "none": torch.empty(0, 3),
         "flag": torch.tensor([True]), "half": torch.rand(7).to(torch.bfloat16),
         "strided": torch.arange(12.0).reshape(3, 4).t(), "step": 4}


class World:
    """A group as a transfer sees it."""

    def __init__(self) -> None:
        self.severed = False
        self.adopted: list[socket.socket] = []

    def adopt(self, sock: socket.socket) -> None:
        self.adopted.append(sock.dup())

    def sever(self) -> None:
        self.severed = True
        for sock in self.adopted:
            sock.shutdown(socket.SHUT_RDWR)


def parcel() -> Parcel:
    packed = tree.pack(STATE)
    return Parcel(tree.digest(STATE), packed.header, packed.tensors)


def exchange(make_tensors: Callable[[bytes], list[torch.Tensor]] = tree.empty_tensors, secrets: tuple[bytes, bytes] = (
        b"s", b"s"), here: World | None = None, there: World | None = None) -> Parcel:
    """Send a parcel from one thread to another; the sender's error if it has one, else the receiver's."""
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        sending = threads.submit(transfer.send, parcel(), "127.0.0.1", store, "key", secrets[0], here or World())
        receiving = threads.submit(transfer.receive, store, "key", secrets[1], there or World(), make_tensors)
        received = receiving.exception(30.0) or receiving.result()
        sent = sending.exception(30.0)
    if isinstance(received, BaseException):
        raise received
    if sent:
        raise sent
    return received


def test_a_parcel_arrives_bit_by_bit():
    got = exchange()
    arrived = tree.unpack(tree.Packed(got.header, list(got.tensors)))
    assert got.digest == tree.digest(STATE) == tree.digest(arrived)


def test_both_ends_can_be_cut_with_their_group():
    here, there = World(), World()
    exchange(here=here, there=there)
    assert len(here.adopted) == len(there.adopted) == 1


@pytest.mark.parametrize("secrets", [(b"right", b"wrong"), (b"wrong", b"right")])
def test_who_does_not_know_the_secret_gets_nothing(secrets):
    asked: list[bytes] = []
    with pytest.raises((AuthenticationError, OSError, EOFError)):
        exchange(lambda header: asked.append(header) or [], secrets)
    assert asked == [], "not even the header"


def test_a_sender_whose_receiver_never_comes_ends_with_its_generation():
    world = World()
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(transfer.send, parcel(), "127.0.0.1", HashStore(), "key", b"s", world)
        world.sever()
        with pytest.raises(TransferFailed, match="the generation ended"):
            sending.result(30.0)


@pytest.mark.parametrize("cut_by", ["sender", "receiver"])
def test_a_cut_in_mid_parcel_ends_the_wait_at_both_ends(cut_by):
    here, there, halfway = World(), World(), threading.Event()

    def make_tensors(header: bytes) -> list[torch.Tensor]:
        (here if cut_by == "sender" else there).sever()
        halfway.set()
        return [torch.empty(1 << 22)]  # more than the sender will ever send

    with pytest.raises((TransferFailed, OSError)):
        exchange(make_tensors, here=here, there=there)
    assert halfway.is_set()
