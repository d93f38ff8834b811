"""A checkpoint manager of one's own where the cluster's storage was: `submit(train, checkpoint=MyManager(folder))`.

The manager is an object with the lab's methods, `save_checkpoint(model, optimizer, epoch, metrics)` and
`load_checkpoint(model, optimizer)`. It travels to the nodes with the job. Every rank calls it, at the same steps, as a
loop under DDP would: who writes and who waits is the manager's affair, and it may use the group. The step is its epoch.
What is protected beside model and optimizer is handed to its `protect(**parts)`.

Where this stops: saving blocks the training; there are no snapshots in memory, no shards, and no way back to an older
checkpoint than the one that the manager loads. A manager that raises while all nodes are well ends the job with its
traceback; one that blocks for longer than `ClusterConfig.outside_limit_s` counts as a stall.
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftlab import messages
from ftlab.checkpoint.state import TrainingState
from ftlab.errors import ConfigError, TrainingFailed
from ftlab.train.ladder import Note

if TYPE_CHECKING:
    from ftlab.train.session import Session

_HINT = "the lab's manager has save_checkpoint(model, optimizer, epoch, metrics) and load_checkpoint(model, optimizer)"


def is_manager(thing: Any) -> bool:
    """Whether something, or the class of something, has the methods of a checkpoint manager."""
    return all(callable(getattr(thing, name, None)) for name in ("save_checkpoint", "load_checkpoint"))


class OwnManager:
    """Has a manager of the user's save when it is time, and load when nobody lives who holds the state."""

    def __init__(self, manager: Any, every: int) -> None:
        if not is_manager(manager):
            raise ConfigError(f"a {type(manager).__name__} is no checkpoint manager", hint=_HINT)
        self.manager, self.every = manager, every
        self._last_step = 0

    def after_step(self, session: Session) -> None:
        """A step was committed: save if it is time; all ranks do."""
        if session.state.step % self.every == 0:
            self._save(session)

    def finish(self, session: Session) -> None:
        """The train function returned: save its last step."""
        if session.state.step > self._last_step:
            self._save(session)

    def load(self, state: TrainingState) -> int:
        """Have the manager load; the step that it found, or -1."""
        found = self.manager.load_checkpoint(*self._parts(state))
        if found is None:
            return -1
        state.step = self._last_step = _step_of(found)
        return state.step

    def loaded(self, step: int) -> list[Note]:
        """What is to be noted about a load."""
        return [("checkpoint.loaded", step, {"name": type(self.manager).__name__})]

    def _save(self, session: Session) -> None:
        """A manager that fails because the world broke is forgiven: the next generation goes on, and saves again."""
        step, begin = session.state.step, time.monotonic()
        try:
            path = self.manager.save_checkpoint(*self._parts(session.state), step, {})
        except Exception as error:
            if not session.lost(error):
                trace = "".join(traceback.format_exception(error))
                raise TrainingFailed(f"save_checkpoint of {type(self.manager).__name__} raised "
                                     f"{type(error).__name__}: {error}\n\n{trace}", traceback=trace) from error
            return
        self._last_step = step
        if session.rank == 0:
            facts = {"name": type(self.manager).__name__, "seconds": round(time.monotonic() - begin, 4),
                     "bytes": _size(path)}
            session.link.send(messages.Noted(job=session.ladder.job, event="checkpoint.committed", step=step,
                                             generation=session.generation, data=facts))

    def _parts(self, state: TrainingState) -> tuple[Any, Any]:
        parts = dict(state.parts)
        try:
            model, optimizer = parts.pop("model"), parts.pop("optimizer")
        except KeyError as name:
            raise ConfigError(f"a manager of your own needs a protected {name}",
                              hint="ctx.protect(model=model, optimizer=optimizer)") from None
        if parts:
            if not hasattr(self.manager, "protect"):
                raise ConfigError(f"{', '.join(parts)} would be lost: {type(self.manager).__name__} saves only model "
                                  "and optimizer", hint="give it a method protect(**parts)")
            self.manager.protect(**parts)
        return model, optimizer


def _step_of(found: Any) -> int:
    """The epoch that a manager says it loaded: found["epoch"] or found.epoch."""
    epoch = found.get("epoch") if isinstance(found, dict) else getattr(found, "epoch", None)
    if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
        raise ConfigError(f"load_checkpoint must tell the epoch that it loaded, as a whole number (got {epoch!r})",
                          hint='return {"epoch": ..., "metrics": ...}, or None if there is no checkpoint')
    return epoch


def _size(path: Any) -> int:
    """How large the file is that save_checkpoint named; 0 if it named none."""
    try:
        return Path(path).stat().st_size
    except (TypeError, OSError):
        return 0
