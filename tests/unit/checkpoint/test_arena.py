"""The memory tier: what is copied into a slot is what comes out of it, whatever happens to the tensors meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ftlab.checkpoint import arena, tree
from ftlab.checkpoint.arena import Filled, Slot

BIG = (17 << 20) // 4  # floats of a state that two threads copy


@pytest.fixture
def slot() -> Iterator[Slot]:
    slot = Slot()
    yield slot
    slot.close()


def read_back(slot: Slot, filled: Filled) -> Any:
    """The tree a slot holds: tensors, each at the next multiple of 64 bytes, then the header."""
    raw = torch.frombuffer(bytearray(slot.view(filled.bytes)), dtype=torch.uint8)
    header = raw[filled.bytes - filled.header_bytes:].numpy().tobytes()
    start, tensors = 0, []
    for wanted in tree.slots(header):
        tensors.append(raw[start:start + wanted.bytes].clone().view(wanted.dtype).view(wanted.shape))
        start += -(-wanted.bytes // 64) * 64
    assert start + filled.header_bytes == filled.bytes
    return tree.unpack(tree.Packed(header, tensors))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values, where torch keeps only a note that they are to be conjugated or negated."""
    return tensor.detach().resolve_conj().resolve_neg()


TENSORS = {
    "float32": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)),
    "bfloat16": torch.arange(7).to(torch.bfloat16),
    "float8": torch.arange(9.0).to(torch.float8_e4m3fn),
    "float64 with nan": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float64),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(-4, 4),
    "complex": torch.complex(torch.arange(4.0), -torch.arange(4.0)),
    "conjugate": torch.complex(torch.arange(4.0), torch.arange(4.0)).conj(),
    "negated": torch.complex(torch.arange(4.0), torch.arange(4.0)).conj().imag,
    "one number": torch.tensor(3.5),
    "nothing": torch.empty(0, 3),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "strided": torch.arange(20.0)[::3],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 6),
    "with gradient": torch.nn.Parameter(torch.ones(4)),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_every_kind_of_tensor_comes_out_as_it_went_in(slot, kind):
    values = {"before": torch.ones(3), "it": TENSORS[kind], "after": torch.full((5,), 7)}
    found = read_back(slot, slot.fill(tree.pack(values)))
    assert found["it"].dtype == values["it"].dtype
    assert tree.digest(found) == tree.digest({**values, "it": plain(values["it"])})


def test_tensors_of_all_kinds_lie_beside_each_other_without_touching(slot):
    found = read_back(slot, slot.fill(tree.pack(TENSORS)))
    assert tree.digest(found) == tree.digest({kind: plain(tensor) for kind, tensor in TENSORS.items()})


def test_a_state_without_tensors_fits_too(slot):
    assert read_back(slot, slot.fill(tree.pack({"step": 3}))) == {"step": 3}


def test_a_slot_follows_a_state_that_grows_shrinks_and_changes_its_shapes(slot):
    for sizes in ([10], [10, 2000], [3], [100_000, 1], [2000, 10], [10, 2000], []):
        values = {"step": len(sizes), "tensors": [torch.randn(size) for size in sizes]}
        assert tree.digest(read_back(slot, slot.fill(tree.pack(values)))) == tree.digest(values)


def test_changes_after_the_fill_do_not_reach_the_slot(slot):
    weight = torch.randn(1000)
    before = weight.clone()
    filled = slot.fill(tree.pack({"weight": weight}))
    weight.add_(1)
    assert torch.equal(read_back(slot, filled)["weight"], before)


def test_large_states_copied_by_two_threads_are_the_same_bits(slot):
    values = {"large": torch.randn(BIG), "strided": torch.randn(600, 1000).t(), "small": [torch.randn(9)] * 40}
    for _ in range(3):
        values["large"].mul_(1.5)
        assert tree.digest(read_back(slot, slot.fill(tree.pack(values)))) == tree.digest(values)
    assert not [thread for thread in threading.enumerate() if thread.name == "ftlab-copy"]


def test_a_copy_that_fails_in_the_second_thread_is_not_taken_for_a_snapshot(slot, monkeypatch):
    work = arena._work

    def fail_beside(jobs: Any) -> None:
        if threading.current_thread().name.startswith("ftlab-copy"):
            raise RuntimeError("the device is gone")
        work(jobs)

    monkeypatch.setattr(arena, "_work", fail_beside)
    monkeypatch.setattr(threading, "excepthook", lambda *args: None)
    with pytest.raises(RuntimeError, match="the device is gone"):
        slot.fill(tree.pack({"large": torch.randn(BIG)}))


def test_a_tensor_without_values_is_refused_whichever_thread_meets_it(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda *args: None)
    values = {"many": [torch.ones(1000)] * 200, "meta": torch.empty(5, device="meta"), "large": torch.ones(BIG)}
    for _ in range(10):
        slot = Slot()
        with pytest.raises((NotImplementedError, RuntimeError)):
            slot.fill(tree.pack(values))
        slot.close()


def test_who_has_mapped_the_same_memory_sees_the_snapshot(slot):
    other = Slot(os.dup(slot.fd))
    try:
        for size in (10, 50_000):  # it grows under the other's feet
            values = {"weight": torch.randn(size)}
            filled = slot.fill(tree.pack(values))
            assert tree.digest(read_back(other, filled)) == tree.digest(values)
    finally:
        other.close()


def test_the_view_ends_with_the_snapshot_even_if_the_slot_once_held_more(slot):
    slot.fill(tree.pack({"weight": torch.randn(50_000)}))
    filled = slot.fill(tree.pack({"weight": torch.ones(1)}))
    assert len(slot.view(filled.bytes)) == filled.bytes < 3000


def held(fd: int) -> int:
    """The descriptors of this process that lead to the same memory."""
    inode = os.fstat(fd).st_ino
    return sum(os.fstat(int(each)).st_ino == inode for each in os.listdir("/proc/self/fd") if is_open(int(each)))


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_closed_slot_leaves_no_descriptor_and_no_name_behind():
    names = set(os.listdir("/dev/shm"))
    slot = Slot()
    slot.fill(tree.pack({"weight": torch.ones(1000)}))
    assert set(os.listdir("/dev/shm")) <= names, "the memory has no name"
    spy = os.dup(slot.fd)
    assert held(spy) > 1
    slot.close()
    slot.close()
    assert held(spy) == 1, "only the spy's"
    os.close(spy)


def room(slot: Slot) -> int:
    """Bytes that the kernel has given for it."""
    return os.fstat(slot.fd).st_blocks * 512


def ended(name: str) -> None:
    """Wait for a thread's end."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(30)


def test_memory_that_was_asked_for_ahead_is_there_when_the_snapshot_is_taken(slot):
    packed = tree.pack({"big": torch.arange(BIG, dtype=torch.float32)})
    other = Slot()
    arena.make_room([slot, other], packed)
    ended("ftlab-room")
    before = room(slot)
    assert before > 4 * BIG and room(other) > 4 * BIG
    filled = slot.fill(packed)
    assert room(slot) == before, "nothing more was needed"
    assert torch.equal(read_back(slot, filled)["big"], packed.tensors[0])
    other.close()


def test_a_small_state_is_not_worth_a_thread_and_a_closed_slot_gets_no_memory(slot):
    before = room(slot)
    arena.make_room([slot], tree.pack({"small": torch.zeros(100)}))
    assert room(slot) == before and "ftlab-room" not in {thread.name for thread in threading.enumerate()}
    slot.close()
    slot.prepare(8 << 20)
    assert slot.fd == -1


def test_who_fills_a_slot_whose_memory_is_just_coming_waits_for_it(slot):
    packed = tree.pack({"big": torch.arange(BIG, dtype=torch.float32)})
    with slot._lock:  # as the thread that gets the memory holds it
        filling = threading.Thread(target=slot.fill, args=(packed,))
        filling.start()
        filling.join(0.05)
        assert filling.is_alive() and room(slot) < 4 * BIG
    filling.join(30)
    assert room(slot) > 4 * BIG
