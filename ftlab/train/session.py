"""A worker's membership in the training world, from one generation to the next.

`join` is the worker's side of a recovery: wait for a seat, restore the group (agent, store, load_ranktable, connect),
then the training (strategy, rollback_data, send_state / receive_state, load_data). Every step is timed. A failure
anywhere in it (the next peer dies, the sender dies in mid-transfer) drops the half-built group and waits for the next
generation: nothing is taken over from a transfer that did not finish and verify.

The data is rolled back before the state is sent, so that what is sent is exactly the committed step.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ftlab import messages
from ftlab.checkpoint import ranks, tree
from ftlab.checkpoint.parts import raised_in_part
from ftlab.checkpoint.state import TrainingState, differences
from ftlab.checkpoint.state_copy import StateCopy
from ftlab.elastic import transfer
from ftlab.elastic.group import Group, GroupSevered
from ftlab.errors import FtlabError, ModelMismatch, StateLost
from ftlab.health.memory import is_out_of_memory
from ftlab.membership import RankTable
from ftlab.messages import Place
from ftlab.policy import Rollback
from ftlab.train.ladder import Ladder, Note
from ftlab.train.link import WorkerLink, in_collective
from ftlab.train.mending import Book, Mender
from ftlab.train.own import OwnManager
from ftlab.train.rank_comparison import RankComparison
from ftlab.train.saver import Saver
from ftlab.train.sharded import ShardedJob
from ftlab.train.status import StatusPage
from ftlab.train.user_error import own_error


class Released(BaseException):
    """The job is over and the worker may end; never seen by the train function's own handlers."""


class StateDamaged(RuntimeError):
    """Received state does not match its digest."""


class Wrapper(Protocol):
    """What a train function wraps its model in, and what holds on to the group."""

    syncing: bool  # whether a backward pass averages gradients

    def unwrap(self) -> None:
        """Let go of the group."""


class Session:
    """Where this worker sits, the group it trains in, and how it gets into the next one."""

    def __init__(self, link: WorkerLink, page: StatusPage, node: str, local_rank: int, ladder: Ladder) -> None:
        self.link, self.page, self.node, self.local_rank, self.ladder = link, page, node, local_rank, ladder
        own = ladder.slots[:len(ladder.slots) // 2]  # the others hold replicas
        self.saver: Saver | OwnManager | None = (
            Saver(ladder.config, link, ladder.job, own, ladder.busy) if ladder.config else None)
        self._own: OwnManager | None = None
        self.sharded: ShardedJob | None = None  # set by ctx.sharded
        self.state = TrainingState()
        self.comparison = RankComparison(self.state, ladder.config)
        self.group: Group | None = None
        self.table: RankTable | None = None
        self.rank = -1
        self.settled = 0  # the generation whose state it has: it trains in it until it ends; 0: it must join one
        self.source = ""
        self._holds = False  # the state of a committed step, or the agreed initial one
        self._carried: StateCopy | None = None  # the state, while the train function makes its parts anew
        self._spans: list[list[object]] = []
        self._started = time.monotonic()
        link.waits_for_peers = lambda: page.place == Place.COMMUNICATING or in_collective()
        self._parked = False
        self._secret = b""  # of the generation: members prove it to each other when state travels
        self._trained = False  # the job has committed steps
        self._condemn = ""  # why the checkpoint that was loaded last is not to be used again
        self._back_to = -1  # the step to go back to, or before it; -1: nowhere
        self._split = False  # a worker was killed for memory before this generation
        self.mender: Mender | None = None  # set by the worker
        self.wrapped: Wrapper | None = None  # an ElasticDDP, if the train function made one

    def use(self, manager: OwnManager) -> None:
        """Save and load with a manager of the user's."""
        self.saver = self._own = manager

    @property
    def generation(self) -> int:
        """The generation this worker last had a seat in; 0 before the first."""
        return self.table.generation if self.table else 0

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.table.world if self.table else 0

    def join_group(self) -> None:
        """Block until this worker has a seat and its group is connected."""
        self._notice_end()
        while self.group is None:
            self._park()
            seat = self.link.wait_for_join(self.generation)
            if seat is None:
                raise Released
            try:
                self._connect(*seat)
            except Exception as error:
                if not self.lost(error):
                    raise

    def join(self) -> None:
        """Block until this worker has a seat, a group, and the newest state."""
        while True:
            self.join_group()
            if self.settled:
                return
            try:
                self._synchronise()
                return
            except Exception as error:
                if raised_in_part(error):
                    self._require_broken(error)
                if not self.lost(error):
                    raise

    def lost(self, error: Exception) -> bool:
        """Whether an exception means that the world broke; if so, let go of the group and report it."""
        if isinstance(error, FtlabError):
            return False
        connecting = self.group is not None and not self.settled
        broken = self.group is not None and (self.link.over(self.generation) or self.group.broken())
        if not (broken or connecting or isinstance(error, GroupSevered | StateDamaged)):
            return False
        self._leave(f"{type(error).__name__}: {str(error)[:300]}")
        return True

    def rewind(self, back: Rollback, reason: str) -> None:
        """Give up the present state, as all ranks do: the next generation begins from an older checkpoint."""
        assert self.mender is not None
        self._condemn = reason if back.condemn else ""
        self._back_to = max(0, self.state.step - back.steps)
        self._leave(reason, rewind=True)
        self._holds = False

    def begin_anew(self) -> bool:
        """The train function is called once more: forget its parts, and carry the state over to those it makes then.
        False where that cannot be: sharded state lies in the parts themselves."""
        held = self._undo() and self._holds
        if self.sharded is not None or (self.group is not None and not held):
            return False
        if held:
            self._carried = StateCopy()
            self._carried.take(self.state)
        self.state.forget()
        self._holds, self.wrapped = False, None
        if self.group is None:
            self.table = None
        return True

    def take_over(self) -> None:
        """Give the parts that were made anew the state that was carried over."""
        if self._carried is not None:
            self._carried.put_back(self.state)
            self._holds, self._carried = True, None

    def newest_saved(self) -> int | None:
        """The step of the newest good checkpoint in storage, if there is one."""
        if self.ladder.config is None:
            return None
        return next((entry.step for entry in self.ladder.candidates() if entry.good), None)

    def first_step_done(self, at: float) -> bool:
        """Whether this was a generation's first step; if so, report what its recovery took."""
        if not self._spans:
            return False
        self._spans.append(["first_step", self._spans[-1][2], at])
        self._send_spans(complete=True)
        return True

    def wait_out(self) -> None:
        """After the train function: wait for the end of the job, or take part in one more recovery and return."""
        self._notice_end()
        if self.group is not None:
            self.link.wait_for_end(self.generation)
        if self.link.released:
            raise Released
        self.join()
        if self._spans:
            self._send_spans(complete=True)

    def _notice_end(self) -> None:
        if self.group is not None and self.link.over(self.generation):
            self._leave("generation ended")

    def _leave(self, reason: str, rewind: bool = False) -> None:
        """Tell the controller first (it waits for that), then take the group apart."""
        self.page.move(Place.RECOVERING)
        self._holds = self._undo() and self._holds
        self.link.send(messages.Stopped(generation=self.generation, step=self.state.step, at=time.monotonic(),
                                        reason=reason, rewind=rewind))
        if rewind:  # the others may still be hearing of it: who leaves before they have would take their last message
            self.link.wait_for_end(self.generation)
        if self._spans:
            self._send_spans(complete=False)
        group, self.group, self.settled = self.group, None, 0
        self.link.holds.begun = -1
        self.link.watch(None)
        if self.wrapped is not None:
            self.wrapped.unwrap()
        if group:
            with contextlib.suppress(RuntimeError):
                group.close()

    def _park(self) -> None:
        self.page.move(Place.RECOVERING if self._holds else Place.PARKED)
        if not self._parked:
            self._parked = True
            self.link.send(messages.Parked(seconds=time.monotonic() - self._started))

    def _connect(self, join: messages.Join, arrived: float) -> None:
        self._spans = []
        with self._span("agent", begin=arrived):
            table = RankTable.from_dict(join.table)
        rank = next(seat.rank for seat in table.seats if (seat.node, seat.local_rank) == (self.node, self.local_rank))
        self.table, self.rank = table, rank
        self.page.generation, self.page.rank = table.generation, rank
        self.ladder.generation = table.generation
        self.page.move(Place.RECOVERING)
        self.group = Group(table, rank, (join.store[0], join.store[1]))
        self._secret, self._trained, self._split = join.secret.encode(), join.step > 0, join.split
        self.link.watch(self.group)
        if self.link.over(table.generation):
            raise GroupSevered("this generation is already over")
        with self._span("store"):
            self.group.open_store()
        with self._span("load_ranktable"):
            self._check_table(table)
        with self._span("connect"):
            self.group.connect()

    def _check_table(self, table: RankTable) -> None:
        """All members must have loaded the very same table: agreed through the store, before anybody connects."""
        assert self.group is not None
        digest = str(zlib.crc32(repr(table).encode()))
        first = self.group.store.compare_set(f"table-{table.generation}", "", digest).decode()
        if first != digest:
            raise GroupSevered(f"rank table of generation {table.generation} differs between members")

    def _synchronise(self) -> None:
        if self.ladder.config is not None and not self._trained:  # once, before the first step
            ranks.check_shared(self.ladder.vault.storage, f"{self.ladder.job}{self.generation:x}")
        if self.sharded is not None:
            self._synchronise_sharded(self.sharded)
            return
        self.take_over()
        self._holds = self._undo() and self._holds  # code behind a step that failed has run since
        with self._span("strategy"):
            holders, receivers = self._strategy()
        if self.rank in holders:
            with self._span("rollback_data"):
                self._climb_down()
        for sender, receiver in transfer.plan_transfers(holders, receivers):
            if self.rank == sender:
                self._send_state(receiver)
            elif self.rank == receiver:
                self._receive_state(sender)
        self._settle()

    def _settle(self) -> None:
        """The state is there: training can go on, once all ranks remember the same."""
        assert self.mender is not None
        books = ranks.gather_different(self.mender.book.notes)
        if books:
            self.mender.book = Book.of_all([Book(notes) for notes in books])
        if self._split:
            self.mender.book.split()
        self.state.copying = bool(self.mender.book.notes.get("rehearsed", {}).get("copying"))
        self.comparison.begin_generation()
        self._back_to, self._split, self._condemn = -1, False, ""
        self._holds, self.settled = True, self.generation
        self.page.step = self.state.step  # told with the next move: who was given a state holds it before it commits

    def _synchronise_sharded(self, job: ShardedJob) -> None:
        try:
            with self._span("strategy"):
                job.build(self.state, self.world)
            with self._span("load_data"):
                self.source, notes = job.restore(self.state, self.ladder, self.rank, self.world, self._trained)
        except Exception as error:
            self._require_broken(error)
            raise
        unsaved = job.warn_unsaved(self.state.step) if self.ladder.config is None and self.rank == 0 else []
        self._tell([*unsaved, *notes])
        self._settle()

    def _require_broken(self, error: Exception) -> None:
        """An error of the train function's own code, while the world is whole, ends the job with its traceback: trying
        again would raise it again. Memory that ran out may be there the next time."""
        whole = self.group is not None and not self.group.broken() and not self.link.over(self.generation)
        if is_out_of_memory(error):
            raise error
        if whole and not isinstance(error, FtlabError | dist.DistError):
            raise own_error(error, self.rank, self.node) from error

    def _undo(self) -> bool:
        """Undo what the unfinished step changed; False if that cannot be."""
        try:
            return self.state.rollback()
        except Exception as error:
            if isinstance(error, FtlabError) or is_out_of_memory(error):
                raise
            raise own_error(error, self.rank, self.node) from error

    def _tell(self, notes: Sequence[Note]) -> None:
        for event, step, facts in notes:
            self.link.send(messages.Noted(job=self.ladder.job, event=event, step=step, data=facts))

    def _strategy(self) -> tuple[list[int], list[int]]:
        """Who holds the newest committed step, who needs it; the same answer on every rank."""
        signature = self.state.signature()
        mine = torch.tensor([self.state.step if self._holds else -1, zlib.crc32(repr(signature).encode()),
                             self.state.step, self.ladder.memory_step, self._back_to, self._loop()])
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(rows, mine)
        if len({int(row[1]) for row in rows}) > 1:
            self._explain_mismatch(signature)
        newest = max(int(row[0]) for row in rows)
        latest = max(int(row[5]) for row in rows if int(row[0]) == newest)  # some may have run what follows a loop
        holders = [rank for rank, row in enumerate(rows) if (int(row[0]), int(row[5])) == (newest, latest)]
        holders = holders if newest >= 0 else [0]
        self.source = "live" if newest >= 0 else "initial"
        if newest < 0 and self._own is not None:
            holders = self._load_own(self._own, self._trained or any(int(row[2]) for row in rows))
            return holders, [rank for rank in range(self.world) if rank not in holders]
        back = [rank for rank, row in enumerate(rows) if int(row[4]) >= 0]
        if back:  # also when the world broke before all had heard that they are to go back
            self._back_to = min(int(rows[rank][4]) for rank in back)
            holders, self.source = back[:1], "storage"
        elif newest < 0:
            kept = [int(row[3]) for row in rows]
            holders, self.source = self.ladder.choose(kept, self._trained or any(int(row[2]) for row in rows))
        return holders, [rank for rank in range(self.world) if rank not in holders]

    def _loop(self) -> int:
        return self.mender.book.loop if self.mender is not None else 0

    def _load_own(self, own: OwnManager, trained: bool) -> list[int]:
        """All ranks load with the user's manager; those that hold the state then."""
        try:
            mine = torch.tensor([own.load(self.state)])
        except Exception as error:
            self._require_broken(error)
            raise
        steps = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(steps, mine)
        found = [int(step) for step in steps]
        if len(set(found)) > 1:
            raise StateLost(f"the checkpoint manager loaded different steps on different ranks: {found}",
                            hint="all ranks must load the same checkpoint: let rank 0 choose")
        if found[0] < 0 and trained:
            raise StateLost("no rank holds a committed step any more, and the checkpoint manager found no checkpoint")
        if found[0] < 0:
            return [0]
        self.source = "storage"
        if self.rank == 0:
            self._tell(own.loaded(found[0]))
        return list(range(self.world))

    def _climb_down(self) -> None:
        """Nobody lives who holds the state: take it from the rung that was chosen."""
        if self.source in ("memory", "storage") and self._own is None:  # its manager has already loaded
            if self._condemn and self.mender is not None:  # only here: one rank goes back, and it has heard why
                self._tell(self.ladder.condemn(str(self.mender.book.notes.get("loaded", "")), self._condemn))
            at_most = self._back_to if self._back_to >= 0 else None
            notes = self.ladder.load(self.source, self.state, self._trained, at_most)
            self._tell(notes)
            for event, step, facts in notes:
                if event == "checkpoint.loaded" and self.mender is not None:
                    self.mender.book.loaded(str(facts["name"]), step)

    def _explain_mismatch(self, signature: list[list[object]]) -> None:
        everyone: list[list[list[object]] | None] = [None] * self.world
        dist.all_gather_object(everyone, signature)
        lines = [f"rank {rank}: {line}" for rank, other in enumerate(everyone) if other
                 for line in differences(everyone[0] or [], other)]
        raise ModelMismatch("the model differs between ranks (here: rank 0, there: the named rank)",
                            seen="\n        ".join(lines[:10]),
                            hint="build the same model on every rank: its shape must not depend on ctx.rank")

    def _send_state(self, receiver: int) -> None:
        assert self.group is not None and self.table is not None
        with self._span("send_state"):
            captured = self.state.capture()
            packed = tree.pack(captured)
            transfer.send(transfer.Parcel(tree.digest(captured), packed.header, packed.tensors),
                          self.table.seats[self.rank].address, self.group.store,
                          self._transfer_key(self.rank, receiver), self._secret, self.group)

    def _receive_state(self, sender: int) -> None:
        assert self.group is not None
        with self._span("receive_state"):
            parcel = transfer.receive(self.group.store, self._transfer_key(sender, self.rank), self._secret, self.group,
                                      tree.empty_tensors)
            captured = tree.unpack(tree.Packed(parcel.header, list(parcel.tensors)))
            if tree.digest(captured) != parcel.digest:
                raise StateDamaged(f"state from rank {sender} does not match its digest")
        with self._span("load_data"):
            self.state.restore(captured)

    def _transfer_key(self, sender: int, receiver: int) -> str:
        return f"state-{self.generation}-{sender}-{receiver}"

    @contextlib.contextmanager
    def _span(self, name: str, begin: float | None = None) -> Iterator[None]:
        begin = time.monotonic() if begin is None else begin
        yield
        self._spans.append([name, begin, time.monotonic()])

    def _send_spans(self, *, complete: bool) -> None:
        self.link.send(messages.Spans(generation=self.generation, spans=self._spans, complete=complete,
                                      source=self.source))
        self._spans = []
