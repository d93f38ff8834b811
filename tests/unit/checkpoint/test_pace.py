"""The pace of a save: moderate beside training, at once when somebody waits; never other bytes or another order."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from ftlab.checkpoint import pace
from ftlab.checkpoint.digest import PIECE
from ftlab.checkpoint.manager import CheckpointManager
from ftlab.checkpoint.pace import at_once, moderate
from ftlab.cluster.nodes import wait_until
from tests.limits import SOON_S

PIECES = [memoryview(bytes([number]) * 1000) for number in range(6)]


@pytest.fixture
def slow(monkeypatch):
    """A second for five pieces: far more than a machine needs to hand them out."""
    monkeypatch.setattr(pace, "RATE", 5000.0)


def test_every_piece_comes_once_and_in_order(slow):
    assert list(moderate(lambda: True)(PIECES)) == list(at_once(PIECES)) == PIECES


def test_nobody_waits_so_it_takes_its_time_and_does_not_rest_after_the_last(slow):
    begin = time.monotonic()
    assert len(list(moderate(lambda: False)(PIECES))) == 6
    assert time.monotonic() - begin >= 1.0
    assert next(moderate(lambda: False)(PIECES)) == PIECES[0]


def test_who_comes_later_and_waits_does_not_wait_for_the_pace(monkeypatch):
    monkeypatch.setattr(pace, "RATE", 1.0)  # a piece of 1000 bytes would rest for a quarter of an hour
    waiting = threading.Event()
    threading.Timer(0.1, waiting.set).start()
    assert list(moderate(waiting.is_set)(PIECES)) == PIECES


def test_a_save_that_is_waited_for_is_written_at_once_and_the_next_takes_its_time_again(tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "RATE", 1.0)  # at this pace the second of the three pieces would come in half a year
    state = {"model": {"weight": torch.zeros(10 << 20)}}

    def first_pieces_written() -> int:
        return sum(file.stat().st_size >= PIECE for file in tmp_path.glob("step-*/shard-*.bin"))

    with CheckpointManager(str(tmp_path)) as manager:
        for step in (1, 2):
            manager.save(state, step)
            assert wait_until(lambda wanted=step: first_pieces_written() == wanted, limit_s=30)
            assert len([entry for entry in manager.entries() if entry.good]) == step - 1  # nobody waits yet
            manager.wait(timeout=SOON_S)
            assert manager.entries()[0].step == step
