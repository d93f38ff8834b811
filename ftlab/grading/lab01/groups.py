"""Saves by several ranks of a real gloo group, each in a child of its own, so that none knows what another is told.

Rank 0 can be made to die, to freeze or to run out of disk in the middle of its save. Without a mishap the other ranks
cannot write at all, so that a manager in which everybody writes is found out each time, not only when two ranks happen
to collide.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ftlab.grading.lab01 import scenes

GROUP_S = 600.0  # the group's own timeout: nobody is to be saved by it
_SLOW_S = 1.0  # how long rank 0 gives the others to return too early


class Moment(nn.Module):
    """A model at whose `state_dict` something happens, once: the middle of a save."""

    def __init__(self, inner: nn.Module, happens: Callable[[], None]) -> None:
        super().__init__()
        self.inner, self._happens = inner, happens

    def state_dict(self, *args: Any, **more: Any) -> Any:
        """The inner state, after the moment."""
        happens, self._happens = self._happens, lambda: None
        happens()
        return super().state_dict(*args, **more)


def save_as_rank(part: Any, folder: str, store: str, rank: int, world: int, epoch: int, state: str, timeout_s: float,
                 salt: int, mishap: str = "", alone: bool = False) -> dict[str, Any]:
    """One rank saves one epoch; what came of it. `mishap` befalls rank 0: "dies", "freezes" or "full". Where rank 0 is
    `alone` in being able to write, the others are not."""
    join(store, rank, world)
    model, optimizer = scenes.make(rank + 1)
    if state:
        scenes.put_state(state, model, optimizer)
    befalls = {"dies": signal.SIGKILL, "freezes": signal.SIGSTOP}.get(mishap)
    if befalls:
        model = Moment(model, partial(os.kill, os.getpid(), befalls))
    manager = part(folder, keep_last_n=3, timeout_s=timeout_s)
    if alone or mishap == "full":
        _forbid_writing()
    if rank == 0 and not mishap:
        _slow_storage(store, world)
    file = f"{folder}/{scenes.NAME.format(epoch)}"
    try:
        manager.save_checkpoint(model, optimizer, epoch, {"loss": 0.5})
        return {"saved": True, "file": salted_file(file, salt)}
    except Exception as error:
        return {"saved": False, "raised": f"{type(error).__name__}: {error}"[:300]}
    finally:
        Path(store, f"returned-{rank}").mkdir()


def load_as_rank(part: Any, folder: str, store: str, rank: int, world: int, salt: int, timeout_s: float
                 ) -> dict[str, Any]:
    """One rank loads the newest: the epoch and a digest of the weights."""
    join(store, rank, world)
    model, optimizer = scenes.make(rank + 1)
    try:
        found = part(folder, timeout_s=timeout_s).load_checkpoint(model, optimizer)
    except Exception as error:
        return {"epoch": None, "raised": f"{type(error).__name__}: {error}"[:300]}
    return {"epoch": found["epoch"] if isinstance(found, dict) else repr(found), "weights": scenes.salted(model, salt)}


def join(store: str, rank: int, world: int) -> None:
    """Join the group; a rank that died before its peers are connected would fail them, not its save."""
    shared = dist.FileStore(f"{store}/store", world)
    shared.set_timeout(timedelta(seconds=GROUP_S))
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=world, timeout=timedelta(seconds=GROUP_S))
    shared.set(f"connected-{rank}", "")
    shared.wait([f"connected-{each}" for each in range(world)])


def salted_file(file: str, salt: int) -> str:
    """A digest of a file that cannot be known before the salt; empty if there is none."""
    try:
        return hashlib.sha256(str(salt).encode() + Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


def _forbid_writing() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _slow_storage(store: str, world: int) -> None:
    """Rank 0's first sync takes until another rank has returned from its save too early, or a while."""
    real, waited = os.fsync, list[int]()

    def slow(file: Any) -> None:
        deadline = time.monotonic() + (0.0 if waited else _SLOW_S)
        waited.append(1)
        while time.monotonic() < deadline and not any(Path(store, f"returned-{rank}").exists()
                                                      for rank in range(1, world)):
            time.sleep(0.01)
        real(file)

    os.fsync = slow  # type: ignore[assignment]
