"""The ways to save one training state that `bench checkpoint` compares, all behind the same calls.

Every peer gets the settings that suit it best on a machine without an accelerator: `dcp` gets flat dictionaries, and
its asynchronous forms keep their staging memory from one save to the next.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ftlab.checkpoint.manager import CheckpointManager

_LAYERS = 12
_END_S = 10.0  # for what has to come to its end


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its Adam, as large as was asked for: a third parameters, two thirds moments."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @staticmethod
    def of(megabytes: float) -> Workload:
        """A new one."""
        width = max(8, int((megabytes * 1e6 / 4 / 3 / _LAYERS) ** 0.5))
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return Workload(model=model, optimizer=optimizer)

    def tree(self) -> dict[str, Any]:
        """As torch.save wants it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def parts(self) -> dict[str, Any]:
        """As the checkpoint manager wants it."""
        return {"model": self.model, "optimizer": self.optimizer}

    def flat(self) -> dict[str, torch.Tensor]:
        """The live tensors by name, as dcp likes them best."""
        moments = {f"optimizer.{index}.{name}": value for index, row in self.optimizer.state_dict()["state"].items()
                   for name, value in row.items()}
        return {**{f"model.{name}": value for name, value in self.model.state_dict().items()}, **moments}

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.flat().values())


class Method(Protocol):
    """One way to save and to load."""

    name: str
    durable: bool  # whether a save that is finished survives a power failure

    def save(self, path: Path) -> Callable[[], Any]:
        """What the training loop has to wait for; the answer waits for the rest."""

    def close(self) -> None:
        """Let go of memory, threads and processes; may be called twice."""


class TorchSave:
    """torch.save to one file."""

    def __init__(self, load: Workload, *, fsync: bool) -> None:
        self.workload, self.durable = load, fsync
        self.name = "torch.save + fsync" if fsync else "torch.save"

    def save(self, path: Path) -> Callable[[], Any]:
        """All of it blocks."""
        torch.save(self.workload.tree(), path)  # not to a file of ours: Ctrl-C would close it under torch, which aborts
        if self.durable:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return lambda: None

    def load(self, path: Path) -> None:
        """Without executing what the file says; new tensors, not the live ones."""
        torch.load(path, weights_only=True)

    def load_into_live(self, path: Path) -> None:
        """The same, and then into the model and the optimizer."""
        saved = torch.load(path, weights_only=True)
        self.workload.model.load_state_dict(saved["model"])
        self.workload.optimizer.load_state_dict(saved["optimizer"])

    def close(self) -> None:
        """Nothing is kept."""


class DcpSave:
    """torch.distributed.checkpoint; it syncs its files, though not their folder."""

    name, durable = "dcp.save", True

    def __init__(self, load: Workload) -> None:
        self.workload = load

    def save(self, path: Path) -> Callable[[], Any]:
        """All of it blocks."""
        with _interruptible():
            dcp.save(self.workload.flat(), checkpoint_id=path)
        return lambda: None

    def load(self, path: Path) -> None:
        """Into the live tensors."""
        with _interruptible():
            dcp.load(self.workload.flat(), checkpoint_id=path)

    def close(self) -> None:
        """Nothing is kept."""


class DcpAsyncSave(DcpSave):
    """Its asynchronous form: stages in memory, then writes in a thread or in a process of its own."""

    def __init__(self, load: Workload, *, process: bool) -> None:
        super().__init__(load)
        self.name = f"dcp.async_save ({'process' if process else 'thread'})"
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._stager: DefaultStager | None = DefaultStager(StagingOptions(False, process, False, False))
        self._running: Any = None

    def save(self, path: Path) -> Callable[[], Any]:
        """Only staging blocks; except in the first save of a process, which has to be started."""
        starts = self._kind is AsyncCheckpointerType.PROCESS and _async_process_executor._CHECKPOINT_PROCESS is None
        with _hushed() if starts else contextlib.nullcontext():
            self._running = dcp.async_save(self.workload.flat(), checkpoint_id=path, async_stager=self._stager,
                                           async_checkpointer_type=self._kind)
            if starts:
                self._running.result()
        return lambda: self._running.result()

    def close(self) -> None:
        """Wait for what is being written; who was told of an error is not told again."""
        if self._running is not None:
            wait([self._running], _END_S)
        if self._stager is not None:
            self._stager.close()
        self._stager = self._running = None


class Ours:
    """ftlab's checkpoint manager; every path is a step of one folder."""

    name, durable = "ftlab", True

    def __init__(self, load: Workload, folder: Path) -> None:
        self.workload = load
        self._manager = CheckpointManager(str(folder), every=1)
        self._steps: dict[Path, int] = {}

    def save(self, path: Path) -> Callable[[], Any]:
        """Only the copy blocks."""
        step = self._steps[path] = len(self._steps)
        self._manager.save(self.workload.parts(), step)
        return self._manager.wait

    def remove(self, path: Path) -> None:
        """Delete what was saved."""
        self._manager.remove(self._steps[path])

    def close(self) -> None:
        """Write what is left."""
        self._manager.close()


class Limits:
    """What no method can beat: one copy of the state in memory, and writing its bytes to the disk."""

    def __init__(self, load: Workload) -> None:
        self.bytes = load.bytes
        self._tensors = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in load.flat().values()]
        self._buffer = torch.zeros(load.bytes, dtype=torch.uint8)
        sizes = [len(tensor) for tensor in self._tensors]
        self._views = self._buffer.split(sizes)

    def memcpy(self) -> None:
        """With one thread, into memory that is warm."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for view, tensor in zip(self._views, self._tensors, strict=True):
            view.copy_(tensor)
        torch.set_num_threads(threads)

    def write(self, path: Path) -> None:
        """In order, then fsync."""
        data = memoryview(self._buffer.numpy().data)
        with path.open("wb", 0) as file:
            while data:
                data = data[file.write(data[:4 << 20]):]
            os.fsync(file.fileno())


@contextlib.contextmanager
def one_process_group(folder: Path) -> Iterator[None]:
    """The process group of one rank without which dcp.async_save does not work."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", init_method=f"file://{folder.absolute()}/group", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def dcp_process_ended() -> Iterator[None]:
    """End the process that dcp.async_save starts at its first save, and would keep for as long as we live."""
    before = multiprocessing.active_children()
    try:
        yield
    finally:
        for child in multiprocessing.active_children():
            if child not in before:
                child.terminate()
                child.join(_END_S)
        _async_process_executor._CHECKPOINT_PROCESS = None  # the next save starts another


def remove(method: Method | None, path: Path) -> None:
    """Delete what a method saved."""
    if isinstance(method, Ours):
        method.remove(path)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C as what it is: dcp hands it on as a failure of its own."""
    try:
        yield
    except dcp.api.CheckpointException as error:
        if any(isinstance(failure, KeyboardInterrupt) for failure, _ in error.failures.values()):
            raise KeyboardInterrupt from None
        raise


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """What starts here inherits a stderr that nobody reads."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
