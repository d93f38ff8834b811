"""Going back to where a step began: what a mark remembers, what only a copy does, and what differs afterwards."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from ftlab.checkpoint.fingerprint import STRIPES, combined, fingerprints, leaves, same_bits
from ftlab.checkpoint.state import TrainingState, check_optimizers
from ftlab.checkpoint.state_copy import StateCopy
from ftlab.errors import ConfigError


def made(**more: object) -> tuple[TrainingState, nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = TrainingState()
    state.protect({"model": model, "optimizer": optimizer, **more})
    return state, model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_hyper_parameters_go_back_with_the_scheduler_that_changed_them():
    state, _, optimizer = made()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state.protect({"scheduler": scheduler})
    state.mark()
    optimizer.step()
    scheduler.step()
    optimizer.param_groups[0]["weight_decay"] = 0.7
    optimizer.param_groups[0]["note"] = 1
    assert state.rollback()
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], "note" in group, scheduler.last_epoch) == (0.1, 0, False, 0)


def test_a_group_that_an_unfinished_step_added_is_gone_and_one_that_was_committed_travels():
    state, _, optimizer = made()
    extra = nn.Linear(2, 2)
    state.protect({"extra": extra})
    state.mark()
    optimizer.add_param_group({"params": extra.parameters(), "lr": 0.5})
    assert state.rollback() and len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": extra.parameters(), "lr": 0.5})
    other, _, there = made()
    other.protect({"extra": nn.Linear(2, 2)})
    other.restore(state.capture())
    assert [(len(group["params"]), group["lr"]) for group in there.param_groups] == [(4, 0.1), (2, 0.5)]
    assert other.digest() == state.digest()


def test_frozen_and_unfrozen_layers_go_back_and_travel():
    state, model, _ = made()
    model[0].requires_grad_(False)
    state.mark()
    model[0].requires_grad_(True)
    assert state.rollback() and not model[0].weight.requires_grad
    other, there, _ = made()
    other.restore(state.capture())
    assert not there[0].weight.requires_grad and there[1].weight.requires_grad


def test_changed_parameters_cannot_be_undone_by_a_mark_and_can_by_a_copy():
    state, model, optimizer = made()
    train(model, optimizer)
    before = state.digest()
    state.mark()
    train(model, optimizer)
    assert not state.rollback()
    state.copying = True
    state.mark()
    begun = state.digest()
    train(model, optimizer)
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    assert state.rollback() and state.digest() == begun != before


def test_a_kept_copy_stays_where_it_was_taken_until_it_is_let_go():
    state, model, optimizer = made()
    begun, _ = state.digest(), state.keep_copy()
    for _ in range(3):
        state.mark()
        train(model, optimizer)
        assert state.rollback() and state.digest() == begun
    state.let_go()
    state.mark()
    train(model, optimizer)
    assert not state.rollback()


def test_a_copy_names_what_differs():
    state, model, _ = made()
    copy = StateCopy()
    copy.take(state)
    assert copy.differences(state) == []
    model[1].bias.data[0] += 1
    assert copy.differences(state) == ["model.1.bias"]


def test_buffers_that_are_in_no_state_dict_travel():
    state, model, _ = made()
    model[0].register_buffer("seen", torch.zeros(1), persistent=False)
    model[0].seen += 3
    other, there, _ = made()
    there[0].register_buffer("seen", torch.zeros(1), persistent=False)
    other.restore(state.capture())
    assert float(there[0].seen) == 3.0


@pytest.mark.parametrize(("make", "draw"), [
    (lambda: torch.Generator().manual_seed(1), lambda each: torch.rand(1, generator=each).item()),
    (lambda: np.random.default_rng(1), lambda each: each.normal()),
    (lambda: np.random.Generator(np.random.MT19937(1)), lambda each: each.normal()),
    (lambda: np.random.Generator(np.random.Philox(1)), lambda each: each.normal()),
    (lambda: np.random.RandomState(1), lambda each: each.normal()),
    (lambda: random.Random(1), lambda each: each.gauss(0, 1)),
], ids=["torch", "PCG64", "MT19937", "Philox", "RandomState", "Random"])
def test_random_generators_go_back_and_travel(make, draw):
    generator = make()
    state, _, _ = made(generator=generator)
    draw(generator)
    state.mark()
    captured, first = state.capture(), [draw(generator) for _ in range(5)]
    assert state.rollback() and [draw(generator) for _ in range(5)] == first
    other = make()
    there, _, _ = made(generator=other)
    there.restore(captured)
    assert [draw(other) for _ in range(5)] == first


def test_tensors_in_a_dict_are_loaded_in_place():
    extras = {"average": torch.zeros(2), "count": 1}
    held = extras["average"]
    state, _, _ = made(extras=extras)
    state.mark()
    held += 5
    extras["count"] = 2
    extras["new"] = "x"
    assert state.rollback() and extras["average"] is held
    assert held.tolist() == [0, 0] and list(extras) == ["average", "count"] and extras["count"] == 1


def test_an_optimizer_of_another_model_is_refused():
    state, _, _ = made()
    state.protect({"second": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)})
    with pytest.raises(ConfigError, match="second trains 2 tensors that belong to no protected module"):
        check_optimizers(state)


def test_a_stripe_of_every_large_tensor_is_looked_at_and_all_stripes_see_everything():
    tensor = torch.zeros(1 << 20)
    before = [fingerprints({"a": tensor}, stripe) for stripe in range(STRIPES)]
    tensor[77_777] = 1
    after = [fingerprints({"a": tensor}, stripe) for stripe in range(STRIPES)]
    assert sum(combined(one) != combined(other) for one, other in zip(before, after, strict=True)) == 1
    assert fingerprints({"a": tensor}) != fingerprints({"a": torch.zeros(1 << 20)})


def test_bits_are_compared_and_not_values():
    nan = torch.tensor(torch.nan)
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0)) and same_bits(nan, nan.clone())
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64)) and not same_bits(1, 1.0)
    found = [path for path, _ in leaves({"parts": {"model": {"w": 1}}, "grads": [2, None]})]
    assert found == ["model.w", "grads.0", "grads.1"]


def test_iterators_follow_a_loader_that_is_put_back():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = stateful.StatefulDataLoader(list(range(12)), batch_size=2, shuffle=True,
                                         generator=torch.Generator().manual_seed(4))
    state, _, _ = made(loader=loader)
    batches = iter(loader)
    next(batches)
    state.mark()
    first = [next(batches).tolist() for _ in range(3)]
    assert state.rollback() and [next(batches).tolist() for _ in range(3)] == first
    assert state.rollback() and len(list(batches)) == 5


def test_an_iterator_that_was_made_before_is_refused():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = stateful.StatefulDataLoader(list(range(12)), batch_size=2)
    next(iter(loader))
    with pytest.raises(ConfigError, match=r"made before ctx\.protect"):
        made(loader=loader)


def test_a_step_that_was_taken_back_from_a_copy_can_be_undone_again_without_it():
    state, model, optimizer = made()
    state.keep_copy()
    state.mark()
    train(model, optimizer)
    assert state.rollback()
    state.let_go()
    assert state.rollback() and not state.touched()
