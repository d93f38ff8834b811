"""Shipping a train function: what cannot travel is named."""

from __future__ import annotations

import functools
import threading
from typing import Any

import cloudpickle
import pytest

from ftlab.cluster import shipping
from ftlab.cluster.shipping import ship
from ftlab.errors import NotPicklable


def from_a_notebook(source: str, **names: Any) -> Any:
    """`train` as if it was written in a cell: its globals travel with it."""
    cell = {"__name__": "__main__", **names}
    exec(source, cell)
    return cell["train"]


def test_a_train_function_from_a_cell_arrives_with_what_it_uses():
    train = from_a_notebook("def helper(x): return x * scale\ndef train(ctx, y, *, z=1): return helper(ctx) + y + z",
                            scale=10)
    function, args, kwargs, policy, manager = cloudpickle.loads(ship(train, (2,), {"z": 3}))
    assert policy is None and manager is None
    assert function(1, *args, **kwargs) == 15


def test_an_unpicklable_closure_variable_is_named():
    lock = threading.Lock()

    def train(ctx):
        return lock

    with pytest.raises(NotPicklable, match=r"uses 'lock' \(a lock\), which cannot be sent") as refusal:
        ship(train)
    assert refusal.value.name == "lock" and "inside the train function" in refusal.value.hint


def test_an_unpicklable_global_is_named():
    train = from_a_notebook("def train(ctx): return size + len(guard.__class__.__name__)", guard=threading.Lock(),
                            size=3)
    with pytest.raises(NotPicklable, match="'guard'"):
        ship(train)


def test_an_unpicklable_default_is_named():
    def train(ctx, fine=1, lock=threading.Lock()):  # noqa: B008
        return lock

    with pytest.raises(NotPicklable, match="'default of lock'"):
        ship(train)


@pytest.mark.parametrize(("args", "kwargs", "name"), [
    ((1, threading.Lock()), {}, "argument 1"), ((), {"fine": 1, "lock": threading.Lock()}, "lock"),
])
def test_an_unpicklable_argument_is_named(args, kwargs, name):
    with pytest.raises(NotPicklable) as refusal:
        ship(lambda ctx, *args, **kwargs: None, args, kwargs)
    assert refusal.value.name == name


def test_an_unpicklable_argument_of_a_partial_is_refused():
    def train(ctx, lock):
        return lock

    with pytest.raises(NotPicklable, match="cannot be sent"):
        ship(functools.partial(train, lock=threading.Lock()))


def test_what_has_no_name_is_refused_all_the_same():
    class Train:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, ctx: Any) -> None:
            pass

    with pytest.raises(NotPicklable, match="cannot be sent to the nodes"):
        ship(Train())


@pytest.mark.parametrize("junk", [None, 3, "train", ["train"]])
def test_what_cannot_be_called_is_refused(junk):
    with pytest.raises(NotPicklable, match=f"must be callable, got {type(junk).__name__}"):
        ship(junk)


def test_what_is_too_large_is_refused_and_the_heaviest_is_named(monkeypatch):
    monkeypatch.setattr(shipping, "MAX_CODE_BYTES", 1 << 20)
    dataset, small = b"x" * (3 << 20), b"y" * 100

    def train(ctx):
        return dataset, small

    with pytest.raises(NotPicklable, match="carries 3 MB with it, the limit is 1 MB") as refusal:
        ship(train)
    assert refusal.value.seen.startswith("dataset: 3 MB")
