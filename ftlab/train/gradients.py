"""The gradients of one step, which all ranks agree on before any parameter changes.

Each rank collects what its pieces of the batch gave; after the last piece the ranks' sum takes its place, is judged,
and only then reaches the optimizer. The loss, the buffers that the forward pass changed and the news that a rank
failed ride along. Under DDP and FSDP the sum is theirs; it is judged all the same. Gradients of earlier steps, which a
loop that accumulates has left in place, are set aside meanwhile: they were averaged before.

An agreement that began and did not complete spoils the step, also if the train function caught the exception: `failure`
keeps it. A stamp of step and turn rides along, so that a rank which left out an agreement does not meet the others in
the wrong one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from operator import attrgetter

import torch
from torch import nn

from ftlab.config import JobConfig
from ftlab.elastic.group import GroupSevered
from ftlab.elastic.reduce import FlatGradients, sum_in_shard_order, sum_over_ranks
from ftlab.elastic.sampler import Piece, Seating, owned_shards
from ftlab.errors import RanksDiverged
from ftlab.health.numbers import gradient_norm
from ftlab.messages import Place
from ftlab.train.ddp import ElasticDDP
from ftlab.train.mending import StepSpoiled
from ftlab.train.session import Session
from ftlab.train.status import StatusPage

_REQUIRES_GRAD = attrgetter("requires_grad")
_STAMPS = 4096  # float32 counts that far, times the shards of any job
_UNFINISHED = GroupSevered("a collective of this step failed, and the train function went on")


class StepGradients:
    """Collects, agrees, judges and hands over; raises StepSpoiled when the step must not be committed."""

    def __init__(self, session: Session, page: StatusPage, config: JobConfig, seating: Callable[[], Seating]) -> None:
        assert session.mender is not None
        self._session, self._page, self._config, self._seating = session, page, config, seating
        self._state, self._mender = session.state, session.mender
        self._flat: FlatGradients | None = None
        self._of: list[nn.Parameter] = []  # all parameters, as it was made
        self._held: list[torch.Tensor | None] | None = None  # of earlier steps
        self._taken: list[torch.Tensor] = []  # of this step: one sum, or one for each shard
        self._agreed = False
        self._trained: list[bool] = []  # which of all parameters the flat gradients are of
        self.failure: Exception | None = None  # of this step's agreement, whoever caught it
        self.turn = 0  # how many agreements this step has begun
        self.cut: type[Exception] | None = None  # raised in place of an agreement: a rehearsal
        self.recording = False  # a rehearsal looks at this step: at its sums, and at when its collectives begin
        self.sums: list[torch.Tensor] = []
        self.touched = False  # parameters had changed when an agreement began
        self.count_at_begin = self.count_after = self.count_at_exit = -1  # collectives so far
        self.counted = 0  # those of the agreements
        self.judging = False  # whether numbers are looked at
        self.waited = 0.0  # for the other ranks, in this step

    def begin(self) -> None:
        """A step begins: nothing is collected yet."""
        self._held, self._taken = None, []
        self.waited, self._agreed = 0.0, False
        self.failure, self.turn = None, 0
        if self.cut or self.recording:
            self.sums, self.touched, self.counted = [], False, 0
            self.count_at_begin, self.count_after = self.collectives(), -1

    def backward(self, loss: torch.Tensor, piece: Piece | None, weight: float) -> None:
        """Compute the gradients of one piece, which is `weight` of the batch; after the last, agree on their sum."""
        if self._session.sharded is not None:  # FSDP averages the gradients while it computes them
            self._begin_agreement()
            (loss * (weight * self._session.world)).backward()
            if self.judging:
                self._judge_shards(loss)
            self.failure = None
            return
        if self._held is None:
            self.hold()
        if ElasticDDP.in_use(self._session):
            self._backward_under_ddp(loss, weight)
            return
        loss.backward()
        self.take(weight, piece, piece is None or piece.last, loss)

    def hold(self) -> None:
        """Set aside gradients of earlier steps, so that only this step's are averaged."""
        everything = self._state.all_parameters()
        trained = list(map(_REQUIRES_GRAD, everything))
        if self._flat is None or trained != self._trained or self._of is not everything:
            self._rebuild(everything, trained)
        assert self._flat is not None
        self._held = [parameter.grad for parameter in self._flat.parameters]
        for parameter in self._flat.parameters:
            parameter.grad = None

    def _rebuild(self, everything: list[nn.Parameter], trained: list[bool]) -> None:
        """The parameters may be others than before; if they are not those of the rehearsal, the loop is tested anew. A
        rank that replaced another one comes to the same answer."""
        if trained != self._trained or list(map(id, everything)) != list(map(id, self._of)):
            self._flat = None
        self._flat = self._flat or FlatGradients(self._state.parameters())
        self._trained, self._of = trained, everything
        self._mender.book.rehearse_again_if_other(self.trained_parameters())

    def trained_parameters(self) -> int:
        """A number for which of all parameters are trained."""
        shapes = [tuple(each.shape) for each in self._state.all_parameters()]
        return zlib.crc32(repr((self._trained, shapes)).encode())

    def drop_held(self) -> None:
        """Those of earlier steps are not wanted any more."""
        if self._held is not None:
            self._held = [None] * len(self._held)

    def take(self, weight: float, piece: Piece | None, last: bool, loss: torch.Tensor | None = None) -> None:
        """Take what a piece left in the parameters; after the last piece all ranks' sum is in its place."""
        assert self._flat is not None
        taken = self._flat.take(weight, self._state.changed_buffers(), loss)
        if not last:
            self._state.reset_buffers()
        if self._taken and not (self._config.exact and piece is not None and piece.part == 0):
            self._taken[-1] += taken  # of the same shard, or in any order
        else:
            self._taken.append(taken)
        if last:
            self._agree()

    def can_tell_failure(self) -> bool:
        """Whether the others still wait for this rank's gradients, where they would learn that it failed."""
        return not (self._agreed or self._flat is None or not self._flat.length or ElasticDDP.in_use(self._session))

    def tell_failure(self) -> None:
        """This rank has no gradients: the others learn it where they wait for them."""
        assert self._flat is not None
        if self.failure is not _UNFINISHED:  # the others have begun it, this rank has not
            self.turn += 1
        shards = len(owned_shards(self._seating())) if self._config.exact else 1
        self._sum([self._flat.take_failure() for _ in range(shards)])

    def _agree(self) -> None:
        assert self._flat is not None and self._held is not None
        self._begin_agreement()
        total = self._sum(self._taken)
        loss, failed = self._flat.read(total)
        if failed:
            self._spoil(StepSpoiled("oom", f"{failed} rank{'s' if failed > 1 else ''} ran out of memory"))
        if self.judging:
            self._judge(loss, total)
        if self.recording:
            self.sums.append(total[:self._flat.total].clone())
        self._flat.put(total, self._held, self._state.changed_buffers())
        self._taken, self._held, self._agreed = [], None, True
        self._end_agreement()

    def _begin_agreement(self) -> None:
        if self.cut is not None:
            if self._session.wrapped is not None:
                self._session.wrapped.unwrap()  # its backward pass is left out, as when a peer is lost
            self.failure = self.cut("the rehearsal cuts this step short here, as a lost peer would")
            raise self.failure
        if self.recording:
            self.touched = self.touched or self._state.touched()
        self.turn += 1
        self.failure = _UNFINISHED

    def _end_agreement(self) -> None:
        self.failure = None
        if self.recording:
            now = self.collectives()
            self.counted, self.count_after = self.counted + now - max(self.count_after, self.count_at_begin), now

    def _spoil(self, spoiled: StepSpoiled) -> None:
        self.failure = spoiled
        raise spoiled

    def _sum(self, flats: list[torch.Tensor]) -> torch.Tensor:
        assert self._flat is not None
        seating, exact = self._seating(), self._config.exact
        stamp = float((8 * self._state.step + self.turn) % _STAMPS)
        for flat in flats:
            self._flat.stamp(flat, stamp)
        self._wait_begins()
        total = sum_in_shard_order(flats, seating) if exact else sum_over_ranks(flats[0])
        self._wait_ends()
        if self._flat.read_stamp(total) != stamp * (seating.shards if exact else self._session.world):
            raise RanksDiverged(
                f"rank {self._session.rank} averages the gradients of step {self._state.step + 1} for the "
                f"{self.turn}. time, and some other rank those of another",
                hint="all ranks must call ctx.backward equally often in every step: skip a batch on all ranks or on "
                     "none (0 * loss keeps a rank in step)", step=self._state.step, tensors=[])
        return total

    def _judge(self, loss: float, total: torch.Tensor) -> None:
        """Look at what all ranks agreed on; in every step, so the good case is short."""
        assert self._flat is not None
        norm = self._flat.norm(total)
        if self._config.health.spikes or not math.isfinite(loss + norm):
            self._look(loss, norm if math.isfinite(norm) else gradient_norm(total[:self._flat.total]))

    def _look(self, loss: float | None, norm: float) -> None:
        try:
            self._mender.judge(loss, norm)
        except StepSpoiled as spoiled:
            self._spoil(spoiled)

    def _backward_under_ddp(self, loss: torch.Tensor, weight: float) -> None:
        assert self._flat is not None and self._held is not None
        if self._session.wrapped is not None and not self._session.wrapped.syncing:
            (loss * (weight * self._session.world)).backward()  # under no_sync: averaged with the next one
            return
        self._begin_agreement()
        self._wait_begins()
        (loss * (weight * self._session.world)).backward()
        self._agree_buffers(weight)
        self._wait_ends()
        if self.judging:  # of the loss each rank knows only its own part
            self._look(None, gradient_norm(each.grad for each in self._state.parameters()))
        if self.recording:
            self.sums += [each.grad.clone() for each in self._state.parameters() if each.grad is not None]
        for parameter, before in zip(self._flat.parameters, self._held, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before + parameter.grad
        self._held = None
        self._end_agreement()

    def _agree_buffers(self, weight: float) -> None:
        """What DDP leaves out: its ranks' BatchNorm statistics drift apart, and die with rank 0."""
        buffers = self._state.changed_buffers()
        if buffers:
            flat = sum_over_ranks(torch.cat([buffer.detach().reshape(-1) for buffer in buffers]) * weight)
            with torch.no_grad():
                for buffer, mean in zip(buffers, flat.split([each.numel() for each in buffers]), strict=True):
                    buffer.copy_(mean.view_as(buffer))

    def _judge_shards(self, loss: torch.Tensor) -> None:
        """Each rank sees only its part of the gradients: add up the squares of their norms."""
        norm = gradient_norm(getattr(each.grad, "_local_tensor", each.grad) for each in self._state.parameters())
        both = torch.tensor([float(loss.detach()) / self._session.world, norm * norm], dtype=torch.float64)
        self._wait_begins()
        sum_over_ranks(both)
        self._wait_ends()
        self._look(float(both[0]), float(both[1]) ** 0.5)

    def _wait_begins(self) -> None:
        self.waited -= self._page.move(Place.COMMUNICATING)

    def _wait_ends(self) -> None:
        self.waited += self._page.move(Place.COMPUTING)

    def collectives(self) -> int:
        """How many collectives the group has begun so far."""
        return self._session.group.collectives() if self._session.group is not None else 0
