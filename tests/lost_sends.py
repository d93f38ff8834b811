"""How often does a survivor not come out of a DDP step after a peer was killed and its group was cut?

    python -m tests.lost_sends --seconds 120

Four processes train under DDP as fast as they can; one is killed at a random moment, the groups of the others are cut a
moment later, as a worker's link does it. gloo can lose a send whose peer leaves just as it begins, and then nothing
wakes the rank that waits for it (docs/recovery.md). Too rare for a test that must pass: a measurement, for whoever
changes `Group.sever`. The store lives in a process of its own, so that children are forked while nobody holds a lock.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import select
import signal
import threading
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

from ftlab.elastic.group import Group
from ftlab.membership import seat_nodes
from ftlab.train.worker import warm_up

RANKS = 4
PATIENCE_S = 1.5  # by then everybody is out, or never


def main() -> None:
    """Kill until the time is over, then tell how many survivors were stuck."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    mine, theirs = multiprocessing.Pipe()
    store = multiprocessing.get_context("spawn").Process(target=_host_store, args=(theirs,), daemon=True)
    store.start()
    warm_up()
    port, lots, kills, stuck = mine.recv(), random.Random(arguments.seed), 0, 0
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end:
        kills += 1
        stuck += _kill_one(kills, port, lots)
    print(f"{kills} kills, {stuck} of {kills * (RANKS - 1)} survivors did not come out of their step "
          f"(seed {arguments.seed})")
    store.kill()


def _host_store(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def _kill_one(generation: int, port: int, lots: random.Random) -> int:
    """One group, one kill; how many of the others were still stuck after a while."""
    ranks = [_fork(rank, generation, port) for rank in range(RANKS)]
    try:
        for _, _, news in ranks:
            assert _hears(news, 30.0), "the group did not form"
        time.sleep(lots.uniform(0.003, 0.03))
        pid, _, _ = victim = lots.choice(ranks)
        os.kill(pid, signal.SIGKILL)
        time.sleep(lots.choice([0.0, 0.002, 0.01, 0.03]))  # until the controller knows
        others = [each for each in ranks if each is not victim]
        for _, order, _ in others:
            os.write(order, b"cut")
        end = time.monotonic() + PATIENCE_S
        return sum(not _hears(news, end - time.monotonic()) for _, _, news in others)
    finally:
        for pid, order, news in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(order)
            os.close(news)


def _hears(news: int, seconds: float) -> bool:
    return bool(select.select([news], [], [], max(0.0, seconds))[0]) and bool(os.read(news, 1))


def _fork(rank: int, generation: int, port: int) -> tuple[int, int, int]:
    """A rank: its pid, where it is told to cut its group, and where it tells that it trains and that it is out."""
    listen, order = os.pipe()
    news, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _train(rank, generation, port, listen, tell)
        finally:
            signal.pause()
    os.close(listen)
    os.close(tell)
    return pid, order, news


def _train(rank: int, generation: int, port: int, listen: int, tell: int) -> None:
    table = seat_nodes(generation, [(f"node-{each}", f"127.0.9.{each + 2}") for each in range(RANKS)], 1)
    group = Group(table, rank, ("127.0.0.1", port))
    threading.Thread(target=_cut_when_told, args=(group, listen), daemon=True).start()
    with contextlib.suppress(Exception):  # whatever a broken group makes torch say
        group.open_store()
        group.connect()
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
        inputs = torch.randn(12, 64)
        os.write(tell, b"t")
        while True:
            ddp(inputs).square().mean().backward()
    os.write(tell, b"o")
    group.close()  # as a worker does: the sooner the others find its connections closed


def _cut_when_told(group: Group, listen: int) -> None:
    os.read(listen, 3)
    while True:
        with contextlib.suppress(OSError):
            group.sever()
        time.sleep(0.005)


if __name__ == "__main__":
    main()
