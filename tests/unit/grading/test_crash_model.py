"""The crash model and the digest, without any process."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch

from ftlab.grading.crash.disk import Choice, Disk
from ftlab.grading.crash.images import spread
from ftlab.grading.crash.operations import ROOT, Entry, Operation, Recording
from ftlab.grading.stage.canonical import digest

BEFORE = (Entry(path="", kind="directory", node=ROOT), Entry(path="a", kind="file", node=1, data=b"old old "))
OPERATIONS = (
    Operation(kind="create", node=2, path="b", parent=ROOT, name="b"),
    Operation(kind="write", node=2, path="b", data=b"12345678"),
    Operation(kind="rename", node=2, path="a", parent=ROOT, name="a", source="b", source_parent=ROOT, source_name="b"),
    Operation(kind="fsync", node=ROOT, covers=3),
    Operation(kind="fsync", node=2, path="a", covers=4),
)
DISK = Disk(Recording(BEFORE, OPERATIONS, ()))


@pytest.mark.parametrize("variant, content", [
    ("kept", b"12345678"), ("lost", b""), ("half", b"1234"), ("stale", b"\0" * 8), ("front", b"1234\0\0\0\0"),
    ("back", b"\0\0\0\x005678"), ("without 1", b""),
])
def test_bytes_that_were_not_synced_may_be_anything(variant, content):
    assert DISK.file(2, 3, Choice(data={2: variant})) == content


def test_bytes_that_were_synced_stay():
    assert DISK.file(2, 5, Choice(data={2: "lost"})) == b"12345678"


def test_an_overwritten_file_may_be_torn():
    write = Operation(kind="write", node=1, path="a", data=b"NEW NEW ")
    disk = Disk(Recording(BEFORE, (write,), ()))
    assert disk.file(1, 1, Choice(data={1: "front"})) == b"NEW old "
    assert disk.file(1, 1, Choice(data={1: "back"})) == b"old NEW "


def test_names_reach_the_disk_in_order_until_the_directory_is_synced():
    assert DISK.tree(3, Choice()) == {"a": 2}
    assert DISK.tree(3, Choice(cuts={ROOT: 2})) == {"a": 1, "b": 2}
    assert DISK.tree(3, Choice(cuts={ROOT: 0})) == {"a": 1}
    assert DISK.tree(4, Choice(cuts={ROOT: 0})) == {"a": 2}


def test_a_sync_covers_only_what_was_done_before_it_began():
    late = (*OPERATIONS[:2], Operation(kind="fsync", node=2, covers=1))
    assert Disk(Recording(BEFORE, late, ())).unsynced_data(3) == {2: [1]}


def test_a_recording_survives_its_journey():
    recording = Recording(BEFORE, OPERATIONS, BEFORE)
    assert Recording.from_json(recording.to_json()) == recording


def test_equal_values_have_equal_digests():
    assert digest({"a": 1, "b": {2, 3}}) == digest({"b": {3, 2}, "a": 1})
    assert digest([torch.ones(3)]) == digest([torch.ones(3)])
    assert digest(OrderedDict(a=torch.zeros(2))) == digest(OrderedDict(a=torch.zeros(2)))
    module = torch.nn.Linear(2, 2)
    assert digest(module) == digest(copy.deepcopy(module)) != digest(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("one, two", [
    ([1, 2], [2, 1]), ([1], (1,)), ("1", 1), ([[1], 2], [[1, 2]]), (torch.zeros(2), -torch.zeros(2)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)), ({"a": 1}, {"a": 2}), (b"a", "a"),
])
def test_different_values_have_different_digests(one, two):
    assert digest(one) != digest(two)


def test_a_value_inside_itself_has_a_digest():
    loop: list = [1]
    loop.append(loop)
    assert digest(loop)


def test_a_selection_is_even_and_keeps_the_ends():
    assert spread(list(range(10)), 4) == [0, 3, 6, 9]
    assert spread([1, 2], 4) == [1, 2] and spread([1, 2], 1) == [1] and spread([1, 2], 0) == []
