"""Saves by several ranks: real gloo ranks, forked inside of a play's child, so that a deadlock ends with the play.

Rank 0 can be made to die, to freeze or to run out of disk in the middle of its save; the other ranks cannot write at
all, so that a manager in which everybody writes is found out each time, not only when two ranks happen to collide.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from ftlab.grading.lab01 import scenes
from ftlab.grading.stage.canonical import digest

GROUP_S = 600.0  # the group's own timeout: nobody is to be saved by it
_SLOW_S = 1.0  # how long rank 0 gives the others to return too early
_MOST_RANKS = 16


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


def save_together(part: Any, folder: str, seed: int, world: int, epoch: int, timeout_s: float, patience_s: float,
                  mishap: str = "") -> list[dict[str, Any]]:
    """All ranks save one epoch; per rank what came of it. `mishap` befalls rank 0: "dies", "freezes" or "full"."""
    returned = mmap.mmap(-1, _MOST_RANKS)

    def act(rank: int) -> dict[str, Any]:
        model, optimizer = scenes.make(seed)
        befalls = {"dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
                   "freezes": lambda: os.kill(os.getpid(), signal.SIGSTOP)}.get(mishap if rank == 0 else "")
        manager = part(folder, keep_last_n=3, timeout_s=timeout_s)
        _limit_writes(rank, mishap)
        if rank == 0 and not mishap:
            _slow_storage(returned, world)
        moment = Moment(model, befalls or (lambda: None))
        try:
            manager.save_checkpoint(moment, optimizer, epoch, {"loss": 0.5})
            there = scenes.NAME.format(epoch) in scenes.files(folder)
            return {"saved": True, "there": there}
        except Exception as error:
            return {"saved": False, "raised": f"{type(error).__name__}: {error}"[:300]}
        finally:
            returned[rank] = 1

    return run_ranks(act, world, patience_s, lost=0 if mishap in ("dies", "freezes") else -1)


def load_together(part: Any, folder: str, seed: int, world: int, timeout_s: float,
                  patience_s: float) -> list[dict[str, Any]]:
    """All ranks load the newest; per rank the epoch and the weights."""

    def act(rank: int) -> dict[str, Any]:
        model, optimizer = scenes.make(seed + 77 + rank)
        try:
            found = part(folder, timeout_s=timeout_s).load_checkpoint(model, optimizer)
        except Exception as error:
            return {"epoch": None, "raised": f"{type(error).__name__}: {error}"[:300]}
        return {"epoch": found["epoch"] if isinstance(found, dict) else repr(found),
                "weights": digest(model.state_dict())}

    return run_ranks(act, world, patience_s)


def run_ranks(act: Callable[[int], dict[str, Any]], world: int, patience_s: float,
              lost: int = -1) -> list[dict[str, Any]]:
    """Fork the ranks of a group, let each act, and gather what they say; {"hangs": True} for one that did not end in
    time. Rank `lost` is not waited for."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        ranks = [_fork(lambda rank=rank: act(rank), rank, world, port) for rank in range(world)]  # type: ignore[misc]
        # Not before the forks: the store's thread may hold a lock of libc, which a child would then wait for for ever.
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False,
                              timeout=timedelta(seconds=GROUP_S), master_listen_fd=door.detach())
    deadline = time.monotonic() + patience_s
    said = [{"lost": True} if rank == lost else _hear(pipe, deadline) for rank, (_, pipe) in enumerate(ranks)]
    for process, pipe in ranks:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(pipe)
    del store  # it has served the ranks until here
    return said


def _fork(act: Callable[[], dict[str, Any]], rank: int, world: int, port: int) -> tuple[int, int]:
    heard, say = os.pipe()
    process = os.fork()
    if process:
        os.close(say)
        return process, heard
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=GROUP_S))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=GROUP_S))
        answer = act()
    except BaseException as error:
        answer = {"raised": f"{type(error).__name__}: {error}"[:300]}
    os.write(say, json.dumps(answer).encode())
    os.close(say)
    while not answer.get("raised"):  # one that raised ends, as in training: its peers see that. The others stay, as
        signal.pause()  # a peer that is not done yet must not take their end for a failure
    os._exit(0)


def _hear(pipe: int, deadline: float) -> dict[str, Any]:
    raw = b""
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        got = os.read(pipe, 1 << 16)
        if not got:
            return dict(json.loads(raw)) if raw else {"raised": "its process ended"}
        raw += got
    return {"hangs": True}


def _limit_writes(rank: int, mishap: str) -> None:
    """Ranks but the first cannot write files; neither can rank 0 when its disk is full."""
    if rank or mishap == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _slow_storage(returned: mmap.mmap, world: int) -> None:
    """Rank 0's first sync takes until another rank has returned from its save too early, or a while."""
    real, waited = os.fsync, list[int]()

    def slow(file: Any) -> None:
        deadline = time.monotonic() + (0.0 if waited else _SLOW_S)
        waited.append(1)
        while time.monotonic() < deadline and not any(returned[rank] for rank in range(1, world)):
            time.sleep(0.01)
        real(file)

    os.fsync = slow  # type: ignore[assignment]
