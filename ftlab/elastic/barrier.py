"""Have all ranks come this far? A barrier every few batches that says who is missing.

    barrier = PeriodicBarrier(every=100, timeout_s=10)
    for batch, (x, y) in enumerate(loader):
        barrier.check(batch)
        ...

`dist.barrier` cannot say who did not come, and with gloo it has no deadline of its own. Here the ranks meet through
the group's store: each writes that it has arrived, the last one writes "all", and whoever runs out of patience first
writes the names of those who are missing. The first of these verdicts stands for everybody (`compare_set`), so no rank
goes on while another one stops, and all name the same ranks; a rank that comes later is told that it is one of them.

Where it stops: ranks must make and check their barriers alike. It finds a dead rank only after `timeout_s`; a broken
connection or a heartbeat tells within milliseconds. And if the process that hosts the store is the one that died
(rank 0, unless an agent or a controller hosts it), nobody can be named: `ranks` is empty then.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ftlab.errors import ConfigError, MissingRanks

_GRACE_S = 2.0  # for the store to answer once the deadline is over
_ASK_S, _ASK_RARELY_S = 0.0005, 0.02  # between two looks for the verdict, at first and after a while
_PREFIX = "ftlab-barrier"


class PeriodicBarrier:
    """All ranks of a group meet every so many batches, or learn who did not come."""

    def __init__(self, every: int = 100, timeout_s: float = 10.0, store: Any = None, group: Any = None) -> None:
        if every < 1:
            raise ConfigError(f"every must be at least 1 batch (got {every})")
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s must be positive: nobody arrives at the same instant (got {timeout_s})")
        if not dist.is_initialized():
            raise ConfigError("there is no process group whose ranks could meet",
                              hint="make the barrier after dist.init_process_group")
        self.every, self.timeout_s = every, timeout_s
        self._ranks: list[int] = dist.get_process_group_ranks(group)
        if dist.get_rank() not in self._ranks:
            raise ConfigError(f"rank {dist.get_rank()} is not in the group of ranks {self._ranks}",
                              hint="only the members of a group meet")
        self._place = self._ranks.index(dist.get_rank())
        self._meeting = _Meeting(_store_of(group) if store is None else store, self._place, len(self._ranks))

    def check(self, batch: int) -> bool:
        """Meet the other ranks if `batch` is a multiple of `every`, and say whether it was one.

        Batch 0 is none: ranks take different times to start. Raises MissingRanks with `ranks` and `timeout_s` on every
        rank, those that come later included, if some have not arrived `timeout_s` after the first.
        """
        if batch == 0 or batch % self.every:
            return False
        try:
            places = _with_deadline(self._meeting, self.timeout_s)
        except (RuntimeError, TimeoutError) as error:  # torch's store errors are RuntimeErrors
            raise self._unreachable(batch, error) from error
        if places:
            raise self._missing(batch, places)
        return True

    def _missing(self, batch: int, places: list[int]) -> MissingRanks:
        ranks = [self._ranks[place] for place in places]
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        late = " (this rank is one of them: it came too late)" if self._place in places else ""
        return MissingRanks(
            f"{names} of {len(self._ranks)} did not come to the barrier at batch {batch} within {self.timeout_s:g} s",
            seen=f"{len(self._ranks) - len(ranks)}/{len(self._ranks)} ranks arrived{late}",
            hint="look at the log of the missing; raise timeout_s if a batch may take so long",
            ranks=ranks, timeout_s=self.timeout_s)

    def _unreachable(self, batch: int, error: Exception) -> MissingRanks:
        said = str(error).splitlines()[0] if str(error) else "no answer"
        return MissingRanks(f"the store through which ranks meet is gone at batch {batch}: nobody can be named",
                            seen=said, hint="its host, usually rank 0, has died or hangs",
                            ranks=[], timeout_s=self.timeout_s)


class _Meeting:
    """The talk with the store. Keys of a round: `<round>/here/<place>`, `<round>/count`, `<round>/verdict`."""

    def __init__(self, store: Any, place: int, world: int) -> None:
        self._shared, self._place, self._world = store, place, world
        self._store: Any = None
        self._round = 0

    def meet(self, timeout_s: float) -> list[int]:
        """The places of those who did not come; empty when all are here."""
        if self._store is None:
            self._store = self._open()
        self._round += 1
        self._store.set(self._key("here", self._place), "1")
        if self._store.add(self._key("count"), 1) == self._world:
            verdict = self._decide([])
            self._tidy_up()
        else:
            verdict = self._await(timeout_s)
        self._forget(self._round - 1, "here", self._place)
        return verdict

    def _open(self) -> Any:
        """A connection of our own: a wait on the shared one would block everybody else who uses it."""
        own = self._shared.clone()
        number = own.add(f"{_PREFIX}/made-by-{self._place}", 1)  # ranks make their barriers in the same order
        return dist.PrefixStore(f"{_PREFIX}/{number}", own)

    def _await(self, timeout_s: float) -> list[int]:
        """The verdict once there is one, our own when the time is over. Asks again and again rather than `wait`: when
        a wait of torch's store runs out just as its answer comes, the connection can be stuck for seconds."""
        key, deadline, pause_s = self._key("verdict"), time.monotonic() + timeout_s, _ASK_S
        while not self._store.check([key]):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return self._decide([place for place in range(self._world)
                                     if not self._store.check([self._key("here", place)])])
            time.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, _ASK_RARELY_S)
        return _read(self._store.get(key))

    def _decide(self, missing: list[int]) -> list[int]:
        """Write a verdict, unless there is one; the one that stands."""
        return _read(self._store.compare_set(self._key("verdict"), "", json.dumps(missing)))

    def _tidy_up(self) -> None:
        """All have arrived, so all have read the last round's verdict."""
        self._forget(self._round - 1, "count")
        self._forget(self._round - 1, "verdict")

    def _forget(self, number: int, *parts: Any) -> None:
        if number > 0:
            self._store.delete_key("/".join(map(str, (number, *parts))))

    def _key(self, *parts: Any) -> str:
        return "/".join(map(str, (self._round, *parts)))


def _read(verdict: bytes) -> list[int]:
    return [int(place) for place in json.loads(verdict)]


def _store_of(group: Any) -> Any:
    if group is None:
        return distributed_c10d._get_default_store()
    return distributed_c10d._get_process_group_store(group)


def _with_deadline(meeting: _Meeting, timeout_s: float) -> list[int]:
    """The outcome of a meeting, held in a thread of its own: a store whose host is stopped never answers, whatever
    timeout it was given. Such a thread is left behind, asleep, on a connection that nobody else uses."""
    outcome: Future[list[int]] = Future()
    threading.Thread(target=_deliver, args=(outcome, meeting, timeout_s), name="ftlab-barrier", daemon=True).start()
    return outcome.result(timeout_s + _GRACE_S)


def _deliver(outcome: Future[list[int]], meeting: _Meeting, timeout_s: float) -> None:
    try:
        outcome.set_result(meeting.meet(timeout_s))
    except BaseException as error:  # the thread's outer edge: the caller raises it
        outcome.set_exception(error)
