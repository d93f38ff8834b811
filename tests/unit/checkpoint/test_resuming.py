"""Exact resume: stopped anywhere and built anew, a run ends with the same bits as one that was never stopped."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ftlab.checkpoint.manager import CheckpointManager
from tests import groups
from tests.conftest import require

STEPS = 14  # of batches; every third closes an accumulation, every fifth an epoch


@pytest.fixture(autouse=True)
def keep_generators_and_threads() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny models: a second thread only waits for the first
    yield
    torch.set_num_threads(threads)
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@functools.cache
def undisturbed() -> str:
    run = groups.Everything(seed=1)
    run.train(until=STEPS)
    return run.digest()


@pytest.mark.parametrize("cut", range(1, STEPS))
def test_a_run_stopped_after_any_batch_goes_on_with_the_same_bits(tmp_path, cut):
    first = groups.Everything(seed=1)
    with CheckpointManager(str(tmp_path)) as manager:
        first.train(until=cut)
        manager.save(first.state, cut)
        first.train(until=STEPS)  # goes on, as if nothing had been saved
    assert first.digest() == undisturbed(), "saving changes nothing"
    second = groups.Everything(seed=99)  # other weights, other random numbers, a past of its own
    second.train(until=4)
    with CheckpointManager(str(tmp_path)) as manager:
        manifest = manager.load_latest(second.state)
    assert manifest is not None and manifest.step == cut == second.progress["step"]
    second.train(until=STEPS)
    assert second.digest() == undisturbed()


def test_a_run_may_be_stopped_many_times(tmp_path):
    run = groups.Everything(seed=1)
    for cut in (1, 4, 5, 8, 11):
        run.train(until=cut)
        with CheckpointManager(str(tmp_path)) as manager:
            manager.save(run.state, cut, wait=True)
            run = groups.Everything(seed=cut + 50)
            manager.load_latest(run.state)
    run.train(until=STEPS)
    assert run.digest() == undisturbed()


def test_a_new_process_goes_on_with_the_same_bits(tmp_path):
    first = groups.Everything(seed=1)
    first.train(until=7)
    with CheckpointManager(str(tmp_path / "run")) as manager:
        manager.save(first.state, 7, epoch=first.progress["epoch"])
    child = groups.start(groups.resume_everything, str(tmp_path / "run"), STEPS, str(tmp_path / "digest"))
    child.join(groups.GROUP_S)
    assert child.exitcode == 0
    assert (tmp_path / "digest").read_text() == f"7 {undisturbed()}"


def test_gradients_of_an_unfinished_accumulation_are_part_of_it(tmp_path):
    first, second = groups.Everything(seed=1), groups.Everything(seed=2)
    first.train(until=4)  # one batch into the second accumulation
    grads = [parameter.grad.clone() for parameter in first.model.parameters()]
    assert any(grad.abs().sum() > 0 for grad in grads)
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(first.state, 4, wait=True)
        manager.load_latest(second.state)
    for parameter, grad in zip(second.model.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)


def test_loading_twice_is_loading_once_and_what_is_loaded_is_nobody_elses(tmp_path):
    first = groups.Everything(seed=1)
    first.train(until=4)
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(first.state, 4, wait=True)
        second, third = groups.Everything(seed=2), groups.Everything(seed=3)
        manager.load_latest(second.state)
        manager.load_latest(third.state)
        third.train(until=9)
        manager.load_latest(third.state)
    third.train(until=STEPS)
    assert third.digest() == undisturbed()
    with CheckpointManager(str(tmp_path)) as manager:
        manager.load_latest(second.state)
    second.train(until=STEPS)
    assert second.digest() == undisturbed(), "the third did not train in the second's memory"


def test_the_next_random_numbers_are_the_same(tmp_path):
    with CheckpointManager(str(tmp_path)) as manager:
        random.gauss(0, 1), np.random.randn()  # both keep a second number for later
        manager.save({"notes": {}}, 1, wait=True)
        after = random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(3).tolist()
        random.seed(9), np.random.seed(9), torch.manual_seed(9)
        manager.load_latest({"notes": {}})
        assert after == (random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(),
                         torch.rand(3).tolist())


# ---- a loader in the middle of an epoch


class Squares(torch.utils.data.Dataset):
    """Numbers whose square a model learns."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(index) ** 2])


class Epochs:
    """A model fed by a StatefulDataLoader over two epochs; `seen` holds the ids of every batch."""

    def __init__(self, seed: int, workers: int, own_generator: bool) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(seed) if own_generator else None
        self.loader = StatefulDataLoader(Squares(), batch_size=5, shuffle=True, num_workers=workers,
                                         generator=generator)
        self.progress: dict[str, Any] = {"step": 0, "epoch": 0, "seen": []}
        self.state = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader,
                      "progress": self.progress, **({"generator": generator} if generator else {})}

    def train(self, save: Any = None, stop: int = 10**9) -> None:
        while self.progress["epoch"] < 2:
            for batch in self.loader:
                loss = (self.model(batch[:, :1] / 40) - batch[:, 1:] / 1600).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.progress["step"] += 1
                self.progress["seen"].append(batch[:, 0].tolist())
                if save is not None:
                    save(self.state, self.progress["step"])
                if self.progress["step"] == stop:
                    return
            self.progress["epoch"] += 1

    def result(self) -> tuple[list[Any], list[Any]]:
        return self.progress["seen"], [parameter.tolist() for parameter in self.model.parameters()]


@pytest.mark.parametrize("own_generator", [True, False], ids=["own generator", "global generator"])
@pytest.mark.parametrize(("workers", "cuts"), [(0, (1, 4, 7, 8, 13)), (2, (3, 11))])
def test_a_stateful_loader_goes_on_in_the_middle_of_an_epoch(tmp_path, workers, cuts, own_generator):
    try:
        import torchdata  # noqa: F401
    except ImportError:
        require("torchdata", False, "torchdata is not installed")
    twin = Epochs(1, workers, own_generator)
    with CheckpointManager(str(tmp_path), keep_last_n=99) as manager:
        twin.train(save=manager.save)
    seen, weights = twin.result()
    first, second = ([number for batch in epoch for number in batch] for epoch in (seen[:8], seen[8:]))
    assert sorted(first) == sorted(second) == list(range(40)) and first != second
    for cut in cuts:
        run = Epochs(77, workers, own_generator)
        with CheckpointManager(str(tmp_path)) as manager:
            manager.load(run.state, cut)
        run.train()
        assert run.result()[0] == seen, f"cut at {cut}: each sample once, in the same order"
        assert run.result()[1] == weights, f"cut at {cut}: the same bits"
