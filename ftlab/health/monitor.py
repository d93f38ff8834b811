"""The health of one training process: does it get on, are its numbers well, is there memory left?

    monitor = HealthMonitor(timeout_seconds=300, on_finding=lambda finding: print(finding.reason))
    with monitor.watching():
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if monitor.check_step(loss, [p.grad for p in model.parameters()]):
                optimizer.zero_grad()  # a bad step is not taken
                continue
            optimizer.step(); optimizer.zero_grad()
            monitor.step_done()
        with monitor.paused():
            evaluate(model)

Whatever is found is a `Finding`: kept in `monitor.findings` and handed to `on_finding`, a stall from the watchdog's
thread. A stall is told once, until a step is committed again.

How long a step may take follows the steps that were seen (eight typical ones, and at least a second); the given
timeout holds until three of them are known. Where it stops: it reports and does not act, since nobody can end a call
that hangs from inside its own process; a call that holds the GIL holds up the watchdog too; and time in which the
process as a whole stood still (SIGSTOP, a suspended laptop) is not counted as a stall. The node's agent sees these.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ftlab.config import HealthConfig
from ftlab.errors import ConfigError, HealthError
from ftlab.health.heartbeat import Watch
from ftlab.health.memory import Limit, MemoryWatch, find_limits
from ftlab.health.numbers import NumberWatch, check_loss, gradient_norm, in_words
from ftlab.health.progress import Limits, StepClock
from ftlab.health.stacks import describe, parse, stacks_of_this_process

_FLOOR_S, _FACTOR = 1.0, 8.0  # as for a whole cluster, see ClusterConfig.stall_floor_s and stall_factor
_LOOK_S = 0.5  # the watchdog looks at least so often, and ten times within the limit
_KEPT = 100  # findings
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not well, in words and as data."""

    cause: Literal["numbers", "stall", "memory"]
    reason: str
    at: float  # on the monitor's clock
    step: int  # how many steps were committed before
    data: dict[str, Any] = field(default_factory=dict)


class HealthMonitor:
    """Watches one training process; the training loop tells it of each step. See the module for such a loop."""

    def __init__(self, timeout_seconds: float = 300.0, *, config: HealthConfig | None = None,
                 on_finding: Callable[[Finding], None] | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        if not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds must be positive: every step takes some time (got {timeout_seconds})")
        self.config = config or HealthConfig()
        self.numbers = NumberWatch(self.config)
        self.findings: deque[Finding] = deque(maxlen=_KEPT)
        self.step = 0  # committed so far
        self._on_finding, self._clock = on_finding, clock
        self._steps = StepClock(Limits(floor_s=min(_FLOOR_S, timeout_seconds), factor=_FACTOR,
                                       first_step_s=timeout_seconds))
        self._memory = MemoryWatch(self.config.memory_warn, read=self._read_limits)
        self._limits: list[Limit] = []
        self._accepted: tuple[float | None, float | None] = (None, None)  # the numbers of the step in flight
        self._lock = threading.Lock()  # over what follows, and the step clock: the watchdog reads them
        self._since: float | None = None  # when the step in flight began; None before the first and in a pause
        self._trainer = threading.current_thread()
        self._paused = self._told = False

    # ---- progress ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the clock: training begins, or goes on after something that is no step."""
        with self._lock:
            self._steps.pause()
            self._begin_step(self._clock())

    def step_done(self) -> None:
        """A step was committed: the optimizer has taken it."""
        now = self._clock()
        with self._lock:
            self._steps.tick(now)
            self._begin_step(now)
            self.step += 1
        self.numbers.accept(*self._accepted)
        self._accepted = (None, None)

    def check_progress(self) -> bool:
        """Whether training gets on; False if the step in flight takes longer than a step may. HealthError if there was
        no `start()` and no `step_done()` yet."""
        return self._look_at_progress(self._clock(), with_stacks=False)

    def limit(self) -> float:
        """How long a step may take now, in seconds."""
        with self._lock:
            return self._steps.limit()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no step (an evaluation, a recovery) and may take any time; not to be nested."""
        with self._lock:
            self._paused, self._since = True, None
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at progress from a thread of its own while the block runs; on a stall, say where the training thread is.

        Starts the clock if that was not done.
        """
        if self._since is None and not self._paused:
            self.start()
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="ftlab-watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    # ---- numbers and memory --------------------------------------------------------------------------------

    def check_step(self, loss: Any = None, gradients: Iterable[torch.Tensor | None] | torch.Tensor | None = None,
                   ) -> Finding | None:
        """What is wrong with the numbers of a step, before it is committed; None if they are well, as far as given.

        To be called once per step, with values that are the same on all ranks if all ranks shall decide the same. The
        loss must be one floating-point number (else HealthError).
        """
        value = None if loss is None else check_loss(loss)
        norm = None if gradients is None else gradient_norm(gradients)
        reason = self.numbers.judge(value, norm)
        if reason:
            self._accepted = (None, None)
            return self._report("numbers", reason, loss=value, norm=norm)
        self._accepted = (value, norm)
        return None

    def detect_nan_inf(self, loss: Any) -> bool:
        """Whether a loss is NaN or Inf; HealthError if it is not one floating-point number."""
        value = check_loss(loss)
        if math.isfinite(value):
            return False
        self._report("numbers", f"the loss is {in_words(value)}", loss=value)
        return True

    def detect_oom(self) -> bool:
        """Whether memory is nearly full, or fills so fast that it soon will be; False where no limit can be read."""
        warning = self._memory.look(self._clock())
        if warning:
            self._report("memory", warning.text, used_bytes=warning.limit.used_bytes,
                         limit_bytes=warning.limit.limit_bytes)
        return warning is not None or any(limit.share > self.config.memory_warn for limit in self._limits)

    # ---- inside --------------------------------------------------------------------------------------------

    def _begin_step(self, now: float) -> None:
        """With the lock held."""
        self._since, self._trainer = now, threading.current_thread()
        self._paused = self._told = False

    def _look_at_progress(self, now: float, with_stacks: bool) -> bool:
        with self._lock:
            if self._paused:
                return True
            if self._since is None:
                raise HealthError("no step was begun, so there is no progress to judge",
                                  hint="call monitor.start() before the loop and monitor.step_done() after each step")
            took, limit, typical = now - self._since, self._steps.limit(), self._steps.typical()
            if took <= limit:
                return True
            first, self._told = not self._told, True
        if first:
            self._report_stall(took, limit, typical, with_stacks)
        return False

    def _report_stall(self, took: float, limit: float, typical: float, with_stacks: bool) -> None:
        usual = f"a step usually takes {typical:.2g} s" if typical else "no step time is known yet"
        reason = f"no step was committed for {took:.1f} s; {limit:.2g} s are allowed, {usual}"
        stacks = stacks_of_this_process() if with_stacks else ""
        frames = [each.frames for each in parse(stacks) if each.ident == self._trainer.ident]
        if frames:
            reason = f"{self._trainer.name} is {describe(frames[0], took)}: {reason}"
        self._report("stall", reason, took_s=took, limit_s=limit, typical_s=typical, stacks=stacks)

    def _watch(self, over: threading.Event) -> None:
        """The watchdog's thread."""
        watch = Watch(every_s=min(self.limit() / 10, _LOOK_S), looked=self._clock())
        while not over.wait(watch.every_s):
            now = self._clock()
            try:
                self._excuse(watch.look(now))
                self._look_at_progress(now, with_stacks=True)
                watch.every_s = min(self.limit() / 10, _LOOK_S)
            except Exception:  # the thread's outer edge: a watchdog that fails once looks again
                _logger.exception("the watchdog could not look")

    def _excuse(self, late_s: float) -> None:
        """The whole process stood still for so long: that is not the step's fault."""
        with self._lock:
            if self._since is not None:
                self._since += late_s

    def _report(self, cause: Literal["numbers", "stall", "memory"], reason: str, **data: Any) -> Finding:
        finding = Finding(cause=cause, reason=reason, at=self._clock(), step=self.step, data=data)
        self.findings.append(finding)
        _logger.info("[step=%d] %s: %s", finding.step, cause, reason)
        if self._on_finding is not None:
            try:
                self._on_finding(finding)
            except Exception:  # somebody else's code: it must not end the training it is told about
                _logger.exception("on_finding failed for: %s", reason)
        return finding

    def _read_limits(self) -> list[Limit]:
        """The memory limits, kept for `detect_oom`; none where this system does not tell them."""
        try:
            self._limits = find_limits()
        except Exception as error:  # looking must not end the training that is looked at
            _logger.debug("memory limits cannot be read: %r", error)
            self._limits = []
        return self._limits
