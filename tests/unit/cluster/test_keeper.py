"""The node's memory checkpoints: labelled, replicated, written, and given back; over real sockets on loopback."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any

import torch

from ftlab import messages
from ftlab.checkpoint.arena import Slot
from ftlab.checkpoint.saving import SaveOrder
from ftlab.checkpoint.storage import LocalStorage
from ftlab.checkpoint.tree import pack
from ftlab.cluster.keeper import OWN, Keeper
from ftlab.cluster.replicas import ReplicaServer, send_replica
from ftlab.train.ladder import Ladder, read_card
from tests.limits import SOON_S

TOKEN = "t" * 32


class Node:
    """A keeper, and a worker's slots in it."""

    def __init__(self, folder: Path, job: str = "j", token: str = TOKEN) -> None:
        self.keeper = Keeper("127.0.0.1", token)
        self.port, self.job = self.keeper.port, job
        self.slots = self.keeper.open(job, 0, {"directory": str(folder)})
        self.news: queue.SimpleQueue[messages.Message] = queue.SimpleQueue()

    def snapshot(self, step: int, value: float, world: int = 1, slot: int = 0) -> SaveOrder:
        filled = self.slots[slot].fill(pack({"w": torch.full((1000,), value)}))
        order = SaveOrder(step=step, tag="jg1", bytes=filled.bytes, header_bytes=filled.header_bytes, world=world,
                          taken=time.monotonic(), generation=1)
        self.keeper.keep(self.job, 0, slot, order, self.news.put)
        return order

    def hear(self) -> list[Any]:
        """All news up to the word that the slot is free."""
        found: list[Any] = [self.news.get(timeout=SOON_S)]
        while not isinstance(found[-1], messages.Saved):
            found.append(self.news.get(timeout=SOON_S))
        return found


def test_a_snapshot_is_labelled_and_written_and_its_slot_is_free_again(tmp_path):
    node = Node(tmp_path)
    node.snapshot(20, 2.0)
    *notes, saved = node.hear()
    assert saved.ok and saved.slot == 0 and node.keeper.busy("j", 0) == []
    assert [note.event for note in notes] == ["checkpoint.committed"]
    assert len(list(tmp_path.glob("step-0000000020-*/COMMIT"))) == 1
    ladder = Ladder(None, "j", [slot.fd for slot in node.slots], [])
    assert ladder.memory_step == 20 and Ladder(None, "other", [slot.fd for slot in node.slots], []).cards() == []


def test_a_slot_that_is_being_filled_again_holds_nothing(tmp_path):
    node = Node(tmp_path)
    node.snapshot(20, 2.0)
    node.hear()
    assert node.slots[0].card() is not None
    node.slots[0].fill(pack({"w": torch.zeros(1000)}))
    assert node.slots[0].card() is None, "its digest is not known yet"


def test_a_sharded_snapshot_is_replicated_to_the_buddy(tmp_path):
    node, buddy = Node(tmp_path), Node(tmp_path)
    node.keeper.buddy = messages.Buddy(address="127.0.0.1", port=buddy.port)
    node.keeper.ended(1)  # nobody else will save its shard: no use in waiting for it
    for step in (10, 20, 30):
        node.snapshot(step, float(step), world=2, slot=step // 10 % 2)
        replicated = next(note for note in node.hear() if getattr(note, "event", "") == "checkpoint.replicated")
        assert replicated.data["ok"]
    guests = [slot for slot in buddy.slots[OWN:] if slot.card()]
    assert sorted(slot.card()["step"] for slot in guests) == [20, 30], "the older one made room"
    newest = max(guests, key=lambda slot: slot.card()["step"])
    card = newest.card()
    assert torch.equal(read_card(card, newest.view(card["bytes"])).tensors[0], torch.full((1000,), 30.0))


def test_a_buddy_that_is_gone_costs_nothing_but_the_replica(tmp_path):
    node = Node(tmp_path)
    node.keeper.buddy = messages.Buddy(address="127.0.0.1", port=1)
    node.keeper.ended(1)
    node.snapshot(10, 1.0, world=2)
    events = {note.event: note.data for note in node.hear()[:-1]}
    assert events["checkpoint.replicated"]["ok"] is False and "shards" in events["checkpoint.failed"]["reason"]


def test_a_stranger_cannot_leave_a_replica_and_damage_is_not_labelled(tmp_path):
    wanted = Slot()
    server = ReplicaServer("127.0.0.1", TOKEN, lambda card: wanted)
    card = {"bytes": 4, "digest": "0" * 32, "taken": 1.0}
    assert not send_replica("127.0.0.1", server.port, "127.0.0.1", "wrong", card, memoryview(b"data"))
    assert not send_replica("127.0.0.1", server.port, "127.0.0.1", TOKEN, card, memoryview(b"data"))
    assert wanted.card() is None


def test_a_node_that_starts_over_forgets(tmp_path):
    node = Node(tmp_path)
    node.snapshot(20, 2.0)
    node.hear()
    node.keeper.drop()
    assert all(slot.card() is None for slot in node.slots)


def test_a_node_that_is_given_up_while_it_writes_commits_nothing_and_says_nothing(tmp_path, monkeypatch):
    node = Node(tmp_path)
    write = LocalStorage.write

    def given_up_after(storage: LocalStorage, folder: str, name: str, pieces: Any) -> None:
        write(storage, folder, name, pieces)
        node.keeper.drop()

    monkeypatch.setattr(LocalStorage, "write", given_up_after)
    node.snapshot(20, 2.0)
    (saved,) = node.hear()
    assert not saved.ok and list(tmp_path.glob("step-*")) == []


def test_the_node_of_rank_0_fences_earlier_generations_after_what_it_has_still_to_write_for_them(tmp_path):
    node = Node(tmp_path)
    node.snapshot(20, 2.0)
    node.keeper.take_over("j", 2)
    node.snapshot(30, 3.0, slot=1)  # the word of generation 1, too late
    assert [note.event for note in node.hear()[:-1]] == ["checkpoint.committed"]
    *notes, saved = node.hear()
    assert [(note.event, note.generation) for note in notes] == [("checkpoint.refused", 1)] and not saved.ok
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000020-jg1"]


def test_nothing_is_committed_before_earlier_generations_are_fenced(tmp_path):
    node = Node(tmp_path)
    (tmp_path / "fences").write_text("in the way")
    node.keeper.take_over("j", 1)
    node.snapshot(20, 2.0)
    *notes, saved = node.hear()
    assert [note.event for note in notes] == ["checkpoint.failed"] and "fences" in notes[0].data["reason"]
    assert not saved.ok and list(tmp_path.glob("step-*")) == []
    (tmp_path / "fences").unlink()
    node.snapshot(30, 3.0)
    assert [note.event for note in node.hear()[:-1]] == ["checkpoint.committed"] and (tmp_path / "fences/jg1").exists()


def test_memory_is_let_go_after_the_job(tmp_path):
    node = Node(tmp_path)
    node.snapshot(20, 2.0)
    node.keeper.release("j")
    node.hear()
    deadline = time.monotonic() + SOON_S
    while any(slot.fd >= 0 for slot in node.slots):
        assert time.monotonic() < deadline
        time.sleep(0.01)



def test_a_storage_problem_leaves_the_slot_free(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    node = Node(tmp_path / "file")
    node.snapshot(20, 2.0)
    *_, saved = node.hear()
    assert not saved.ok and node.keeper.busy("j", 0) == []
