"""The train context: what a train function is given, and all it needs to survive.

The loop stays a normal loop. A fault inside `with ctx.step()` is healed there: the exception is swallowed, the worker
takes its seat in the next generation, and `ctx.steps` hands out the same step again. Collectives belong inside
`with ctx.step()`: one that fails outside of it is an error of the train function.

A hot spare runs the same function up to the first thing that needs a rank, and waits there. `ctx.rank` needs one, so
ask for it after the expensive set-up, not before.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ftlab.checkpoint.state import TrainingState
from ftlab.config import JobConfig
from ftlab.elastic.reduce import FlatGradients, sum_in_shard_order, sum_over_ranks
from ftlab.elastic.sampler import GlobalSampler, Piece, Seating
from ftlab.elastic.seeding import seed_step
from ftlab.errors import ConfigError
from ftlab.messages import RESERVED_VALUES, Place
from ftlab.train.ddp import ElasticDDP
from ftlab.train.session import Session
from ftlab.train.sharded import Build, ShardedJob, ShardedParts
from ftlab.train.status import StatusPage


class TrainContext:
    """Hands out steps, averages gradients and keeps the protected state alive across failures."""

    def __init__(self, session: Session, page: StatusPage, config: JobConfig) -> None:
        self._session, self._page, self.config = session, page, config
        self._state: TrainingState = session.state
        self._flat: FlatGradients | None = None
        self._step = _Step(self)
        self._running = False
        self._stepped = False  # the loop body has used ctx.step()
        self._shards = config.shards
        self._seat: Seating | None = None  # of this generation
        self._values: dict[str, Any] = {}
        self._samples: torch.Tensor | None = None
        self._piece: Piece | None = None
        self._held: list[torch.Tensor | None] | None = None
        self._taken: list[torch.Tensor] = []
        self._batch = 0

    # ---- who am I ------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's number in the present generation; waits for one if there is none yet."""
        self._need_seat()
        return self._session.rank

    @property
    def world_size(self) -> int:
        """How many ranks train in the present generation; waits for a rank if there is none yet."""
        self._need_seat()
        return self._session.world

    @property
    def generation(self) -> int:
        """The number of the present membership; 0 before the first."""
        return self._session.generation

    @property
    def node(self) -> str:
        """The name of the node this worker runs on."""
        return self._session.node

    @property
    def committed(self) -> int:
        """How many steps are committed."""
        return self._state.step

    # ---- what must survive ---------------------------------------------------------------------------------

    def protect(self, **parts: Any) -> None:
        """Name what must survive: model and optimizer, and scheduler, scaler, dicts or anything with a state_dict."""
        if self._running:
            raise ConfigError("ctx.protect must come before the loop over ctx.steps",
                              hint="the other ranks already train without it")
        self._state.protect(parts)

    def ddp(self, module: nn.Module, **options: Any) -> ElasticDDP:
        """The module under DistributedDataParallel, wrapped anew in each generation."""
        return ElasticDDP(module, self._session, options)

    def sharded(self, build: Build) -> ShardedParts:
        """Parts that are spread over the ranks (FSDP2): `build(mesh)` makes them, anew in each generation, and returns
        them as a dict; use them as attributes of what this returns, inside the loop only."""
        if self.config.exact:
            raise ConfigError("exact=True needs whole gradients on every rank: it does not go with ctx.sharded")
        self._session.sharded = ShardedJob(build, self.config.seed)
        return self._session.sharded.parts

    def sampler(self, size: int, global_batch: int, *, seed: int | None = None, shuffle: bool = True) -> GlobalSampler:
        """Sample ids for each step as a function of seed and step, cut to this rank's share."""
        self._batch = global_batch
        return GlobalSampler(size, global_batch, seed=self.config.seed if seed is None else seed, shuffle=shuffle,
                             seating=self._seating, on_piece=self._on_piece(global_batch))

    # ---- the loop ------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps still to do, up to `total`; a step that failed comes again."""
        if not self._state.modules and self._session.sharded is None:
            raise ConfigError("nothing is protected",
                              hint="ctx.protect(model=model, optimizer=optimizer) before the loop")
        self._running = True
        state, session = self._state, self._session
        while True:
            if not session.undisturbed:
                session.join()
                self._seat = None
            step = state.step
            if step >= total:
                return
            self._begin(step)
            yield step
            if not self._stepped:
                raise ConfigError(f"step {step} ended without `with ctx.step():`",
                                  hint="put the body of the loop into `with ctx.step():`")

    def step(self) -> _Step:
        """The body of one step: committed when it ends, healed and run again when the world breaks in it."""
        return self._step

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients and average them over the group, weighted by each rank's share of the global batch."""
        if self._session.sharded is not None:  # FSDP averages the gradients while it computes them
            (loss * (self._weight(self._piece) * self._session.world)).backward()
            return
        if self._held is None:
            self._hold_gradients()
        piece, wrapped = self._piece, ElasticDDP.in_use(self._session)
        if wrapped:
            self._page.move(Place.COMMUNICATING)
            (loss * (self._weight(piece) * self._session.world)).backward()
            self._agree_buffers(self._weight(piece))
            self._page.move(Place.COMPUTING)
            self._give_back_held()
            return
        loss.backward()
        last = piece is None or piece.last
        self._collect(self._weight(piece), last)
        if last:
            self._agree()

    def report(self, **values: Any) -> None:
        """Numbers that belong to this step, such as loss=loss; recorded when the step is committed."""
        taken = RESERVED_VALUES.intersection(values)
        if taken:
            raise ConfigError(f"ctx.report cannot record {', '.join(sorted(taken))}: a step has a field of that name")
        self._values.update(values)

    def _need_seat(self) -> None:
        if self._session.table is None:  # never in mid-step: the step must end in the world it began in
            self._session.join_group()

    # ---- inside a step -------------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        self._stepped = False
        self._values, self._samples, self._piece, self._held, self._taken = {}, None, None, None, []
        self._state.mark()
        here = self._seating()
        seed_step(self.config.seed, step, here.rank * here.shards // here.world)

    def _enter(self) -> None:
        if not self._running:
            raise ConfigError("ctx.step() outside of a loop over ctx.steps(n)")
        self._stepped = True
        self._page.move(Place.COMPUTING)

    def _commit(self) -> None:
        state, session = self._state, self._session
        at = time.monotonic()
        state.commit()
        self._page.commit(state.step, at)
        first = session.first_step_done(at)
        ids = self._samples if self.config.record_samples else None
        session.link.note_step({
            "generation": session.generation, "step": state.step, "at": at,
            "values": {name: float(value.detach() if isinstance(value, torch.Tensor) else value)
                       for name, value in self._values.items()},
            "samples": None if ids is None else ids.tolist(),
            "digest": 0 if ids is None else zlib.crc32(ids.numpy().tobytes())}, urgent=first)
        if session.saver is not None:
            session.saver.after_step(session)

    def _seating(self) -> Seating:
        if self._seat is None:
            session = self._session
            if self._shards is None and self.config.exact:
                self._shards = session.world
            self._seat = Seating(session.rank, session.world, self._shards or session.world)
        return self._seat

    def _on_piece(self, global_batch: int) -> Any:
        def remember(step: int, piece: Piece, ids: torch.Tensor) -> None:
            self._piece, self._samples, self._batch = piece, ids, global_batch
            if self.config.exact:
                seed_step(self.config.seed, step, piece.shard)
        return remember

    def _weight(self, piece: Piece | None) -> float:
        return len(piece.ids) / self._batch if piece else 1.0 / self._session.world

    def _hold_gradients(self) -> None:
        """Set aside gradients of earlier steps, so that only this step's are averaged."""
        if self._flat is None:
            self._flat = FlatGradients(self._state.parameters())
        self._held = [parameter.grad for parameter in self._flat.parameters]
        for parameter in self._flat.parameters:
            parameter.grad = None

    def _give_back_held(self) -> None:
        assert self._flat is not None and self._held is not None
        for parameter, before in zip(self._flat.parameters, self._held, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before + parameter.grad
        self._held = None

    def _agree_buffers(self, weight: float) -> None:
        """What DDP leaves out: its ranks' BatchNorm statistics drift apart, and die with rank 0."""
        buffers = self._state.changed_buffers()
        if buffers:
            flat = sum_over_ranks(torch.cat([buffer.detach().reshape(-1) for buffer in buffers]) * weight)
            with torch.no_grad():
                for buffer, mean in zip(buffers, flat.split([each.numel() for each in buffers]), strict=True):
                    buffer.copy_(mean.view_as(buffer))

    def _collect(self, weight: float, last: bool) -> None:
        assert self._flat is not None
        taken = self._flat.take(weight, self._state.changed_buffers())
        if not last:
            self._state.reset_buffers()
        if self._taken and not self.config.exact:
            self._taken[0] += taken
        else:
            self._taken.append(taken)

    def _agree(self) -> None:
        assert self._flat is not None and self._held is not None
        self._page.move(Place.COMMUNICATING)
        if self.config.exact:
            total = sum_in_shard_order(self._taken, self._seating())
        else:
            total = sum_over_ranks(self._taken[0])
        self._page.move(Place.COMPUTING)
        self._flat.put(total, self._held, self._state.changed_buffers())
        self._taken, self._held = [], None


class _Step:
    """`with ctx.step():` — made once, so that entering it costs nothing."""

    def __init__(self, context: TrainContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context._enter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> bool:
        if error is None:
            self._context._commit()
            return False
        return isinstance(error, Exception) and self._context._session.lost(error)
