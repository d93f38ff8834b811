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
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ftlab import messages
from ftlab import policy as acts
from ftlab.checkpoint import ranks
from ftlab.checkpoint.state import TrainingState, check_optimizers
from ftlab.config import JobConfig
from ftlab.elastic.group import GroupSevered
from ftlab.elastic.sampler import GlobalSampler, Piece, Seating
from ftlab.elastic.seeding import seed_step
from ftlab.errors import ConfigError, FtlabError, StateLost
from ftlab.health.memory import is_out_of_memory
from ftlab.health.numbers import check_loss
from ftlab.messages import RESERVED_VALUES, Place
from ftlab.policy import Action
from ftlab.train.ddp import ElasticDDP
from ftlab.train.gradients import StepGradients
from ftlab.train.mending import Mender, StepSpoiled
from ftlab.train.rates import lower_rate
from ftlab.train.rehearsal import Rehearsal, RehearsalCut
from ftlab.train.session import Session
from ftlab.train.sharded import Build, ShardedJob, ShardedParts
from ftlab.train.status import StatusPage


class TrainContext:
    """Hands out steps, averages gradients and keeps the protected state alive across failures."""

    def __init__(self, session: Session, page: StatusPage, config: JobConfig) -> None:
        self._session, self._page, self.config = session, page, config
        self._state: TrainingState = session.state
        assert session.mender is not None
        self._mender: Mender = session.mender
        self._gradients = StepGradients(session, page, config, self._seating)
        self._rehearsal = Rehearsal(session, self._gradients, config.rehearse)
        self._step = _Step(self)
        self._running = False
        self.below_failed_step = False  # the block of a step was left by a failure, and no other was begun since
        self._behind = False  # the state is of a later loop over steps than the present one
        self._stepped = False  # the loop body has used ctx.step()
        self._seed, self._shards = config.seed, config.shards
        self._seat: Seating | None = None  # of this generation
        self._values: dict[str, Any] = {}
        self._samples: torch.Tensor | None = None
        self._piece: Piece | None = None
        self._batch = 0
        self._sampler: GlobalSampler | None = None
        self._can_split: Callable[[], bool] = lambda: self._sampler is not None and self._sampler.can_split()
        self._last_commit = 0.0

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

    @property
    def pieces(self) -> int:
        """How many pieces each rank's share of a batch is cut into, so that it fits into memory."""
        return self._mender.book.pieces

    @property
    def passed_over(self) -> list[int]:
        """The steps whose batches were passed over on purpose."""
        return self._mender.book.passed_over

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
        self._sampler = GlobalSampler(size, global_batch, seed=self.config.seed if seed is None else seed,
                                      shuffle=shuffle, seating=self._seating, on_piece=self._on_piece(global_batch))
        return self._sampler

    # ---- the loop ------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps still to do, up to `total`; a step that failed comes again."""
        if not self._state.modules and self._session.sharded is None:
            raise ConfigError("nothing is protected",
                              hint="ctx.protect(model=model, optimizer=optimizer) before the loop")
        self._running = True
        state, session, holds = self._state, self._session, self._session.link.holds
        scaled = any(isinstance(part, torch.amp.GradScaler) for part in state.parts.values())
        self._gradients.judging = self.config.health.numbers and not scaled  # a scaler expects Inf, and deals with it
        self._rehearsal.wanted = self._rehearsal.wanted and session.sharded is None
        check_optimizers(state)
        if session.settled > session.link.ended:
            session.take_over()
        if not self._behind:
            self._mender.book.notes["loop"] = total
        while True:
            if session.settled <= session.link.ended:  # asked in every step: is there something to join?
                session.join()
                self._begin_behind(total)
                self._page.move(Place.OUTSIDE)  # what comes now is the train function's own
                self._seat = None
            elif state.in_step and not state.rollback():  # code behind a step that failed has run: it is undone too
                raise StateLost(f"step {state.step} failed, and the code behind it changed parameters")
            if self._behind and total >= self._mender.book.loop:
                self._catch_up()
            step = holds.begun = state.step
            if step >= holds.first:  # asked in every step: is there somebody who wants to do something here?
                self._pause(step)
                continue
            if step >= total:
                return
            if self._mender.book.is_passed_over(step):
                self._pass_over(step, "its numbers were bad")
                continue
            self._begin(step)
            yield step
            if not self._stepped:
                raise ConfigError(f"step {step} ended without `with ctx.step():`",
                                  hint="put the body of the loop into `with ctx.step():`")
            if self._rehearsal.stage and session.settled > session.link.ended:
                self._rehearsal.pass_over()
                self._last_commit = time.monotonic()

    def step(self) -> _Step:
        """The body of one step: committed when it ends, healed and run again when the world breaks in it."""
        return self._step

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients and average them over the group, weighted by each rank's share of the global batch."""
        if loss.numel() != 1 or not loss.is_floating_point():
            check_loss(loss)  # says what is wrong with it
        self._gradients.backward(loss, self._piece, self._weight(self._piece))

    def report(self, **values: Any) -> None:
        """Numbers that belong to this step, such as loss=loss; recorded when the step is committed."""
        if not RESERVED_VALUES.isdisjoint(values):
            taken = ", ".join(sorted(RESERVED_VALUES.intersection(values)))
            raise ConfigError(f"ctx.report cannot record {taken}: a step has a field of that name")
        self._values.update(values)

    def _need_seat(self) -> None:
        if self._session.table is None:  # never in mid-step: the step must end in the world it began in
            self._session.join_group()

    def stop_rehearsal(self) -> None:
        """The train function is called anew: a step is not rehearsed again."""
        if self._rehearsal.stage:
            self._state.rollback()
            self._state.in_step = False
            self._rehearsal.give_up()

    # ---- a train function with several loops ---------------------------------------------------------------

    def _begin_behind(self, total: int) -> None:
        """The state that was received may come from a later loop than this one, such as a later epoch: what the train
        function does on its way there has been done already, and is undone at the entry of each loop."""
        if total < self._mender.book.loop:
            self._behind = True
            self._state.keep_copy()
            self._state.mark()

    def _catch_up(self) -> None:
        self._behind = False
        self._state.let_go()
        self._state.in_step = False

    # ---- inside a step -------------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        self._stepped = self.below_failed_step = False
        self._values, self._samples, self._piece = {}, None, None
        self._rehearsal.begin(step)
        self._gradients.begin()
        self._state.mark()
        seed_step(self._seed, step, self._seating().shard)

    def _pause(self, step: int) -> None:
        """Between two steps, because somebody asked for it; the pause is no work of this rank's."""
        session = self._session
        generation, link = session.generation, session.link
        self._page.move(Place.HELD)
        link.holds.pause(step, generation, lambda: link.over(generation))
        self._last_commit = self._page.move(Place.OUTSIDE)

    def _enter(self) -> None:
        if not self._running:
            raise ConfigError("ctx.step() outside of a loop over ctx.steps(n)")
        self._stepped = True
        self._page.enter()

    def _complete(self) -> None:
        """The body of a step is done, and well."""
        if self._rehearsal.stage:
            self._gradients.count_at_exit = self._gradients.collectives()
        if self._rehearsal.trial:
            self._page.move(Place.OUTSIDE)
            return
        if self._mender.book.foreign and self._session.group is not None and self._session.group.broken():
            raise GroupSevered("a collective of this step failed, and the train function went on")
        self._commit()

    def _commit(self, skipped: str = "") -> None:
        state, session = self._state, self._session
        at = time.monotonic()
        state.commit()
        self._page.commit(state.step, at)
        first = session.first_step_done(at)
        busy = 0.0 if first else at - self._last_commit - self._gradients.waited
        values = {name: value if type(value) is float else _number(value) for name, value in self._values.items()}
        samples = digest = None
        if self._samples is not None and (skipped or self.config.record_samples):
            samples, digest = self._samples.tolist(), zlib.crc32(self._samples.numpy().tobytes())
        session.link.note_step((session.settled, state.step, at, busy, values, samples, digest, skipped), urgent=first)
        self._last_commit = at
        if self._seating().pieces > 1 and self._mender.book.good_step():
            self._seat = None
        if session.comparison.due(state.step):
            session.comparison.compare()
        if session.saver is not None:
            session.saver.after_step(session)

    # ---- for a loop that computes its gradients itself -----------------------------------------------------

    def _begin_batch(self, step: int) -> None:
        """The data is there: random numbers are drawn anew, and gradients of earlier batches set aside."""
        seed_step(self._seed, step, self._seating().shard)
        self._gradients.hold()

    # ---- a step that must not be committed -----------------------------------------------------------------

    def _tell_failure(self, error: Exception) -> bool:
        """This rank ran out of memory: the others learn it where they wait for its gradients. False if they cannot."""
        if not self._gradients.can_tell_failure():
            return False
        self._note("memory.failed", rank_failed=self._session.rank, detail=str(error)[:300])
        self._gradients.tell_failure()
        return True

    def _mend(self, spoiled: StepSpoiled) -> None:
        """Undo a step that all ranks know to be spoiled, and do what the policy says."""
        session, mender, step = self._session, self._mender, self._state.step
        if self._rehearsal.trial:
            self._state.rollback()
            self._rehearsal.give_up()
        if not self._state.rollback():
            raise StateLost(f"step {step} changed parameters before its gradients were agreed on: it cannot be undone",
                            seen=spoiled.reason, hint="call optimizer.step() after the last ctx.backward")
        answer: Action | FtlabError = acts.Retry()
        if session.rank == 0:
            answer = mender.decide(spoiled, step, saved=session.newest_saved(), can_split=self._can_split())
            self._note("step.spoiled", cause=spoiled.cause, reason=spoiled.reason, action=type(answer).__name__)
        answer = ranks.agree(answer)
        if isinstance(answer, FtlabError):
            raise answer
        mender.note(spoiled.cause, step)
        self._act(answer, spoiled.reason, step)

    def _note(self, event: str, **facts: Any) -> None:
        self._session.link.send(messages.Noted(job=self._session.ladder.job, event=event, step=self._state.step,
                                               data=facts))

    def _act(self, action: Action, reason: str, step: int) -> None:
        book = self._mender.book
        if isinstance(action, acts.Split):
            book.split()
            self._seat = None
        elif isinstance(action, acts.Rollback):
            if action.skip:
                book.pass_over(step)
            self._session.rewind(action, f"goes back to a checkpoint: {reason}")
        elif isinstance(action, acts.Skip | acts.LowerRate):
            if isinstance(action, acts.LowerRate):
                lower_rate(self._state.parts, action.factor)
            book.pass_over(step)
            self._pass_over(step, reason)

    def _pass_over(self, step: int, reason: str) -> None:
        """The step counts, and changes nothing."""
        self._values = {}
        self._samples = self._sampler.global_ids(step) if self._sampler is not None else self._samples
        self._commit(skipped=reason)

    def _seating(self) -> Seating:
        if self._seat is None:
            session = self._session
            if self._shards is None and self.config.exact:
                self._shards = session.world
            self._seat = Seating(session.rank, session.world, self._shards or session.world,
                                 self._mender.book.pieces)
        return self._seat

    def _on_piece(self, global_batch: int) -> Any:
        def remember(step: int, piece: Piece, ids: torch.Tensor) -> None:
            self._piece, self._samples, self._batch = piece, ids, global_batch
            if self.config.exact:
                seed_step(self._seed, step, piece.shard + (piece.part << 32))
        return remember

    def _weight(self, piece: Piece | None) -> float:
        return len(piece.ids) / self._batch if piece else 1.0 / self._session.world


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


class _Step:
    """`with ctx.step():` — made once, so that entering it costs nothing."""

    def __init__(self, context: TrainContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context._enter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> bool:
        context = self._context
        error = error or context._gradients.failure  # also one that the train function caught
        if error is not None and not isinstance(error, Exception):
            return False
        try:
            if error is None:
                context._complete()
                return False
            if isinstance(error, RehearsalCut):
                context._page.move(Place.OUTSIDE)
                context.below_failed_step = True
                return True
            if isinstance(error, StepSpoiled):
                context._mend(error)
                return True
            if is_out_of_memory(error) and context._tell_failure(error):
                context._mend(StepSpoiled("oom", f"{type(error).__name__}: {str(error)[:200]}"))
                return True
        except Exception as broken:  # the world broke meanwhile, or the job is to end
            if not context._session.lost(broken):
                raise
            context.below_failed_step = True
            return True
        context.below_failed_step = context._session.lost(error)
        return context.below_failed_step
