"""What `train_epoch` is given in place of its loader and its optimizer, so that a plain loop can be recovered.

The guarded loader hands out the batches that are still to do, or their pieces. In the guarded optimizer `step()` is the
point of no return: up to there a step can be undone; there the ranks sum their gradients and say how they fared, all in
one all-reduce; if all is well the real optimizer steps. If not, every rank leaves `train_epoch` with a StepLost. So
each rank comes to exactly one exchange per batch, and one at the end of an epoch, whatever happens to it: a rank that
raised meets the others from the handler of its exception.

Where it stops: whatever the loop does between `backward()` and `step()` (clipping) sees the gradients of one rank and
one piece. A batch that ends without `step()` counts, and its gradients stay for the next (accumulation), but a loop
that is called again after a failure begins a new accumulation. A GradScaler that leaves out a step on one rank leaves
it out on all, but keeps a scale of its own on each. Batches that are passed over are loaded all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Any

import torch

from ftlab.checkpoint.state import TrainingState
from ftlab.elastic.reduce import FlatGradients
from ftlab.elastic.seeding import seed_step
from ftlab.errors import ConfigError
from ftlab.health.memory import is_out_of_memory
from ftlab.health.monitor import HealthMonitor
from ftlab.health.numbers import NumberWatch, gradient_norm
from ftlab.train.feed import Feed
from ftlab.train.host import Host
from ftlab.train.microbatch import can_cut, split
from ftlab.train.rates import Rates

PATIENCE = 200  # good steps with a cut batch before fewer pieces are tried again


class Code(IntEnum):
    """How a batch ended on one rank; of all ranks' codes the largest counts."""

    WELL = 0
    IDLE = 1  # the loop did not call step()
    BAD = 2
    MEMORY = 3
    RAISED = 4


class StepLost(BaseException):
    """A step failed on some rank. No Exception: the loop's own handlers are not meant to see it."""

    def __init__(self, code: Code, detail: str = "") -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail  # of this rank; WELL if another one failed


class Book:
    """What recovery must remember over a restart: it is saved with the model."""

    def __init__(self, batches: int, watches: list[NumberWatch]) -> None:
        self.batches, self.watches = batches, watches
        self.skipped: list[int] = []  # steps whose batch is passed over
        self.metrics: list[dict[str, Any]] = []  # one entry for each finished epoch
        self.pieces = 1  # into which every batch is cut
        self._calm, self._patience, self._merged = 0, PATIENCE, False

    def step_done(self) -> None:
        """Count a good step; after enough of them try larger pieces."""
        self._calm += self.pieces > 1
        if self._calm >= self._patience:
            self.pieces, self._calm, self._merged = self.pieces // 2, 0, True

    def cut(self) -> None:
        """Twice as many pieces; if that was just tried with fewer, wait twice as long before the next time."""
        self._patience *= 2 if self._merged else 1
        self.pieces, self._calm, self._merged = self.pieces * 2, 0, False

    def skips_before(self, step: int) -> int:
        """How many batches in a row were passed over just before a step."""
        passed, first = set(self.skipped), step
        while first - 1 in passed:
            first -= 1
        return step - first

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain data."""
        return {"batches": self.batches, "skipped": list(self.skipped), "metrics": list(self.metrics),
                "pieces": self.pieces, "calm": self._calm, "patience": self._patience, "merged": self._merged,
                "watches": [watch.state_dict() for watch in self.watches]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what `state_dict` described; ConfigError if epochs had another length."""
        if saved["batches"] != self.batches:
            raise ConfigError(f"the checkpoint is of epochs of {saved['batches']} batches, the loader gives "
                              f"{self.batches}", hint="resume with the same data and batch size, or use a new folder")
        self.skipped, self.metrics, self.pieces = list(saved["skipped"]), list(saved["metrics"]), saved["pieces"]
        self._calm, self._patience, self._merged = saved["calm"], saved["patience"], saved["merged"]
        for watch, history in zip(self.watches, saved["watches"], strict=False):  # a monitor may come or go
            watch.load_state_dict(history)


class Guard:
    """Stands between a loop and its loader, its optimizer and its fellow ranks."""

    def __init__(self, state: TrainingState, book: Book, feed: Feed, optimizer: torch.optim.Optimizer, host: Host, *,
                 seed: int, monitor: HealthMonitor | None = None, between: Callable[[], None] = lambda: None) -> None:
        self.state, self.book, self.feed, self.host = state, book, feed, host
        self.real, self.optimizer, self.loader = optimizer, GuardedOptimizer(optimizer, self), GuardedLoader(feed, self)
        self.rows = 1  # of the batch in flight: into so many pieces it can be cut
        self.torn = False  # the real optimizer was interrupted: weights may be half changed
        self._seed, self._between, self._watch = seed, between, book.watches[0]
        self._talk = _Talk(monitor)
        trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        self._flat = FlatGradients(list(dict.fromkeys([*state.parameters(), *trained])))
        self._open = self._direct = False  # a batch is in flight; its gradients need no summing
        self._weight, self._first, self._last, self._taken = 1.0, True, True, False  # of the piece in flight
        self._sum: torch.Tensor | None = None  # over the pieces so far
        self._held: list[tuple[torch.Tensor, torch.Tensor] | None] = []  # gradients from before, and the zeros for them
        self._kept: list[torch.Tensor | None] = []  # those of them that the loop has not zeroed
        self._handed = self._left = 0  # pieces given to the loop, and left of this batch
        self._rates = Rates(optimizer, state)

    @property
    def epoch_end(self) -> int:
        """The step at which the epoch in progress is over."""
        return (len(self.book.metrics) + 1) * self.feed.batches

    # ---- the loader's side ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """The loop is about to be called for what is left of the epoch."""
        self._handed = self._left = 0
        self.pass_over()

    def pass_over(self) -> None:
        """Count the steps that are to be skipped, up to the next one that is not."""
        while self.state.step < self.epoch_end and self.state.step in self.book.skipped:
            self.state.step += 1

    def pieces(self) -> Iterator[Any]:
        """The rest of the epoch, piece by piece."""
        while True:
            self.close_batch()
            self._between()
            self.pass_over()
            if self.state.step >= self.epoch_end:
                return
            parts = self._open_batch()
            for number, (part, weight) in enumerate(parts):
                self._weight, self._first, self._last = weight, number == 0, number == len(parts) - 1
                self._taken, self._left = False, len(parts) - number - 1
                self._handed += 1
                yield part
                if self._open and not self._last:
                    self._take()
                    self._rates.put_back()

    def count(self) -> int:
        """How many pieces the loop gets in all, from where it began: what a mean over them is divided by."""
        first = self.state.step + self._open
        rest = sum(step not in self.book.skipped for step in range(first, self.epoch_end))
        return self._handed + self._left * self._open + rest * self.book.pieces

    def close_batch(self) -> None:
        """The loop is done with the batch in flight, with or without a step."""
        if self._open:
            self._finish(stepped=False)
        self._talk.tell_step()

    def _open_batch(self) -> list[tuple[Any, float]]:
        step, self.rows = self.state.step, 1
        batch = self.feed.fetch(*divmod(step, self.feed.batches))
        self.rows = can_cut(batch)
        parts = split(batch, self.book.pieces) if self.rows > 1 else [(batch, 1.0)]
        self.state.mark()
        self._open, self._direct, self._sum = True, self.host.world == 1 and len(parts) == 1, None
        self._hold_gradients()
        self._rates = Rates(self.real, self.state) if len(parts) > 1 else self._rates
        self._talk.begin()
        seed_step(self._seed, step, self.host.rank)
        return parts

    def _hold_gradients(self) -> None:
        """Put zeros in the place of gradients that are left from before, which stay as they are in case of an undo.

        A loop that zeroes gradients throws the zeros away; one that accumulates adds to them.
        """
        self._held = [None if parameter.grad is None else (parameter.grad, torch.zeros_like(parameter.grad))
                      for parameter in self._flat.parameters]
        for parameter, held in zip(self._flat.parameters, self._held, strict=True):
            parameter.grad = held[1] if held else None

    def _left_over(self) -> list[torch.Tensor | None]:
        """Gradients of earlier batches that the loop has kept."""
        return [held[0] if held and parameter.grad is held[1] else None
                for parameter, held in zip(self._flat.parameters, self._held, strict=True)]

    # ---- the optimizer's side ------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, but not those of the batch's earlier pieces, which are summed elsewhere."""
        if self._open and self._first and not self._taken:
            self._held = [None] * len(self._held)
        self.real.zero_grad(set_to_none)

    def step(self, **options: Any) -> Any:
        """Commit the batch, if this is its last piece."""
        if not self._open or self._taken:
            raise ConfigError("optimizer.step() belongs once into the loop over the loader")
        if self._last:
            return self._finish(stepped=True, **options)
        self._take()
        self.real._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn that no step came before
        return None

    def _take(self) -> None:
        """Move the gradients of one piece, times its share, to the sum."""
        if self._taken:
            return
        self._taken = True
        if self._first:
            self._kept = self._left_over()
        taken = self._flat.take(self._weight / self.host.world, self._buffers())
        self._sum = taken if self._sum is None else self._sum.add_(taken)
        if not self._last:
            self.state.reset_buffers()  # all pieces of a batch start from the same ones

    def _finish(self, stepped: bool, **options: Any) -> Any:
        """Sum, agree, judge, step; raises StepLost if the batch is not well on all ranks."""
        complaint = self._talk.complaint()
        mine = Code.BAD if complaint else Code.WELL if stepped else Code.IDLE
        worst = self._add_up(mine)
        if worst >= Code.BAD:
            raise StepLost(mine if mine >= Code.BAD else Code.WELL, complaint)
        answer = self._step_for_real(options) if worst == Code.WELL else None
        self._open, self._sum = False, None
        self.state.commit()
        self.book.step_done()
        self._talk.committed()
        self.host.commit(self.state.step, {})
        return answer

    def _add_up(self, mine: Code) -> Code:
        """The gradients of the whole batch over all pieces and ranks, in their places, and the worst code of all."""
        if self._direct:
            for parameter, held in zip(self._flat.parameters, self._left_over(), strict=True):
                if held is not None and parameter.grad is not None:
                    parameter.grad = held + parameter.grad
            return mine
        self._take()
        assert self._sum is not None
        total, worst = self._exchange(self._sum, mine)
        changed = {id(buffer) for buffer in self.state.changed_buffers()}  # the mean of equals may be off by a bit
        self._flat.put(total, self._kept, [buffer if id(buffer) in changed else torch.empty_like(buffer)
                                           for buffer in self._buffers()])
        return worst

    def _step_for_real(self, options: Mapping[str, Any]) -> Any:
        norm = gradient_norm(parameter.grad for parameter in self._flat.parameters)
        verdict = self._watch.judge(None, norm)
        if verdict:
            raise StepLost(Code.BAD, verdict)
        self.torn = True
        answer = self.real.step(**options)
        self.torn = False
        self._watch.accept(None, norm)
        return answer

    # ---- failures ------------------------------------------------------------------------------------------

    def end_epoch(self, complaint: str) -> None:
        """Meet the other ranks once more after the last batch; raises StepLost if something is not well."""
        mine = Code.BAD if complaint else Code.WELL
        if self._meet(mine) >= Code.BAD:
            raise StepLost(mine, complaint)

    def report(self, error: Exception) -> Code:
        """Tell the other ranks, who wait for this one's gradients, that there are none; what kind of failure it is."""
        mine = Code.MEMORY if is_out_of_memory(error) else Code.RAISED
        self._meet(mine)
        return mine

    def undo(self) -> bool:
        """Back to the last committed step; False if the step in flight changed what cannot be undone."""
        undone = not self._open or (self.state.rollback() and not self.torn)
        self._open, self._sum, self.torn = False, None, False
        return undone

    def _meet(self, mine: Code) -> Code:
        if self.host.world == 1:
            return mine
        left = [parameter.grad for parameter in self._flat.parameters]
        nothing = self._flat.take(0.0, self._buffers()).zero_()  # of the same length as everybody's
        for parameter, grad in zip(self._flat.parameters, left, strict=True):
            parameter.grad = grad
        return self._exchange(nothing, mine)[1]

    def _exchange(self, flat: torch.Tensor, mine: Code) -> tuple[torch.Tensor, Code]:
        """The sum over the ranks; beside the gradients it counts how many ranks sent which code."""
        codes = torch.zeros(len(Code), dtype=flat.dtype, device=flat.device)
        codes[mine] = 1
        total = self.host.exchange(torch.cat([flat, codes]))
        counts = total[-len(Code):].tolist()
        return total[:-len(Code)], max(code for code in Code if counts[code])

    def _buffers(self) -> list[torch.Tensor]:
        """All that a forward pass may change; the same list on every rank, also on one that ran none."""
        return [buffer for module in self.state.modules.values() for buffer in module.buffers()
                if buffer.is_floating_point()]


class GuardedLoader:
    """What the loop takes for its loader."""

    def __init__(self, feed: Feed, guard: Guard) -> None:
        self._feed, self._guard = feed, guard

    def __iter__(self) -> Iterator[Any]:
        return self._guard.pieces()

    def __len__(self) -> int:
        return self._guard.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed.loader, name)


class GuardedOptimizer:
    """What the loop takes for its optimizer."""

    def __init__(self, real: torch.optim.Optimizer, guard: Guard) -> None:
        self._real, self._guard = real, guard

    @property  # type: ignore[misc]  # schedulers and scalers ask with isinstance whether this is an Optimizer
    def __class__(self) -> type:
        return type(self._real)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Commit the batch."""
        if closure is not None:
            raise ConfigError("an optimizer that needs a closure (LBFGS) cannot be guarded: it runs the model several "
                              "times in one step")
        return self._guard.step(**options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self._guard.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Talk:
    """What the loop and the health monitor say to each other about a step, if there is a monitor."""

    def __init__(self, monitor: HealthMonitor | None) -> None:
        self._monitor = monitor
        self._seen: object = None  # the last finding before this step
        self._step, self._told = 0, True

    def begin(self) -> None:
        """A step begins."""
        if self._monitor is not None:
            self._seen = self._monitor.findings[-1] if self._monitor.findings else None
            self._step = self._monitor.step

    def complaint(self) -> str:
        """What the monitor found wrong with the numbers that the loop showed it in this step."""
        for finding in reversed(list(self._monitor.findings) if self._monitor is not None else []):
            if finding is self._seen:
                break
            if finding.cause == "numbers":
                return finding.reason
        return ""

    def committed(self) -> None:
        """The step is done; the loop may tell the monitor itself."""
        self._told = False

    def tell_step(self) -> None:
        """Tell the monitor that the step is done, unless the loop did."""
        if self._monitor is not None and not self._told and self._monitor.step == self._step:
            self._monitor.step_done()
        self._told = True
