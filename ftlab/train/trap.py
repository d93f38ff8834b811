"""Ways to break a worker from inside, for faults that no other process can do: signals whose handlers do it.

Python runs signal handlers in the main thread, which is the training thread. `stall` blocks it exactly as a lost lock
or a dead file server would, while the worker's other threads and the agent go on. `nan` and `poison` put a NaN into a
gradient while it is computed: once, as a flipped bit would, or each time the same step is tried, as a bad sample would.
All wait until the thread is inside a step. Nothing in training or recovery knows about them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

import torch

from ftlab.checkpoint.state import TrainingState
from ftlab.messages import Place
from ftlab.train.status import StatusPage

SIGNALS = {"stall": signal.SIGUSR2, "nan": signal.SIGUSR1, "poison": signal.SIGVTALRM}
_RETRY_S = 0.001


def set_trap(page: StatusPage, state: TrainingState) -> None:
    """Let each of SIGNALS do its work at the next moment the training thread is inside a step."""
    waiting: list[Callable[[], None]] = []
    work: dict[int, Callable[[], None]] = {
        SIGNALS["stall"]: _block, SIGNALS["nan"]: lambda: _spoil(state, again=False),
        SIGNALS["poison"]: lambda: _spoil(state, again=True)}

    def spring(number: int, frame: FrameType | None) -> None:
        if number in work:
            waiting.append(work[number])
        if page.place not in (Place.COMPUTING, Place.COMMUNICATING):
            signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
            return
        while waiting:
            waiting.pop(0)()

    for number in (*work, signal.SIGALRM):
        signal.signal(number, spring)


def _block() -> None:
    while True:
        time.sleep(3600)


def _spoil(state: TrainingState, again: bool) -> None:
    """Have the next gradient of one parameter computed as NaN; with `again` also when the same step is tried again."""
    parameter, at = state.parameters()[-1], [-1]

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        at[0] = state.step if at[0] < 0 else at[0]
        if not again or state.step != at[0]:
            handle.remove()
        return gradient * torch.nan if state.step == at[0] else gradient

    handle = parameter.register_hook(spoil)
