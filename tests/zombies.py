"""A writer that is stopped in the middle of a save, given up, replaced, and continued: what it may not do.

The job of the tests has generation 1, which saves step 3 and is stopped, and generation 2, which takes over and saves
on. Both keep two checkpoints.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from ftlab.checkpoint import tree
from ftlab.checkpoint.arena import Slot
from ftlab.checkpoint.fence import take_over
from ftlab.checkpoint.saving import SaveOrder
from ftlab.checkpoint.storage import open_storage
from ftlab.checkpoint.vault import Vault
from ftlab.checkpoint.writer import write_and_report

JOB, KEEP = "abc", 2
Told = list[tuple[str, dict[str, Any]]]


class Writer:
    """Saves as the agent of a node does, for one generation."""

    def __init__(self, url: str, generation: int) -> None:
        self.vault, self.generation = Vault(open_storage(url)), generation
        self.slot, self.told = Slot(), Told()

    def save(self, step: int) -> None:
        """A small state whose tensor holds its step."""
        filled = self.slot.fill(tree.pack({"step": step, "weight": torch.full((300,), float(step))}))
        order = SaveOrder(step=step, tag=f"{JOB}g{self.generation:x}", bytes=filled.bytes, generation=self.generation,
                          header_bytes=filled.header_bytes)
        write_and_report(self.vault, order, self.slot.view(filled.bytes), keep=KEEP, timeout_s=5,
                         report=lambda kind, **facts: self.told.append((kind, facts)))

    def good(self) -> list[tuple[int, str]]:
        """Step and folder of all that would be loaded, the newest first; all of it was read."""
        entries = [entry for entry in self.vault.entries() if self.vault.verify(entry.name).good]
        for entry in entries:
            assert entry.manifest is not None
            [saved] = [tree.unpack(self.vault.read_shard(entry.name, shard)) for shard in entry.manifest.shards]
            assert saved["step"] == entry.step and saved["weight"].eq(entry.step).all(), "one state, not parts of two"
        return [(entry.step, entry.name) for entry in entries]


def first_generation(url: str) -> None:
    """Two checkpoints, of steps 1 and 2."""
    writer = Writer(url, 1)
    for step in (1, 2):
        writer.save(step)


def save_when_told(url: str, word: Connection) -> None:
    """The writer that is to be stopped, in a process of its own: saves step 3, and says what it would have reported."""
    writer = Writer(url, 1)
    word.send("ready")
    word.recv()
    writer.save(3)
    word.send(writer.told)


def save_on_s3(url: str, word: Connection, environment: dict[str, str], stop: int, changes: bool) -> None:
    """The same on S3: it stops itself, at moment 1 before its first request, at 2 after it, and so on. With `changes`
    only requests count that change something."""
    from aiobotocore.client import AioBaseClient

    os.environ.update(environment)
    moments, call = itertools.count(1), AioBaseClient._make_api_call

    async def stopping(self: Any, operation: str, *args: Any) -> Any:
        if changes and not operation.startswith(("Put", "Delete")):
            return await call(self, operation, *args)
        if next(moments) == stop:
            stop_here()
        answer = await call(self, operation, *args)
        if next(moments) == stop:
            stop_here()
        return answer

    writer = Writer(url, 1)
    AioBaseClient._make_api_call = stopping
    writer.save(3)
    word.send(writer.told)


def replace(url: str, steps: Sequence[int]) -> tuple[Writer, list[tuple[int, str]]]:
    """The next generation takes over, and saves on; its writer, and what there was to load when it had taken over."""
    writer = Writer(url, 2)
    take_over(writer.vault.storage, JOB, 2)
    found = writer.good()
    for step in steps:
        writer.save(step)
    assert [kind for kind, _ in writer.told].count("checkpoint.committed") == len(steps)
    return writer, found


def check(writer: Writer, found: list[tuple[int, str]], before: list[tuple[int, str]], told: Told,
          steps: Sequence[int]) -> bool:
    """After the zombie has come to its end: nothing that counts has changed; whether it had committed in time."""
    in_time = 3 in [step for step, _ in found]
    kinds = [kind for kind, _ in told]
    assert kinds[:1] in ([["checkpoint.refused"]] if not in_time else  # or the folder was retired before its sync
                         [["checkpoint.committed"], ["checkpoint.refused"]]), told
    after = writer.good()
    assert after[:KEEP] == before[:KEEP], "the newest are those that there were"
    assert set(after) <= set(before), "nothing was added"
    if not in_time:
        assert after == before, "and nothing removed: what was given up does not clear up"
    assert {entry.status for entry in writer.vault.entries()} <= {"good", "incomplete", "damaged", "set aside"}
    writer.save(max([3, *steps]) + 1)
    statuses = [entry.status for entry in writer.vault.entries()]
    assert statuses.count("good") == KEEP and set(statuses) <= {"good", "set aside"}, "the next save clears up"
    return in_time


def stop_here() -> None:
    """Stop this process, all its threads, as somebody else's SIGSTOP would."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # os.kill may let this thread go on for a moment
