"""NaN, Inf and spikes: what is called bad, what is not, and that every rank calls the same."""

from __future__ import annotations

import json
import math
import random
import statistics

import numpy as np
import pytest
import torch
from torch import nn

from ftlab.config import HealthConfig
from ftlab.errors import HealthError
from ftlab.health.numbers import NumberWatch, check_loss, gradient_norm

NAN, INF = math.nan, math.inf
SPIKES = HealthConfig(loss_spike=6.0, grad_spike=10.0, history=50, settle=10)


def watch(losses=(), norms=(), config: HealthConfig = SPIKES) -> NumberWatch:
    made = NumberWatch(config)
    for loss in losses:
        made.accept(loss, None)
    for norm in norms:
        made.accept(None, norm)
    return made


def noisy(count: int, middle: float, spread: float, seed: int = 7) -> list[float]:
    draw = random.Random(seed)
    return [middle + draw.uniform(-spread, spread) for _ in range(count)]


# ---- NaN and Inf ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "norm", "reason"), [
    (NAN, 1.0, "the loss is NaN"), (INF, 1.0, "the loss is Inf"), (-INF, 1.0, "the loss is -Inf"),
    (1.0, NAN, "the gradient norm is NaN"), (1.0, INF, "the gradient norm is Inf"),
    (None, NAN, "the gradient norm is NaN"), (NAN, None, "the loss is NaN"),
    (1.0, 1.0, ""), (None, None, ""), (-3.0, 0.0, ""), (1e300, 1e300, ""),
])
def test_numbers_that_are_none_are_named(loss, norm, reason):
    assert NumberWatch(HealthConfig()).judge(loss, norm) == reason


def test_nothing_is_said_about_them_when_numbers_are_not_looked_at():
    quiet = watch([1.0] * 20, [1.0] * 20, HealthConfig(numbers=False, loss_spike=6.0, grad_spike=6.0))
    assert quiet.judge(NAN, INF) == quiet.judge(INF, NAN) == ""
    assert "deviations above" in quiet.judge(100.0, 1.0), "but spikes are"


def test_they_never_become_part_of_what_is_usual():
    history = watch(noisy(20, 1.0, 0.2))
    before = history.state_dict()
    for odd in (NAN, INF, -INF):
        history.accept(odd, odd)
    assert history.state_dict() == before


# ---- spikes --------------------------------------------------------------------------------------------------------


def test_a_spike_is_described_with_what_is_usual():
    reason = watch(norms=[1.0, 3.0] * 10).judge(0.5, 31.652)
    assert reason == "the gradient norm 31.65 is 20 deviations above its usual 2 ± 1.5"


@pytest.mark.parametrize(("loss", "bad"), [(1.0, False), (1.15, False), (1.6, False), (2.0, True), (4.0, True),
                                           (1e30, True), (0.0, False), (-100.0, False)])
def test_only_what_is_far_above_the_usual_is_a_spike(loss, bad):
    assert bool(watch(noisy(50, 1.0, 0.2)).judge(loss, None)) is bad


@pytest.mark.parametrize("steps", [0, 1, 9])
def test_nothing_is_a_spike_before_it_is_known_what_is_usual(steps):
    assert watch([1.0] * steps).judge(1e9, None) == ""


def test_spikes_are_looked_for_from_the_settled_step_on():
    assert watch([1.0] * 10).judge(1e9, None)


def test_without_a_threshold_nothing_is_looked_at_or_kept():
    plain = watch([1.0] * 50, [1.0] * 50, HealthConfig())
    assert plain.judge(1e9, 1e9) == "" and plain.state_dict() == {"loss": [], "norm": []}


@pytest.mark.parametrize("usual", [0.0, 1e-9, 0.3, 7.0, -7.0, 1e12])
def test_a_constant_history_does_not_make_every_change_a_spike(usual):
    constant = watch([usual] * 50)
    assert constant.judge(usual + 0.05 * abs(usual), None) == ""
    assert constant.judge(usual + abs(usual) + 1.0, None), "but a large one is"


def test_one_wild_step_that_was_accepted_does_not_hide_the_next():
    history = watch([*noisy(30, 1.0, 0.2), 1e6])
    assert history.judge(1e3, None)


def test_what_is_usual_follows_the_training():
    falling = watch([10.0 * 0.97 ** step for step in range(200)])
    assert falling.judge(10.0, None), "the first loss would be a spike now"


def test_the_history_is_bounded():
    history = watch([float(step) for step in range(1000)])
    assert history.state_dict()["loss"] == [float(step) for step in range(950, 1000)]


def test_the_decision_is_that_of_the_definition_at_every_step():
    """The running order of values and the shortcut must not change what median and deviation say."""
    draw, history, kept = random.Random(3), NumberWatch(SPIKES), []
    verdicts = []
    for _ in range(600):
        value = round(draw.choice([draw.gauss(2.0, 0.3), draw.expovariate(0.4), 2.0]), 1)  # many are equal
        verdict = bool(history.judge(value, None))
        if len(kept) >= 10:
            middle = statistics.median(kept)
            spread = statistics.median(abs(each - middle) for each in kept)
            deviation = max(1.4826 * spread, 0.05 * abs(middle), 1e-6)
            assert verdict is (value - middle > 6.0 * deviation), (value, kept)
        verdicts.append(verdict)
        if not verdict:
            history.accept(value, None)
            kept = [*kept, value][-50:]
    assert 5 < sum(verdicts) < 300


def test_a_replacement_that_was_sent_the_history_decides_as_its_predecessor():
    old, new = watch(noisy(70, 3.0, 1.0), noisy(70, 0.2, 0.1)), NumberWatch(SPIKES)
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    for loss, norm in zip(noisy(200, 5.0, 20.0, seed=1), noisy(200, 0.5, 2.0, seed=2), strict=True):
        assert new.judge(loss, norm) == old.judge(loss, norm)
        if not old.judge(loss, norm):
            old.accept(loss, norm)
            new.accept(loss, norm)
    assert new.state_dict() == old.state_dict()


def test_a_longer_history_from_elsewhere_is_cut_to_the_newest():
    short = NumberWatch(HealthConfig(loss_spike=6.0, history=10))
    short.load_state_dict({"loss": [float(step) for step in range(30)], "norm": []})
    short.accept(30.0, None)
    assert short.state_dict()["loss"] == [float(step) for step in range(21, 31)]


# ---- what is a loss ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [0.5, np.float32(0.5), np.float64(0.5), torch.tensor(0.5), torch.tensor([0.5]),
                                  torch.tensor([[0.5]], dtype=torch.bfloat16), torch.tensor(0.5, requires_grad=True)])
def test_one_floating_point_number_is_a_loss(loss):
    value = check_loss(loss)
    assert value == 0.5 and type(value) is float


@pytest.mark.parametrize("loss", [NAN, torch.tensor(NAN)])
def test_a_bad_loss_is_a_loss(loss):
    assert math.isnan(check_loss(loss))


@pytest.mark.parametrize(("loss", "what", "hint"), [
    (torch.rand(4), "float32 with shape [4]", "take loss.mean()"),
    (torch.rand(2, 3), "shape [2, 3]", "take loss.mean()"),
    (torch.rand(0), "shape [0]", "was the batch empty?"),
    (torch.tensor(3), "int64 with shape []", "a loss that counts has no gradient"),
    (torch.tensor(True), "bool with shape []", "a loss that counts has no gradient"),
    (torch.tensor(1j), "complex64", "loss.abs()"),
    (torch.empty((), device="meta"), "on the meta device", "on a real device"),
    (3, "the int 3", "a loss that counts has no gradient"),
    (True, "the bool True", "a loss that counts has no gradient"),
    (np.int64(3), "the int64", "a loss that counts has no gradient"),
    ("0.5", "a str", "give a float or a scalar tensor"),
    (None, "a NoneType", "give a float or a scalar tensor"),
    ({"loss": 0.5}, "a dict", "give a float or a scalar tensor"),
    (np.array([0.5, 0.5]), "a ndarray", "give a float or a scalar tensor"),
])
def test_anything_else_is_refused_with_what_to_do(loss, what, hint):
    with pytest.raises(HealthError) as refusal:
        check_loss(loss)
    assert what in refusal.value.message and hint in refusal.value.hint and what in refusal.value.got


# ---- the norm of gradients -----------------------------------------------------------------------------------------


def test_the_norm_is_that_of_all_gradients_together():
    assert gradient_norm([torch.full((2, 2), 2.0), None, torch.tensor([3.0])]) == pytest.approx(5.0)
    assert gradient_norm(torch.tensor([3.0, 4.0])) == pytest.approx(5.0)
    assert gradient_norm(iter([torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)])) == pytest.approx(5.0)


@pytest.mark.parametrize("gradients", [[], [None, None], [torch.empty(0)], [torch.zeros(3)]])
def test_without_gradients_the_norm_is_zero(gradients):
    assert gradient_norm(gradients) == 0.0


@pytest.mark.parametrize(("values", "norm"), [
    ([[1.0], [NAN]], NAN), ([[1.0], [INF]], INF), ([[1.0], [-INF]], INF), ([[INF, NAN]], NAN), ([[NAN], [INF]], NAN),
    ([[INF], [NAN]], NAN), ([[1e38], [NAN]], NAN), ([[3e38], []], 3e38),
])
def test_one_bad_number_anywhere_shows_in_the_norm(values, norm):
    assert gradient_norm([torch.tensor(each) for each in values]) == pytest.approx(norm, nan_ok=True)


@pytest.mark.parametrize(("gradients", "norm"), [
    ([torch.full((4,), 3e38)], 6e38),
    ([torch.full((4,), 1e25), torch.full((5,), 1e25)], 3e25),
    ([torch.full((10_000,), 6e4, dtype=torch.float16)], 6e6),
    ([torch.full((4,), 1e200, dtype=torch.float64), torch.ones(3), torch.empty(0)], 2e200),
    ([torch.full((4,), 1.7e308, dtype=torch.float64)], 1.7976931348623157e308),
])
def test_a_large_gradient_whose_squares_overflow_is_not_called_inf(gradients, norm):
    assert gradient_norm(gradients) == pytest.approx(norm, rel=1e-3)


def test_sparse_gradients_count_as_well():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert table.weight.grad.is_sparse
    assert gradient_norm([table.weight.grad]) == pytest.approx(math.sqrt(2 * 2 ** 2 + 2))


def test_parameters_are_not_taken_for_gradients():
    model = nn.Linear(2, 2)
    with pytest.raises(HealthError, match="parameters, not gradients") as refusal:
        gradient_norm(model.parameters())
    assert "p.grad" in refusal.value.hint


def test_gradients_that_can_be_differentiated_again_are_gradients():
    x = torch.tensor(3.0, requires_grad=True)
    (slope,) = torch.autograd.grad(x * x, x, create_graph=True)
    assert gradient_norm([slope]) == pytest.approx(6.0)
