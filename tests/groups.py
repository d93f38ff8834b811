"""Child processes for the checkpoint tests: how to start many of them quickly, and what they do.

They are forked from a server that has imported everything once, so that starting one takes milliseconds.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import random
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ftlab.checkpoint import tree
from ftlab.checkpoint.manager import CheckpointManager, as_state
from ftlab.checkpoint.storage import LocalStorage
from ftlab.checkpoint.vault import COMMIT, Vault
from ftlab.errors import FtlabError
from tests.limits import GROUP_S

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = ["pytest", "torch.distributed.fsdp", "ftlab.checkpoint.resharding", "tests.groups"]


def start(function: Callable[..., None], *args: Any) -> BaseProcess:
    """A child process that calls a function of this module."""
    paths = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *([paths] if paths else [])])
    try:
        _CONTEXT.set_forkserver_preload(_PRELOAD)
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if paths:
            os.environ["PYTHONPATH"] = paths
    child = _CONTEXT.Process(target=function, args=args, daemon=True)
    child.start()
    return child


def pipe() -> tuple[Connection, Connection]:
    """Two ends between a test and its child process."""
    return _CONTEXT.Pipe()


# ---- one process


def save_for_ever(folder: str) -> None:
    """Save one step after the other until somebody ends this; every state holds its step in all places."""
    step = max((entry.step for entry in Vault(LocalStorage(folder)).entries()), default=0)
    manager = CheckpointManager(folder, keep_last_n=2)
    while True:
        step += 1
        manager.save({"notes": {"step": step, "weight": torch.full((200_000,), float(step))}}, step)


class Everything:
    """All that can be part of a state, and a step that changes all of it."""

    def __init__(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.progress: dict[str, Any] = {"step": 0, "epoch": 0, "cursor": 0, "order": [], "best": None}
        self.state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
                      "scaler": self.scaler, "progress": self.progress}

    def train(self, until: int) -> None:
        """Batches up to a number; five make an epoch, and three an update of the weights."""
        data = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
        while self.progress["step"] < until:
            if self.progress["cursor"] == 0:
                self.progress["order"] = np.random.permutation(20).tolist()
            ids = self.progress["order"][self.progress["cursor"]:self.progress["cursor"] + 4]
            noise = random.gauss(0, 0.1) + float(np.random.randn()) / 10
            loss = self.model(data[ids] + noise).square().mean()
            self.scaler.scale(loss).backward()
            self.progress["step"] += 1
            if self.progress["step"] % 3 == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                self.scheduler.step()
            self.progress["best"] = min(self.progress["best"] or 9e9, loss.item())
            self.progress["cursor"] = (self.progress["cursor"] + 4) % 20
            self.progress["epoch"] = self.progress["step"] // 5

    def digest(self) -> str:
        """All of it, gradients and random numbers too."""
        return as_state(self.state, self.progress["step"]).digest()


def resume_everything(folder: str, until: int, answer: str) -> None:
    """Load the newest, train on, and write down from where and how that ended."""
    torch.set_num_threads(1)  # as the test does: sums depend on it
    run = Everything(seed=1234)
    with CheckpointManager(folder) as manager:
        found = manager.load_latest(run.state)
    run.train(until)
    Path(answer).write_text(f"{found.step if found else None} {run.digest()}")


# ---- groups of processes


class Outcome:
    """What one rank brought back: its value, or the error it raised, and how long it took."""

    def __init__(self, value: Any, error: BaseException | None, seconds: float) -> None:
        self.value, self.error, self.seconds = value, error, seconds


def values(outcomes: list[Outcome | None]) -> list[Any]:
    """What the ranks brought back; the first error, if there was one, is raised here."""
    for outcome in outcomes:
        assert outcome is not None, "a rank died"
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes if outcome is not None]


def run(world: int, work: Callable[..., Any], folder: Path, *args: Any, group_s: float = 30.0) -> list[Outcome | None]:
    """Call `work(rank, folder, *args)` in a gloo group; one outcome per rank, None for one that died."""
    store = folder / f"store-{time.monotonic_ns()}"
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world)]
    children = [start(_member, work, rank, world, str(store), group_s, pipes[rank][1], (folder, *args))
                for rank in range(world)]
    for _, sending in pipes:
        sending.close()
    deadline = time.monotonic() + GROUP_S
    try:
        return [_receive(receiving, deadline) for receiving, _ in pipes]
    finally:
        for child in children:
            child.join(1)
            if child.is_alive():
                child.kill()
                child.join()


def _receive(pipe: Connection, deadline: float) -> Outcome | None:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        return Outcome(None, TimeoutError(f"no answer after {GROUP_S:g} s"), GROUP_S)
    with suppress(EOFError):
        return pickle.loads(pipe.recv_bytes())
    return None


def _member(work: Callable[..., Any], rank: int, world: int, store: str, group_s: float, pipe: Connection,
            args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world,
                            timeout=datetime.timedelta(seconds=group_s))
    begin = time.monotonic()
    try:
        value, error = work(rank, *args), None
    except FtlabError as raised:
        value, error = None, raised
    except BaseException:
        value, error = None, AssertionError(traceback.format_exc())
    pipe.send_bytes(pickle.dumps(Outcome(value, error, time.monotonic() - begin)))  # tensors by value
    pipe.close()
    os._exit(0)  # without waiting for the group, which may be broken


def folder_of(folder: Path) -> str:
    """Where the ranks of one test save."""
    return str(folder / "run")


class Replica:
    """A model trained with DDP on data of each rank's own."""

    def __init__(self, rank: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.rank = rank
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.model = nn.parallel.DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            data = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + self.rank))
            self.model(data).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def digest(self) -> str:
        """Of what all ranks have in common; BatchNorm's statistics are each rank's own under DDP."""
        weights = [parameter.detach() for parameter in self.model.parameters()]
        return tree.digest([weights, self.optimizer.state_dict()])


def ddp_saves(rank: int, folder: Path) -> tuple[str, str, list[str]]:
    """Train, save, and train on; the digest of what was saved, the name, and the events of this rank."""
    run, events = Replica(rank, seed=1), []
    run.train(0, 4)
    with CheckpointManager(folder_of(folder), on_event=lambda kind, facts: events.append(kind)) as manager:
        name = manager.save(run.state, 4, wait=True)
        assert manager.vault.verify(name).good, "it is durable on every rank when save(wait=True) returns"
        saved = run.digest()
        run.train(4, 8)
    return saved, name, [*events, run.digest()]


def ddp_loads(rank: int, folder: Path) -> tuple[int, str, str]:
    """Load into a replica of other weights, and train on; the step, what was loaded, and how it ended."""
    run = Replica(rank, seed=50 + rank)
    with CheckpointManager(folder_of(folder)) as manager:
        found = manager.load_latest(run.state)
    assert found is not None
    loaded = run.digest()
    run.train(4, 8)
    return found.step, loaded, run.digest()


def ddp_saves_twice(rank: int, folder: Path) -> list[str]:
    """Two checkpoints, of steps 2 and 4; what each holds."""
    run, digests = Replica(rank, seed=1), []
    with CheckpointManager(folder_of(folder)) as manager:
        for step in (2, 4):
            run.train(step - 2, step)
            manager.save(run.state, step, wait=True)
            digests.append(run.digest())
    return digests


def ddp_resumes(rank: int, folder: Path) -> tuple[int | None, bool, str, list[str]]:
    """Load the newest; its step, whether anything was changed, what is there now, and the events of this rank."""
    run, events = Replica(rank, seed=50 + rank), list[str]()
    before = run.digest()
    with CheckpointManager(folder_of(folder), on_event=lambda kind, facts: events.append(kind)) as manager:
        found = manager.load_latest(run.state)
    return found.step if found else None, run.digest() != before, run.digest(), events


def ddp_saves_often(rank: int, folder: Path, times: int) -> list[str]:
    """Many saves, one right after the other, of which only the newest is kept."""
    run = Replica(rank, seed=1)
    with CheckpointManager(folder_of(folder), keep_last_n=1, timeout_s=3.0) as manager:
        return [manager.save(run.state, step, wait=True) for step in range(1, times + 1)]


def own_folder(rank: int, folder: Path) -> None:
    """Every rank has a folder of its own."""
    CheckpointManager(str(folder / f"run-{rank}"))


def one_cannot_open(rank: int, folder: Path) -> None:
    """One rank's path leads through a file."""
    (folder / "file").write_text("mine")
    CheckpointManager(str(folder / "file" / "run") if rank == 1 else folder_of(folder))


def one_cannot_find(rank: int, folder: Path) -> None:
    """The folder is gone when the newest is looked for."""
    manager = CheckpointManager(folder_of(folder))
    dist.barrier()
    if rank == 0:
        (folder / "run").rmdir()
        (folder / "run").write_text("a file now")
    dist.barrier()
    manager.load_latest({"notes": {}})


def other_model(rank: int, folder: Path) -> None:
    """A checkpoint of another model than the one that is trained."""
    with CheckpointManager(folder_of(folder)) as manager:
        manager.save({"model": nn.Linear(3, 3)}, 1, wait=True)
        manager.load_latest({"model": nn.Linear(2, 2)})


class Dies(LocalStorage):
    """Ends its process, as kill -9 does, when the marker is to be written."""

    def create(self, folder: str, name: str, data: bytes) -> bool:
        if name == COMMIT:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().create(folder, name, data)


def writer_dies(rank: int, folder: Path, timeout_s: float) -> None:
    """The rank that writes is killed in the middle of a save that all wait for."""
    run = Replica(rank, seed=1)
    manager = CheckpointManager(folder_of(folder), timeout_s=timeout_s)
    manager.save(run.state, 1, wait=True)
    if rank == 0:
        manager.vault.storage = Dies(folder_of(folder))
    manager.save(run.state, 2, wait=True)


class Shards:
    """A model sharded with FSDP2, or whole; one dimension is smaller than the world, another is odd."""

    def __init__(self, sharded: bool, seed: int, dropout: float = 0.0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 7), nn.LayerNorm(7), nn.ReLU(), nn.Dropout(dropout), nn.Linear(7, 2))
        self.rank = 0
        if sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            self.rank = dist.get_rank()
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(self.model[0], mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.progress = {"rank": self.rank}
        self.state = {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def train(self, first: int, last: int, same_data: bool = True) -> None:
        for step in range(first, last):
            own = 0 if same_data else self.rank
            data = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + own))
            self.model(data).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def backward(self) -> None:
        """Half a step: gradients that are not used yet."""
        self.model(torch.ones(3, 4)).square().mean().backward()

    def whole(self) -> dict[str, Any]:
        """Weights, gradients and optimizer state, each put together from all ranks."""
        def full(value: Any) -> Any:
            return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()

        parameters = list(self.model.parameters())
        return {"weights": [full(each) for each in parameters],
                "grads": [None if each.grad is None else full(each.grad) for each in parameters],
                "moments": [{name: full(value) for name, value in self.optimizer.state[each].items()}
                            for each in parameters]}


def fsdp_saves(rank: int, folder: Path) -> dict[str, Any]:
    """Train and save in the middle of an accumulation; everything, put together."""
    run = Shards(sharded=True, seed=1)
    run.train(0, 4)
    run.backward()
    with CheckpointManager(folder_of(folder)) as manager:
        manager.save(run.state, 4, wait=True)
    return run.whole()


def fsdp_loads(rank: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load into shards of this world, and train on; what was loaded and how it ended."""
    run = Shards(sharded=True, seed=9)
    return load_and_go_on(run, folder)


def load_and_go_on(run: Shards, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load the newest, and go on for three steps of the same data on all ranks."""
    with CheckpointManager(folder_of(folder)) as manager:
        found = manager.load_latest(run.state)
    assert found is not None and found.step == 4
    loaded = run.whole()
    run.train(4, 7)
    return loaded, run.whole()


def fsdp_goes_on(rank: int, folder: Path, cut: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Dropout, and data of each rank's own: stopped and loaded in the middle, or not."""
    run = Shards(sharded=True, seed=1, dropout=0.5)
    torch.manual_seed(1000 + rank)  # every rank drops other units
    random.seed(rank)
    with CheckpointManager(folder_of(folder)) as manager:
        if cut is not None:
            run.train(0, cut, same_data=False)
            manager.save(run.state, cut, wait=True)
            run = Shards(sharded=True, seed=77, dropout=0.5)
            manager.load_latest(run.state)
        run.train(cut or 0, 6, same_data=False)
    return run.whole(), {**run.progress, "random": random.random()}


def fsdp_rank_dies(rank: int, folder: Path, timeout_s: float) -> None:
    """A rank that has a shard to write is killed before it does."""
    run = Shards(sharded=True, seed=1)
    manager = CheckpointManager(folder_of(folder), timeout_s=timeout_s)
    manager.save(run.state, 1, wait=True)
    if rank == 1:
        manager.vault.write_shard = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    manager.save(run.state, 2, wait=True)
