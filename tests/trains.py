"""Train functions for the integration tests; importable by workers, because the tests' sys.path travels with a job."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


def _model(width: int = 64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 8))


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(512, 32, generator=generator), torch.randint(0, 8, (512,), generator=generator)


def everything(ctx: Any, steps: int = 60, step_s: float = 0.01, ddp: bool = False, global_batch: int = 48) -> dict:
    """Model, optimizer, scheduler, scaler, extras, gradients accumulated over two steps, random numbers."""
    import random

    import numpy as np

    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=7)
    notes: dict[str, float] = {"seen": 0.0}
    ctx.protect(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, notes=notes)
    net = ctx.ddp(model) if ddp else model
    x, y = _data()
    data = ctx.sampler(len(x), global_batch=global_batch, seed=5)
    for step in ctx.steps(steps):
        with ctx.step():
            for ids in data.shards(step):
                noise = 0.01 * (random.random() + float(np.random.rand()) + torch.rand(1).item())
                loss = nn.functional.cross_entropy(net(x[ids] + noise), y[ids])
                ctx.backward(scaler.scale(loss))
            if step % 2:  # two steps' gradients make one update
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
            notes["seen"] += 1
            time.sleep(step_s)
            ctx.report(loss=loss)
    return {"seen": notes["seen"], "rank": ctx.rank, "world": ctx.world_size}


def network(ctx: Any, steps: int = 60, step_s: float = 0.01, ddp: bool = False, bad_from: int | None = None,
            spike_at: int | None = None) -> None:
    """BatchNorm and dropout; on demand its numbers are bad from a step on, or its loss is large in one."""
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ctx.protect(model=model, optimizer=optimizer)
    net = ctx.ddp(model) if ddp else model
    x, y = _data()
    data = ctx.sampler(len(x), global_batch=48)
    for step in ctx.steps(steps):
        with ctx.step():
            for ids in data.shards(step):
                time.sleep(step_s)
                loss = nn.functional.cross_entropy(net(x[ids]), y[ids])
                worse = 1e4 if step == spike_at else torch.nan if bad_from is not None and step >= bad_from else 1.0
                ctx.backward(loss * worse)
            optimizer.step()
            optimizer.zero_grad()
            ctx.report(loss=loss)


def deaf(ctx: Any, rank: int) -> None:
    """As `network`, but the first time that a spoiled step is decided on, the world breaks before one rank hears it."""
    from ftlab.policy import Action
    from ftlab.train import context

    agree, missed = context.ranks.agree, []

    def miss_the_answer(answer: Any) -> Any:
        answer = agree(answer)
        if isinstance(answer, Action) and ctx.rank == rank and not missed:
            missed.append(answer)
            ctx._session.group.sever()
            raise RuntimeError("connection closed by peer")
        return answer

    context.ranks.agree = miss_the_answer
    network(ctx)


def uneven(ctx: Any) -> None:
    """One rank takes fewer steps than the others, who wait for it."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.protect(model=model, optimizer=optimizer)
    x, y = _data()
    for _ in ctx.steps(30 if ctx.rank else 20):
        with ctx.step():
            ctx.backward(nn.functional.cross_entropy(model(x[:16]), y[:16]))
            optimizer.step()
            optimizer.zero_grad()


def poison_newest(folder: str) -> str:
    """Save what `network` has saved last once more, with NaN in its weights; the name of that checkpoint."""
    from ftlab import CheckpointManager

    model = _model()
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=1e-3)}
    with CheckpointManager(folder, keep_last_n=10) as manager:
        found = manager.load_latest(state)
        assert found is not None
        with torch.no_grad():
            next(model.parameters())[0, 0] = torch.nan
        return manager.save(state, found.step, wait=True)


def roomy(ctx: Any, steps: int = 60, sample_mb: float = 3.0, step_s: float = 0.01, whole: bool = False) -> dict:
    """Takes memory for each sample; no BatchNorm and no dropout, so that pieces add up to the whole."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ctx.protect(model=model, optimizer=optimizer)
    x, y = _data()
    data = ctx.sampler(len(x), global_batch=48)
    for step in ctx.steps(steps):
        with ctx.step():
            for ids in [data.indices(step)] if whole else data.shards(step):
                scratch = torch.ones(len(ids), int(sample_mb * (1 << 18)))
                ctx.backward(nn.functional.cross_entropy(model(x[ids]), y[ids]))
                del scratch
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(step_s)
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return {"pieces": ctx.pieces, "weights": weights.tolist(), "lr": optimizer.param_groups[0]["lr"]}


def epochs(ctx: Any, epochs: int = 4, batch_s: float = 0.005, kind: str = "") -> dict:
    """A plain train_epoch, recovered by train_with_auto_recovery."""
    from torch.utils.data import DataLoader, TensorDataset

    from ftlab import train_with_auto_recovery

    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    loader = DataLoader(TensorDataset(*_data()), batch_size=32, shuffle=True)

    def train_epoch(model: Any, loader: Any, optimizer: Any) -> dict:
        total = 0.0
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
            time.sleep(batch_s)
        return {"loss": total}

    outcome = train_with_auto_recovery(train_epoch, model, optimizer, loader, epochs, ctx=ctx,
                                       parts={"scheduler": scheduler})
    return {"steps": outcome.steps, "epochs": len(outcome.metrics), "skipped": outcome.skipped}


def wrong_loss(ctx: Any, kind: str = "vector") -> None:
    """A loss that cannot be one."""
    model = _model()
    ctx.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    x, _ = _data()
    for _ in ctx.steps(3):
        with ctx.step():
            out = model(x[:8])
            ctx.backward({"vector": out.sum(1), "whole": out.argmax(1).sum()}[kind])


def stuck(ctx: Any, marker: str, steps: int = 60, recovered: bool = False) -> None:
    """One rank gets stuck in its own code, once: in step 20, or in the first step after a recovery."""
    import threading
    from pathlib import Path

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.protect(model=model, optimizer=optimizer)
    x, y = _data()
    first = 0
    for step in ctx.steps(steps):
        first = first or ctx.generation
        with ctx.step():
            now = ctx.generation > first if recovered else step == 20
            if now and ctx.rank == 1 and not Path(marker).exists():
                Path(marker).touch()
                threading.Event().wait()  # a lock that nobody releases
            ctx.backward(nn.functional.cross_entropy(model(x[:16]), y[:16]))
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)


def plain(ctx: Any, steps: int = 40, step_s: float = 0.01, width: int = 64) -> int:
    """The smallest loop."""
    model = _model(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ctx.protect(model=model, optimizer=optimizer)
    x, y = _data()
    data = ctx.sampler(len(x), global_batch=48)
    for step in ctx.steps(steps):
        with ctx.step():
            ids = data.indices(step)
            loss = nn.functional.cross_entropy(model(x[ids]), y[ids])
            ctx.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(step_s)
            ctx.report(loss=loss)
    return ctx.rank


def pauses(ctx: Any, steps: int = 30) -> None:
    """Short steps, and once a long one on all ranks: an evaluation, say."""
    model = _model()
    ctx.protect(model=model)
    for step in ctx.steps(steps):
        with ctx.step():
            if step == 20:
                time.sleep(2.5)
            torch.distributed.barrier()


def slow_victim(ctx: Any, steps: int = 40, victim: int = 1) -> None:
    """One rank comes late to every collective, so that the others are inside it most of the time."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.protect(model=model, optimizer=optimizer)
    x, y = _data()
    data = ctx.sampler(len(x), global_batch=48)
    for step in ctx.steps(steps):
        with ctx.step():
            ids = data.indices(step)
            loss = nn.functional.cross_entropy(model(x[ids]), y[ids])
            if ctx.rank == victim:
                time.sleep(0.05)
            ctx.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def large(ctx: Any, steps: int = 8, megabytes: int = 200) -> None:
    """A state that takes a while to send."""
    model = nn.Linear(1024, megabytes * 256, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.5)
    ctx.protect(model=model)
    for step in ctx.steps(steps):
        with ctx.step():
            torch.distributed.barrier()
            with torch.no_grad():
                model.weight[0, step % 1024] += 1
            time.sleep(0.15)


def changes_too_early(ctx: Any, steps: int = 400) -> None:
    """Parameters change before the step's last collective."""
    model = nn.Linear(4, 4)
    ctx.protect(model=model)
    for _ in ctx.steps(steps):
        with ctx.step():
            with torch.no_grad():
                model.weight += 1
            time.sleep(0.02 * ctx.rank)
            torch.distributed.barrier()


def raises_always(ctx: Any, at: int = 0) -> None:
    """A bug that comes back on every attempt."""
    model = _model()
    ctx.protect(model=model)
    for step in ctx.steps(20):
        with ctx.step():
            if step == at:
                raise ZeroDivisionError(f"a bug in step {step}")
            torch.distributed.barrier()


def raises_once(ctx: Any, flag: str, steps: int = 30) -> None:
    """A bug that one rank meets once."""
    import pathlib

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.protect(model=model, optimizer=optimizer)
    x, y = _data()
    data = ctx.sampler(len(x), global_batch=48)
    for step in ctx.steps(steps):
        with ctx.step():
            if step == 10 and ctx.rank == 1 and flag and not pathlib.Path(flag).exists():
                pathlib.Path(flag).touch()
                raise OSError("a disk hiccup")
            ids = data.indices(step)
            ctx.backward(nn.functional.cross_entropy(model(x[ids]), y[ids]))
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)


def different_models(ctx: Any) -> None:
    """Each rank builds its own."""
    model = nn.Linear(4, 3 + ctx.rank)
    ctx.protect(model=model)
    for _ in ctx.steps(3):
        with ctx.step():
            pass


def no_step(ctx: Any) -> None:
    """The loop without `with ctx.step()`."""
    ctx.protect(model=nn.Linear(2, 2))
    for _ in ctx.steps(3):
        pass


def nothing_protected(ctx: Any) -> None:
    """Forgot ctx.protect."""
    for _ in ctx.steps(3):
        with ctx.step():
            pass


def chatty(ctx: Any, lines: int) -> None:
    """Prints a lot."""
    model = nn.Linear(2, 2)
    ctx.protect(model=model)
    for _ in ctx.steps(2):
        with ctx.step():
            if ctx.rank == 0:
                for number in range(lines):
                    print(f"line {number} " + "x" * 80)
            torch.distributed.barrier()


def greets(ctx: Any) -> str:
    """Prints one line on each rank."""
    ctx.protect(model=nn.Linear(2, 2))
    for _ in ctx.steps(1):
        with ctx.step():
            print(f"hello from rank {ctx.rank} of {ctx.world_size}")
    return ctx.node


def sharded(ctx: Any, steps: int = 40, step_s: float = 0.01, wrong: str = "") -> dict[str, Any]:
    """A model under FSDP2: every rank holds a part of it."""
    from torch.distributed.fsdp import fully_shard

    x, y = _data()

    def build(mesh: Any) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8))
        fully_shard(model, mesh=mesh)
        if wrong == "raises":
            raise LookupError("no such layer")
        name = "net" if wrong == "name" else "model"
        return {name: model, "optimizer": torch.optim.AdamW(model.parameters())}

    parts = ctx.sharded(build)
    data = ctx.sampler(len(x), global_batch=48, seed=5)
    for step in ctx.steps(steps):
        with ctx.step():
            ids = data.indices(step)
            loss = nn.functional.cross_entropy(parts.model(x[ids]), y[ids])
            ctx.backward(loss)
            parts.optimizer.step()
            parts.optimizer.zero_grad()
            time.sleep(step_s)
            ctx.report(loss=loss)
    return {"rank": ctx.rank, "world": ctx.world_size}


def dies_after_a_snapshot(ctx: Any, folder: str, steps: int = 40, at: int = 20) -> int:
    """Rank 0 kills itself right after the commit in which its snapshot of step `at` was taken."""
    import os
    import signal
    from pathlib import Path

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ctx.protect(model=model, optimizer=optimizer)
    x, y = _data()
    data = ctx.sampler(len(x), global_batch=48)
    for step in ctx.steps(steps):
        mark = Path(folder) / "died"
        if step == at and ctx.rank == 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with ctx.step():
            ids = data.indices(step)
            ctx.backward(nn.functional.cross_entropy(model(x[ids]), y[ids]))
            optimizer.step()
            optimizer.zero_grad()
    return ctx.rank


def receives(ctx: Any, steps: int = 20) -> None:
    """A receive from anybody in the first step: gloo does not wake it when all senders are gone."""
    model = _model()
    ctx.protect(model=model)
    for step in ctx.steps(steps):
        with ctx.step():
            if step == 0 and ctx.generation == 1 and ctx.rank == 0:
                torch.distributed.recv(torch.zeros(1))  # from anybody
            if step == 0 and ctx.generation == 1 and ctx.rank == 1:
                time.sleep(600)
            torch.distributed.barrier()


class Brittle:
    """A part that cannot be had back once it has counted to five."""

    count = 0

    def state_dict(self) -> dict:
        return {"count": self.count}

    def load_state_dict(self, saved: dict) -> None:
        if saved["count"] >= 5:
            raise ValueError(f"cannot go back to {saved['count']}")
        self.count = saved["count"]


def brittle(ctx: Any, steps: int = 40) -> None:
    """A protected part of the user's own raises while the state is brought back."""
    model, tally = _model(), Brittle()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.protect(model=model, optimizer=optimizer, tally=tally)
    x, y = _data()
    for step in ctx.steps(steps):
        with ctx.step():
            ctx.backward(nn.functional.cross_entropy(model(x[:16]), y[:16]))
            optimizer.step()
            optimizer.zero_grad()
            tally.count = step + 1
            time.sleep(0.005)


def dawdles(ctx: Any, marker: str, steps: int = 40) -> None:
    """After a recovery one rank never enters its next step: its own code between two steps loops for ever."""
    from pathlib import Path

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.protect(model=model, optimizer=optimizer)
    x, y = _data()
    first = 0
    for _ in ctx.steps(steps):
        first = first or ctx.generation
        if ctx.generation > first and ctx.rank == 1 and not Path(marker).exists():
            Path(marker).touch()
            while True:
                time.sleep(0.01)
        with ctx.step():
            ctx.backward(nn.functional.cross_entropy(model(x[:16]), y[:16]))
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
