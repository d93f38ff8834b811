"""Training state: what is protected is captured, restored, fingerprinted, and rolled back together."""

from __future__ import annotations

import copy
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ftlab.checkpoint import tree
from ftlab.checkpoint.state import TrainingState, differences
from ftlab.errors import ConfigError


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


class Trainer:
    """Everything a job may protect, and a step that changes all of it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = small_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.extras: dict[str, Any] = {"best": 0.0, "seen": [], "average": torch.zeros(3)}
        self.generator = torch.Generator().manual_seed(seed)
        self.state = TrainingState()
        self.state.protect({"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
                            "scaler": self.scaler, "extras": self.extras, "generator": self.generator})

    def step(self) -> None:
        loss = self.scaler.scale(self.model(torch.rand(6, 4, generator=self.generator)).square().mean())
        loss.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.extras["seen"].append(self.state.step)
        self.extras["average"] += 1
        self.extras["best"] = float(loss.detach())
        self.state.commit()


@pytest.fixture(autouse=True)
def keep_generator():
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


def over_the_wire(captured: Any) -> Any:
    """A captured tree as it arrives at another rank."""
    packed = tree.pack(captured)
    arrived = tree.empty_tensors(packed.header)
    for slot, sent in zip(arrived, packed.tensors, strict=True):
        slot.copy_(sent)
    return tree.unpack(tree.Packed(packed.header, arrived))


def test_a_fresh_trainer_that_takes_over_is_the_same_bit_by_bit_and_stays_so():
    old, new = Trainer(seed=1), Trainer(seed=2)
    for _ in range(5):
        old.step()
    assert old.state.digest() != new.state.digest()
    new.state.restore(over_the_wire(old.state.capture()))
    assert new.state.digest() == old.state.digest() and new.state.step == 5
    for _ in range(3):
        old.step()
        new.step()
    assert new.state.digest() == old.state.digest()


def test_taking_over_replaces_a_past_of_ones_own():
    old, new = Trainer(seed=1), Trainer(seed=2)
    old.step()
    for _ in range(3):
        new.step()
    new.state.restore(over_the_wire(old.state.capture()))
    assert new.state.digest() == old.state.digest() and new.extras["seen"] == [0]


def test_gradients_in_the_middle_of_an_accumulation_travel_too():
    old, new = Trainer(seed=1), Trainer(seed=2)
    old.model(torch.ones(6, 4)).sum().backward()
    old.model[0].bias.grad = None
    new.state.restore(over_the_wire(old.state.capture()))
    assert new.state.digest() == old.state.digest()
    assert new.model[0].bias.grad is None and torch.equal(new.model[0].weight.grad, old.model[0].weight.grad)


@pytest.mark.parametrize("part", ["model", "optimizer", "scheduler", "scaler", "extras", "generator", "step", "grads"])
def test_every_part_counts_in_the_digest(part):
    trainer = Trainer(seed=1)
    trainer.step()
    before = trainer.state.digest()
    if part == "model":
        trainer.model[1].running_mean[0] += 1
    elif part == "optimizer":
        trainer.optimizer.state[trainer.model[0].weight]["exp_avg"].view(-1)[0] += 1
    elif part == "scheduler":
        trainer.scheduler.last_epoch += 1
    elif part == "scaler":
        trainer.scaler.update(64.0)
    elif part == "extras":
        trainer.extras["average"][1] += 1
    elif part == "generator":
        torch.rand(1, generator=trainer.generator)
    elif part == "step":
        trainer.state.step += 1
    else:
        trainer.model[0].weight.grad = torch.zeros(8, 4)
    assert trainer.state.digest() != before


# ---- mark and rollback ---------------------------------------------------------------------------------------------


def test_a_rollback_undoes_what_an_unfinished_step_changed():
    trainer = Trainer(seed=1)
    trainer.step()
    held = trainer.model[0].weight.grad = torch.ones(8, 4)
    for _ in range(3):
        trainer.state.mark()
        before = trainer.state.digest()
        trainer.model[0].weight.grad = None
        trainer.model(torch.rand(6, 4, generator=trainer.generator)).sum().backward()
        trainer.extras["seen"].append(99)
        trainer.extras["average"].mul_(7)
        trainer.extras["new"] = 1
        del trainer.extras["best"]
        trainer.scheduler.last_epoch += 1
        assert trainer.state.digest() != before
        trainer.state.rollback()
        assert trainer.state.digest() == before
        assert trainer.model[0].weight.grad is held and trainer.model[0].bias.grad is None


def test_batch_norm_changes_its_buffers_without_counting_versions():
    """The reason why these buffers are compared by value; if it fails, the comparison may go."""
    layer = nn.BatchNorm1d(8)
    version, before = layer.running_mean._version, layer.running_mean.clone()
    layer(torch.rand(6, 8))
    assert not torch.equal(layer.running_mean, before)
    assert layer.running_mean._version == version


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=None),
                                   nn.InstanceNorm1d(8, track_running_stats=True)], ids=lambda it: type(it).__name__)
def test_a_rollback_undoes_the_statistics_of_normalisation_layers(layer):
    state = TrainingState()
    state.protect({"model": layer})
    for _ in range(2):
        state.mark()
        before = copy.deepcopy(dict(layer.named_buffers()))
        layer(torch.rand(6, 8, 5))
        assert not torch.equal(layer.running_mean, before["running_mean"])
        state.rollback()
        assert all(torch.equal(value, before[name]) for name, value in layer.named_buffers())
        layer(torch.rand(6, 8, 5))  # a step that is committed


def test_a_rollback_undoes_buffers_that_were_written_in_place():
    model = small_model()
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    state = TrainingState()
    state.protect({"model": model})
    state.mark()
    model.count += 1
    state.rollback()
    assert model.count.tolist() == [0, 0, 0]
    model.count += 1
    state.mark()
    model.count += 1
    state.rollback()
    assert model.count.tolist() == [1, 1, 1], "back to the newest mark, not to the first"


class Averaging(nn.Module):
    """A layer that puts a new tensor in its buffer's place at every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("average", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.linear(x)


@pytest.mark.parametrize("make", [Averaging, lambda: nn.utils.spectral_norm(nn.Linear(2, 2))],
                         ids=["an average", "spectral norm"])
def test_a_rollback_undoes_buffers_that_were_put_in_anew(make):
    model, state = make(), TrainingState()
    state.protect({"model": model})
    state.mark()
    model(torch.ones(3, 2))
    state.commit()
    state.mark()
    before = state.digest()
    model(torch.ones(3, 2))
    assert state.digest() != before
    state.rollback()
    assert state.digest() == before


def test_a_rollback_goes_only_back_to_the_newest_mark_and_may_be_repeated():
    trainer = Trainer(seed=1)
    trainer.state.mark()
    trainer.step()
    trainer.state.mark()
    before = trainer.state.digest()
    trainer.extras["best"] = -1.0
    trainer.state.rollback()
    trainer.extras["best"] = -2.0
    trainer.extras["seen"].append(7)
    trainer.state.rollback()
    assert trainer.state.digest() == before


def test_a_rollback_after_the_commit_undoes_nothing():
    trainer = Trainer(seed=1)
    trainer.state.mark()
    trainer.step()
    before = trainer.state.digest()
    assert trainer.state.rollback() is True
    assert trainer.state.digest() == before and trainer.state.step == 1


def test_a_rollback_says_when_the_step_has_already_changed_parameters():
    trainer = Trainer(seed=1)
    trainer.state.mark()
    trainer.model(torch.rand(6, 4)).sum().backward()
    assert trainer.state.rollback() is True
    trainer.state.mark()
    trainer.model(torch.rand(6, 4)).sum().backward()
    trainer.optimizer.step()
    assert trainer.state.rollback() is False
    trainer.state.mark()
    assert trainer.state.rollback() is True, "the next mark starts anew"


def test_a_rollback_without_a_mark_does_nothing():
    trainer = Trainer(seed=1)
    before = trainer.state.digest()
    assert trainer.state.rollback() is True
    assert trainer.state.digest() == before and trainer.state.changed_buffers() == []


def test_only_changed_floating_point_buffers_are_agreed_on():
    trainer = Trainer(seed=1)
    trainer.state.mark()
    assert trainer.state.changed_buffers() == []
    trainer.model(torch.rand(6, 4))
    norm = trainer.model[1]
    assert [id(each) for each in trainer.state.changed_buffers()] == [id(norm.running_mean), id(norm.running_var)]
    trainer.state.reset_buffers()
    assert trainer.state.changed_buffers() == [] and norm.num_batches_tracked.item() == 0


# ---- what can be protected -----------------------------------------------------------------------------------------


class HalfWay:
    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("junk", [3, "model", None, [1], lambda: None, object(), HalfWay(), torch.ones(2), {1, 2}],
                         ids=lambda it: type(it).__name__)
def test_what_has_no_state_is_refused_by_name(junk):
    state = TrainingState()
    with pytest.raises(ConfigError, match=r"cannot protect thing=\w+: it has no state_dict") as refusal:
        state.protect({"thing": junk})
    assert "a module, an optimizer, a dict" in refusal.value.hint and "thing" not in state.parts


@pytest.mark.parametrize("value", [np.zeros(3), {1, 2}, Path("/x"), deque([1]), datetime(2020, 1, 1), torch.float32,
                                   torch.device("cpu"), slice(1)], ids=lambda it: type(it).__name__)
def test_a_dict_with_a_value_that_cannot_travel_is_refused_at_once(value):
    state = TrainingState()
    with pytest.raises(ConfigError, match=f"a {type(value).__name__} cannot be part of the training state"):
        state.protect({"extras": {"fine": 1, "odd": value}})
    assert "extras" not in state.parts


def test_numbers_of_numpy_in_a_dict_arrive_as_plain_ones():
    state, extras = TrainingState(), {"best": np.float64(0.5), "seen": np.int64(3)}
    state.protect({"extras": extras})
    state.restore(over_the_wire(state.capture()))
    assert extras == {"best": 0.5, "seen": 3} and [type(each) for each in extras.values()] == [float, int]


def test_anything_with_both_methods_can_be_protected():
    class Counter:
        value = 3

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, saved: dict[str, Any]) -> None:
            self.value = saved["value"]

    counter, state = Counter(), TrainingState()
    state.protect({"counter": counter})
    captured = state.capture()
    state.mark()
    counter.value = 9
    state.rollback()
    assert counter.value == 3
    counter.value = 9
    state.restore(captured)
    assert counter.value == 3


def test_parameters_come_once_in_order_and_only_if_they_are_trained():
    shared = nn.Linear(2, 2)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    state = TrainingState()
    state.protect({"model": nn.Sequential(shared, frozen), "again": shared})
    assert [id(each) for each in state.parameters()] == [id(shared.weight), id(shared.bias)]


# ---- signatures ----------------------------------------------------------------------------------------------------


def signature(model: nn.Module) -> list[list[Any]]:
    state = TrainingState()
    state.protect({"model": model, "extras": {"ignored": torch.ones(2)}})
    return state.signature()


def test_equal_models_have_equal_signatures_whatever_their_values():
    assert signature(small_model()) == signature(small_model())
    assert list(differences(signature(small_model()), signature(small_model()))) == []


def test_differences_name_the_tensor_and_both_sides():
    mine, theirs = nn.Linear(4, 2), nn.Linear(3, 2, bias=False).double()
    assert list(differences(signature(mine), signature(theirs))) == [
        "model.bias: (2,) float32 here, missing there",
        "model.weight: (2, 4) float32 here, (2, 3) float64 there",
    ]
