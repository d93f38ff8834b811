"""Train functions as people really write them. Each must end in the same bits whatever breaks in its way.

`RIGHT` are the loops that survive; `WRONG` are those that cannot, each with the error that says so within the first
steps. A loop that once ended silently wrong stays here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

STEPS = 24
RIGHT: dict[str, Callable[..., Any]] = {}
WRONG: dict[str, tuple[Callable[..., Any], str, str]] = {}  # the loop, the error's class, a word of its text
BATCH = 24


def right(loop: Callable[..., Any]) -> Callable[..., Any]:
    RIGHT[loop.__name__] = loop
    return loop


def wrong(error: str, word: str) -> Callable[..., Any]:
    def keep(loop: Callable[..., Any]) -> Callable[..., Any]:
        WRONG[loop.__name__] = (loop, error, word)
        return loop
    return keep


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(192, 16, generator=generator), torch.randint(0, 4, (192,), generator=generator)


def net(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), *middle, nn.ReLU(), nn.Linear(32, 4))


class Task:
    """Model, optimizer and data of a loop; `loss(step)` is that of this rank's samples."""

    def __init__(self, ctx: Any, model: nn.Module | None = None, make: Any = torch.optim.Adam, **options: Any) -> None:
        self.ctx = ctx
        self.model = model if model is not None else net()
        self.optimizer = make(self.model.parameters(), **{"lr": 1e-2, **options})
        self.x, self.y = data()
        self.ids = ctx.sampler(len(self.x), global_batch=BATCH, seed=5)
        self.used: Any = self.model

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.003)
        ids = self.ids.indices(step)
        return self.x[ids], self.y[ids]

    def loss(self, step: int) -> torch.Tensor:
        x, y = self.batch(step)
        return F.cross_entropy(self.used(x), y)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


# ---- schedulers and hyper-parameters ---------------------------------------------------------------------------


@right
def plain(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()


@right
def scheduler_below_the_block(ctx: Any) -> None:
    task = Task(ctx)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(task.optimizer, 0.9)
    ctx.protect(model=task.model, optimizer=task.optimizer, scheduler=scheduler)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()
        scheduler.step()


@right
def scheduler_first_in_the_block(ctx: Any) -> None:
    task = Task(ctx)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(task.optimizer, 0.9)
    ctx.protect(model=task.model, optimizer=task.optimizer, scheduler=scheduler)
    for step in ctx.steps(STEPS):
        with ctx.step():
            scheduler.step()
            ctx.backward(task.loss(step))
            task.update()


@right
def warm_up_by_hand(ctx: Any) -> None:
    task = Task(ctx, make=torch.optim.SGD, momentum=0.9)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        for group in task.optimizer.param_groups:
            group["lr"] *= 1.05
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()


@right
def rate_as_a_tensor(ctx: Any) -> None:
    task = Task(ctx, lr=torch.tensor(1e-2))
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            task.optimizer.param_groups[0]["lr"].mul_(0.95)
            ctx.backward(task.loss(step))
            task.update()


@right
def plateau_scheduler(ctx: Any) -> None:
    task = Task(ctx)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(task.optimizer, patience=1, factor=0.7)
    ctx.protect(model=task.model, optimizer=task.optimizer, scheduler=scheduler)
    for step in ctx.steps(STEPS):
        with ctx.step():
            loss = task.loss(step)
            ctx.backward(loss)
            task.update()
            shared = loss.detach().clone()
            dist.all_reduce(shared)
        scheduler.step(float(shared))


@right
def optimizer_below_the_block(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
        task.update()


@right
def clipped(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            nn.utils.clip_grad_norm_(task.model.parameters(), 0.5)
            task.update()


@right
def scaled(ctx: Any) -> None:
    task = Task(ctx)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=5)
    ctx.protect(model=task.model, optimizer=task.optimizer, scaler=scaler)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(scaler.scale(task.loss(step)))
            scaler.step(task.optimizer)
            scaler.update()
            task.optimizer.zero_grad()


@right
def epochs_with_a_scheduler_between(ctx: Any) -> None:
    """Several loops; a replacement runs through those that are over, and must not do again what lies between them."""
    task = Task(ctx)
    scheduler = torch.optim.lr_scheduler.StepLR(task.optimizer, 1, 0.7)
    ctx.protect(model=task.model, optimizer=task.optimizer, scheduler=scheduler)
    for epoch in range(6):
        for step in ctx.steps(4 * (epoch + 1)):
            with ctx.step():
                ctx.backward(task.loss(step))
                task.update()
        scheduler.step()


@right
def weights_changed_between_epochs(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for epoch in range(8):
        for step in ctx.steps(3 * (epoch + 1)):
            with ctx.step():
                ctx.backward(task.loss(step))
                task.update()
        for parameter in task.model.parameters():
            parameter.data.mul_(0.99)
        if epoch == 2:
            task.optimizer.state.clear()


@right
def checks_below_that_the_block_was_done(ctx: Any) -> None:
    """Code below the block counts on what the block has done; after a step that failed it raises."""
    task = Task(ctx)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(task.optimizer, 0.9)
    ctx.protect(model=task.model, optimizer=task.optimizer, scheduler=scheduler)
    for step in ctx.steps(STEPS):
        losses = []
        with ctx.step():
            loss = task.loss(step)
            ctx.backward(loss)
            task.update()
            losses.append(float(loss.detach()))
        ctx.note = losses[0]  # an IndexError
        scheduler.step()


@right
def zeroes_gradients_first(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        loss = task.loss(step)  # outside of the block
        with ctx.step():
            task.optimizer.zero_grad(set_to_none=False)
            ctx.backward(loss)
            task.optimizer.step()


# ---- collectives that fail, or come where one does not expect them ---------------------------------------------


@right
def skips_what_raises(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            loss = task.loss(step)
            try:
                ctx.backward(loss)
            except RuntimeError:
                task.optimizer.zero_grad()
                continue
            task.update()


@right
def skips_whatever_raises_and_counts_it(ctx: Any) -> None:
    task = Task(ctx)
    counts = {"bad": 0}
    ctx.protect(model=task.model, optimizer=task.optimizer, counts=counts)
    for step in ctx.steps(STEPS):
        with ctx.step():
            try:
                ctx.backward(task.loss(step))
                task.update()
            except Exception:
                counts["bad"] += 1


@right
def metric_after_the_update(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            loss = task.loss(step)
            ctx.backward(loss)
            task.update()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            ctx.report(loss=mean / ctx.world_size)


@right
def metric_that_may_fail(ctx: Any) -> None:
    """A reduced metric decides on the learning rate; its own failures are caught."""
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            loss = task.loss(step)
            ctx.backward(loss)
            task.update()
            mean = loss.detach().clone()
            try:
                dist.all_reduce(mean)
            except RuntimeError:
                mean = torch.tensor(99.0)
            task.optimizer.param_groups[0]["lr"] = 1e-2 / (1.0 + float(mean))


@right
def barrier_at_the_end(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()
            dist.barrier()


@right
def two_optimizers_in_turn(ctx: Any) -> None:
    """A GAN: parameters change between two collectives of one step."""
    task = Task(ctx)
    torch.manual_seed(2)
    maker = nn.Linear(8, 16)
    second = torch.optim.Adam(maker.parameters(), lr=1e-2)
    ctx.protect(judge=task.model, maker=maker, first=task.optimizer, second=second)
    for step in ctx.steps(STEPS):
        with ctx.step():
            x, y = task.batch(step)
            fake = maker(torch.randn(len(x), 8))
            ctx.backward(F.cross_entropy(task.model(x), y) + F.cross_entropy(task.model(fake.detach()), 0 * y))
            task.optimizer.step()
            task.optimizer.zero_grad()
            second.zero_grad()
            ctx.backward(F.cross_entropy(task.model(maker(torch.randn(len(x), 8))), y))
            second.step()
            second.zero_grad()
            task.optimizer.zero_grad()


@right
def closure_that_is_called_again(ctx: Any) -> None:
    task = Task(ctx, make=torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=3)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(12):
        with ctx.step():
            x, y = task.batch(step)

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                task.optimizer.zero_grad()
                loss = F.cross_entropy(task.model(x), y)
                ctx.backward(loss)
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                return mean

            task.optimizer.step(closure)
            task.optimizer.zero_grad()


@right
def updates_through_data(ctx: Any) -> None:
    """Changes that leave no trace in a tensor's version, before a later collective of the same step."""
    task = Task(ctx)
    ctx.protect(model=task.model)
    for step in ctx.steps(STEPS):
        with ctx.step():
            loss = task.loss(step)
            ctx.backward(loss)
            for parameter in task.model.parameters():
                parameter.data.sub_(0.05 * parameter.grad)
                parameter.grad = None
            mean = loss.detach().clone()
            dist.all_reduce(mean)


@right
def decay_through_data_before_the_gradients(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            for parameter in task.model.parameters():
                parameter.data.mul_(0.999)
            ctx.backward(task.loss(step))
            task.update()


# ---- parameters ------------------------------------------------------------------------------------------------


@right
def frozen_layer(ctx: Any) -> None:
    model = net()
    model[0].requires_grad_(False)
    task = Task(ctx, model)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()


@right
def unfrozen_in_the_loop(ctx: Any) -> None:
    model = net()
    model[0].requires_grad_(False)
    task = Task(ctx, model)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        if step == 6:
            model[0].requires_grad_(True)
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()


@right
def group_added_in_the_loop(ctx: Any) -> None:
    model = net()
    model[0].requires_grad_(False)
    task = Task(ctx, model)
    task.optimizer = torch.optim.Adam(model[-1].parameters(), lr=1e-2)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        if step == 6:
            model[0].requires_grad_(True)
            task.optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()


@right
def tied_weights(ctx: Any) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model[2].weight = model[0].weight
    task = Task(ctx, model)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()


@right
def branch_that_is_not_always_taken(ctx: Any) -> None:
    """Some parameters have no gradient in some steps, and on some ranks."""
    task = Task(ctx)
    torch.manual_seed(4)
    extra = nn.Linear(16, 4)
    optimizer = torch.optim.SGD([*task.model.parameters(), *extra.parameters()], lr=0.05, momentum=0.9)
    ctx.protect(model=task.model, extra=extra, optimizer=optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            x, y = task.batch(step)
            out = task.model(x)
            if step % 3 == 0 or (step % 3 == 1 and ctx.rank == 1):
                out = out + extra(x)
            ctx.backward(F.cross_entropy(out, y))
            optimizer.step()
            optimizer.zero_grad()


@right
def mixed_types(ctx: Any) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 4, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.body(x)).double())

    task = Task(ctx, Mixed())
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()


# ---- buffers, averages, extras ---------------------------------------------------------------------------------


@right
def batch_norm_and_dropout(ctx: Any) -> None:
    task = Task(ctx, net(nn.BatchNorm1d(32), nn.Dropout(0.3)))
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()


@right
def buffer_that_is_in_no_state_dict(ctx: Any) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(1), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen.mul_(1.01)
            return x * self.seen

    task = Task(ctx, net(Counts()))
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()


@right
def averaged_model(ctx: Any) -> None:
    task = Task(ctx)
    swa = torch.optim.swa_utils
    average = swa.AveragedModel(task.model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
    ctx.protect(model=task.model, optimizer=task.optimizer, average=average)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()
        average.update_parameters(task.model)


@right
def averages_in_a_dict(ctx: Any) -> None:
    task = Task(ctx)
    averages = {name: value.detach().clone() for name, value in task.model.named_parameters()}
    first = averages["0.weight"]
    ctx.protect(model=task.model, optimizer=task.optimizer, averages=averages)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()
            with torch.no_grad():
                for name, value in task.model.named_parameters():
                    averages[name].mul_(0.9).add_(value, alpha=0.1)
        assert first is averages["0.weight"]


@right
def counter_that_matters(ctx: Any) -> None:
    task = Task(ctx)
    notes = {"steps": 0, "best": 9.0}
    ctx.protect(model=task.model, optimizer=task.optimizer, notes=notes)
    for step in ctx.steps(STEPS):
        with ctx.step():
            notes["steps"] += 1
            ctx.backward(task.loss(step) / (1 + notes["steps"]))
            task.update()


@right
def evaluates_now_and_then(ctx: Any) -> None:
    task = Task(ctx, net(nn.BatchNorm1d(32), nn.Dropout(0.3)))
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        if step % 5 == 0:
            task.model.eval()
            with torch.no_grad():
                task.model(task.x[torch.randperm(64)])
            task.model.train()
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()


# ---- data and random numbers -----------------------------------------------------------------------------------


@right
def noise_from_global_generators(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            x, y = task.batch(step)
            x = x + torch.randn_like(x) * random.random() + float(np.random.rand())
            ctx.backward(F.cross_entropy(task.model(x), y))
            task.update()


@right
def generators_of_ones_own(ctx: Any) -> None:
    task = Task(ctx)
    torchs, numpys, pythons = torch.Generator().manual_seed(1), np.random.default_rng(2), random.Random(3)
    legacy = np.random.RandomState(4)
    ctx.protect(model=task.model, optimizer=task.optimizer, torchs=torchs, numpys=numpys, pythons=pythons,
                legacy=legacy)
    for step in ctx.steps(STEPS):
        with ctx.step():
            x, y = task.batch(step)
            x = x + torch.randn(x.shape, generator=torchs) * pythons.random() + numpys.normal() + legacy.rand()
            ctx.backward(F.cross_entropy(task.model(x), y))
            task.update()


@right
def stateful_loader(ctx: Any) -> None:
    from torch.utils.data import TensorDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    task = Task(ctx)
    loader = StatefulDataLoader(TensorDataset(task.x, task.y), batch_size=8, shuffle=True,
                                generator=torch.Generator().manual_seed(9))
    ctx.protect(model=task.model, optimizer=task.optimizer, loader=loader)
    batches = iter(loader)
    for _ in ctx.steps(40):
        with ctx.step():
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(loader)
                x, y = next(batches)
            time.sleep(0.003)
            ctx.backward(F.cross_entropy(task.model(x), y))
            task.update()


@right
def accumulates_in_one_step(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            for _ in range(2):
                ctx.backward(task.loss(step) / 2)
            task.update()


@right
def accumulates_over_steps(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step) / 3)
            if step % 3 == 2:
                task.update()


@right
def distributed_data_parallel(ctx: Any) -> None:
    task = Task(ctx, net(nn.BatchNorm1d(32)))
    ctx.protect(model=task.model, optimizer=task.optimizer)
    task.used = ctx.ddp(task.model)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()


@right
def ddp_without_sync(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    task.used = ctx.ddp(task.model)
    for step in ctx.steps(STEPS):
        with ctx.step():
            with task.used.no_sync():
                ctx.backward(task.loss(step) / 2)
            ctx.backward(task.loss(step) / 2)
            task.update()


# ---- loops that cannot survive, and are told so ----------------------------------------------------------------


@wrong("NotReplayable", "Adam changes protected parameters")
def optimizer_is_not_protected(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()


@wrong("NotReplayable", "random numbers")
def generator_is_not_protected(ctx: Any) -> None:
    task = Task(ctx)
    numpys = np.random.default_rng(2)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            x, y = task.batch(step)
            ctx.backward(F.cross_entropy(task.model(x + numpys.normal()), y))
            task.update()


@wrong("NotReplayable", "counter")
def counter_is_not_protected(ctx: Any) -> None:
    task = Task(ctx)
    count = 0
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            count += 1
            ctx.backward(task.loss(step) / count)
            task.update()


@wrong("NotReplayable", "counter")
def counts_what_comes_out_of_the_loop(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for number, step in enumerate(ctx.steps(STEPS)):
        with ctx.step():
            ctx.backward(task.loss(step) / (1 + number))
            task.update()


@wrong("NotReplayable", "loader")
def loader_is_not_protected(ctx: Any) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    task = Task(ctx)
    batches = iter(DataLoader(TensorDataset(task.x, task.y), batch_size=4, shuffle=True))
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for _ in ctx.steps(STEPS):
        with ctx.step():
            x, y = next(batches)
            ctx.backward(F.cross_entropy(task.model(x), y))
            task.update()


@wrong("NotReplayable", "state_dict leaves something out")
def state_dict_is_not_enough(ctx: Any) -> None:
    class Decay:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.momentum = optimizer, 0.0

        def step(self) -> None:
            self.momentum = 0.5 * self.momentum + 0.1
            self.optimizer.param_groups[0]["weight_decay"] = self.momentum

        def state_dict(self) -> dict:
            return {}

        def load_state_dict(self, saved: dict) -> None:
            pass

    task = Task(ctx)
    decay = Decay(task.optimizer)
    ctx.protect(model=task.model, optimizer=task.optimizer, decay=decay)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            decay.step()
            task.update()


@wrong("RanksDiverged", "ctx.backward(loss), not loss.backward()")
def gradients_are_not_averaged(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            task.loss(step).backward()
            task.update()


@wrong("RanksDiverged", "skip a batch on all ranks or on none")
def one_rank_skips_a_batch(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            loss = task.loss(step)
            if step == 5 and ctx.rank == 1:
                continue
            ctx.backward(loss)
            task.update()


@wrong("ConfigError", "belong to no protected module")
def another_model_is_protected(ctx: Any) -> None:
    task = Task(ctx)
    ctx.protect(model=net(), optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ctx.backward(task.loss(step))
            task.update()


@wrong("ConfigError", "sparse=False")
def sparse_gradients(ctx: Any) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(192, 16, sparse=True), nn.Linear(16, 4))
    task = Task(ctx, model, make=torch.optim.SGD)
    ctx.protect(model=task.model, optimizer=task.optimizer)
    for step in ctx.steps(STEPS):
        with ctx.step():
            ids = task.ids.indices(step)
            ctx.backward(F.cross_entropy(model(ids), task.y[ids]))
            task.update()


@wrong("ConfigError", "StatefulDataLoader")
def plain_loader_is_protected(ctx: Any) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    task = Task(ctx)
    loader = DataLoader(TensorDataset(task.x, task.y), batch_size=8)
    ctx.protect(model=task.model, optimizer=task.optimizer, loader=loader)


@wrong("ConfigError", "after ctx.protect")
def iterator_was_made_before(ctx: Any) -> None:
    from torch.utils.data import TensorDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    task = Task(ctx)
    loader = StatefulDataLoader(TensorDataset(task.x, task.y), batch_size=8)
    next(iter(loader))
    ctx.protect(model=task.model, optimizer=task.optimizer, loader=loader)
