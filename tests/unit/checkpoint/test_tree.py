"""Trees of plain values and tensors: taken apart, put together, and fingerprinted."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict, deque
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftlab.checkpoint import tree
from ftlab.checkpoint.tree import Packed
from ftlab.errors import ConfigError


def same(left: Any, right: Any) -> bool:
    """Whether two trees hold the same bits in containers of the same kind."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and left.shape == right.shape \
            and bits(left) == bits(right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(*pair) for pair in zip(left, right, strict=True))
    return bool(left == right) or (left != left and right != right)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


TREES: dict[str, Any] = {
    "plain values": {"int": 3, "float": 0.1, "negative zero": -0.0, "nan": float("nan"), "inf": float("inf"),
                     "bool": True, "none": None, "text": "grüße", "bytes": b"\x00\xff", "big": 1 << 80},
    "whole numbers as keys": {0: {"step": torch.tensor(3.0)}, 1: {"step": torch.tensor(4.0)}, -5: None},
    "tuples in lists in dicts": {"betas": (0.9, (0.99, [torch.ones(2), ()]))},
    "empty containers": {"a": {}, "b": [], "c": ()},
    "scalar tensors": [torch.tensor(1.5), torch.tensor(7), torch.tensor(True)],
    "empty tensors": [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int16)],
    "booleans": torch.tensor([True, False, True]),
    "half precision": [torch.rand(5).to(torch.bfloat16), torch.rand(5).to(torch.float16)],
    "other types": [torch.arange(4, dtype=kind) for kind in (torch.int8, torch.uint8, torch.int64, torch.float64)]
                   + [torch.ones(2, dtype=torch.complex64)],
    "odd values": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    "not contiguous": torch.arange(12.0).reshape(3, 4).t()[::2],
    "a tensor alone": torch.rand(3, 3),
    "a number alone": 5,
    "keys that look like ours": {"__tensor__": 0, "dtype": "float32", "shape": [1], "tensor": torch.ones(1)},
    "the same tensor twice": [torch.zeros(2)] * 2,
}


@pytest.mark.parametrize("value", TREES.values(), ids=TREES.keys())
def test_a_tree_comes_back_as_it_was(value):
    assert same(tree.unpack(tree.pack(value)), value)


@pytest.mark.parametrize("value", TREES.values(), ids=TREES.keys())
def test_a_tree_survives_the_way_over_a_wire(value):
    packed = tree.pack(value)
    arrived = tree.empty_tensors(bytes(packed.header))
    assert [(each.shape, each.dtype) for each in arrived] == [(each.shape, each.dtype) for each in packed.tensors]
    for slot, sent in zip(arrived, packed.tensors, strict=True):
        slot.copy_(sent)
    again = tree.unpack(Packed(packed.header, arrived))
    assert same(again, value) and tree.digest(again) == tree.digest(value)


@pytest.mark.parametrize(("number", "plain"), [
    (np.float64(0.1), 0.1), (np.float32(0.5), 0.5), (np.int64(3), 3), (np.bool_(True), True), (np.str_("x"), "x"),
], ids=lambda it: type(it).__name__)
def test_numbers_of_numpy_travel_as_plain_ones(number, plain):
    (arrived,) = tree.unpack(tree.pack({"a": [number]}))["a"]
    assert arrived == plain and type(arrived) is type(plain)
    assert tree.digest({"a": [number]}) == tree.digest({"a": [plain]}), "both ends have the same digest"


UNFIT = [np.zeros(3), {1, 2}, frozenset(), Path("/x"), deque([1]), datetime(2020, 1, 1), torch.float32,
         torch.device("cpu"), np.dtype("float32"), slice(1), range(3), object(), len]


@pytest.mark.parametrize("value", UNFIT, ids=lambda it: type(it).__name__)
def test_what_cannot_travel_is_refused_by_its_kind_wherever_it_stands(value):
    for holder in (value, {"a": value}, {"a": [1, (2, value)]}):
        with pytest.raises(ConfigError, match=f"a {type(value).__name__} cannot be part of the training state") as no:
            tree.pack(holder)
        assert "torch.from_numpy" in no.value.hint


def test_packing_copies_no_tensor():
    weights = torch.ones(4)
    packed = tree.pack({"w": weights})
    assert packed.tensors[0].data_ptr() == weights.data_ptr()
    assert len(tree.pack({"w": torch.zeros(1 << 20)}).header) < 4096


def test_a_parameter_is_packed_as_its_values():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert tree.pack([parameter]).tensors[0].requires_grad is False


def test_the_digest_of_an_ordered_dict_is_that_of_a_dict_in_the_same_order():
    model = torch.nn.Linear(2, 2)
    assert isinstance(model.state_dict(), OrderedDict)
    assert tree.digest(model.state_dict()) == tree.digest(dict(model.state_dict()))


BASE = {"a": torch.tensor([1.0, 2.0, 3.0, 4.0]), "b": [1, 2.0, None, "x"], "c": {"d": True}}


def changed(**parts: Any) -> dict[str, Any]:
    return {**BASE, **parts}


CHANGES = {
    "one bit": changed(a=torch.tensor([1.0, 2.0, 3.0, 4.0]).view(torch.int32).bitwise_xor(
        torch.tensor([0, 0, 1, 0], dtype=torch.int32)).view(torch.float32)),
    "the type of a tensor": changed(a=BASE["a"].view(torch.int32)),
    "its shape": changed(a=BASE["a"].reshape(2, 2)),
    "a dimension of size one": changed(a=BASE["a"].reshape(4, 1)),
    "the sign of a zero": changed(a=torch.tensor([-0.0, 2.0, 3.0, 4.0])),
    "a name": {"A": BASE["a"], "b": BASE["b"], "c": BASE["c"]},
    "the order of names": {"b": BASE["b"], "a": BASE["a"], "c": BASE["c"]},
    "the order of a list": changed(b=[2.0, 1, None, "x"]),
    "a number's type": changed(b=[1.0, 2.0, None, "x"]),
    "True for 1": changed(b=[True, 2.0, None, "x"]),
    "a text for None": changed(b=[1, 2.0, "None", "x"]),
    "a value more": changed(b=[1, 2.0, None, "x", 0]),
    "a name more": changed(e=0),
    "a level more": changed(c={"d": {"d": True}}),
    "a key's type": changed(c={0: True}),
    "a text as key for a number": changed(c={"0": True}),
    "a tensor for its number": changed(b=[torch.tensor(1), 2.0, None, "x"]),
}


def test_the_digest_changes_with_everything_that_matters():
    digests = {name: tree.digest(value) for name, value in {"nothing": BASE, **CHANGES}.items()}
    assert digests["nothing"] == tree.digest(dict(BASE)) and len(digests["nothing"]) == 64
    first: dict[str, str] = {}
    for name, value in digests.items():
        assert value not in first, f"changing {name} looks like changing {first.get(value)}"
        first[value] = name


@pytest.mark.parametrize(("left", "right"), [
    ([1, 23], [12, 3]),
    ({1: 23}, {12: 3}),
    ({"a": [1], "b": 2}, {"a": [1, "b", 2]}),
    ({"a": [1], "b": 2}, None),
    ([1, 2], (1, 2)),
    ([[1], 2], [[1, 2]]),
    (["a", "b"], ["a' 'b"]),
    (["ab", "c"], ["a", "bc"]),
    ({"x": 1.5, "n": 12}, {"x": 1.51, "n": 2}),
], ids=repr)
def test_trees_that_read_alike_have_different_digests(left, right):
    assert tree.digest(left) != tree.digest(right)


def test_the_digest_reads_values_not_their_place_in_memory():
    strided = torch.arange(12.0).reshape(3, 4).t()
    assert tree.digest(strided) == tree.digest(strided.contiguous())


class Evil:
    """A pickle that writes a file when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_hostile_header_is_refused_and_runs_nothing(tmp_path):
    target = tmp_path / "pwned"
    saved = io.BytesIO()
    torch.save({"step": Evil(str(target))}, saved)
    for header in (saved.getvalue(), pickle.dumps(Evil(str(target)), protocol=2)):
        for read in (tree.empty_tensors, lambda raw: tree.unpack(Packed(raw, []))):
            with pytest.raises(pickle.UnpicklingError):
                read(header)
    assert not target.exists()
    pickle.loads(pickle.dumps(Evil(str(target))))
    assert target.exists(), "the header would have done it"
