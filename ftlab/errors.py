"""Every error ftlab raises, in one tree.

    FtlabError
    ├── ConfigError            a setting that cannot work, with the reason
    ├── ClusterError           the cluster could not start, or is gone
    │   ├── NodeStartTimeout
    │   ├── PortInUse
    │   └── ClusterClosed
    ├── LinkError              a message or a caller that is refused
    │   ├── BadMessage
    │   └── BadToken
    ├── JobError               the job ended without its result
    │   ├── NotPicklable
    │   ├── JobRunning         one job at a time, and another one is running
    │   ├── TrainingFailed     the train function raised
    │   ├── ModelMismatch      ranks built different models
    │   ├── NotReplayable      a step that is run again ends in other bits: found by the rehearsal
    │   ├── RanksDiverged      ranks that must hold the same state do not
    │   ├── StateLost          nobody holds the training state any more
    │   ├── RecoveryExhausted  a cause used up its budget
    │   ├── OutOfMemory        not even one sample at a time fits
    │   ├── BadPolicy          the policy raised, or returned no Action
    │   └── JobCancelled
    ├── HealthError            the health monitor was given something it cannot judge
    │   └── MissingRanks       not all ranks came to a barrier in time
    ├── CheckpointError        a checkpoint that cannot be written or used
    │   ├── NoCheckpoint
    │   ├── CheckpointDamaged  its digests do not match, or parts are missing
    │   ├── CheckpointMismatch it is of another model
    │   ├── CheckpointTooNew   a later ftlab wrote it
    │   ├── CheckpointFenced   whoever wrote it was given up before it was committed
    │   └── StorageError       the storage refused, or is not shared
    ├── FaultError
    │   ├── UnknownFault
    │   ├── UnknownNode
    │   ├── StepPassed         the step at which it was to happen is over, or never came
    │   └── FaultUnavailable   this machine cannot do that fault
    └── WaitTimeout            a condition did not come true in time

Beside it stands WaitInterrupted, a KeyboardInterrupt: somebody stopped a wait, and what was waited for goes on.

A message says what happened, what was seen and what to try. The same facts are attributes, and the
whole error survives pickling, so that it can travel from a node to the notebook. A notebook shows the message and the
line of the user's own code, and no line of ftlab's: see `ftlab.short_traceback`.
"""

from __future__ import annotations

from typing import Any

from ftlab.short_traceback import render


class FtlabError(Exception):
    """The root: a message, what was seen, a hint, and the facts as attributes."""

    def __init__(self, message: str, *, seen: str = "", hint: str = "", **facts: Any) -> None:
        self.message, self.seen, self.hint, self.facts = message, seen, hint, facts
        for name, value in facts.items():
            setattr(self, name, value)
        super().__init__(message)

    def __str__(self) -> str:
        lines = [self.message]
        if self.seen:
            lines.append(f"  seen: {self.seen}")
        if self.hint:
            lines.append(f"  try: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.seen, self.hint, self.facts)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows."""
        return render(self)

    def to_dict(self) -> dict[str, Any]:
        """The error as JSON-able data; `from_dict` gives it back."""
        return {"error": type(self).__name__, "message": self.message, "seen": self.seen, "hint": self.hint,
                "facts": self.facts}


class ConfigError(FtlabError, ValueError):
    """A setting that cannot work."""


class ClusterError(FtlabError):
    """The cluster could not start, or is gone."""


class NodeStartTimeout(ClusterError):
    """Not all nodes came up in time."""


class PortInUse(ClusterError):
    """The asked port belongs to somebody else."""


class ClusterClosed(ClusterError):
    """The cluster was closed, or its launcher died."""


class LinkError(FtlabError):
    """A message or a caller that is refused."""


class BadMessage(LinkError):
    """A message that is garbage, too large or of an unknown kind."""


class BadToken(LinkError):
    """The caller does not hold the cluster's token."""


class JobError(FtlabError):
    """The job ended without its result."""


class NotPicklable(JobError):
    """The train function cannot be shipped to the nodes."""


class JobRunning(JobError):
    """A cluster runs one job at a time, and another one is running."""


class TrainingFailed(JobError):
    """The train function raised; `traceback` is the worker's own."""


class ModelMismatch(JobError):
    """Ranks built different models."""


class NotReplayable(JobError):
    """A step that was run twice from the same state ended in different bits; `tensors` are where."""


class RanksDiverged(JobError):
    """Ranks that must hold the same state do not; `tensors` are where, `step` is when it was seen."""


class StateLost(JobError):
    """Nobody holds the training state any more."""


class RecoveryExhausted(JobError):
    """A cause used up its budget; `cause` names it and `history` lists what happened."""


class OutOfMemory(JobError):
    """Not even one sample at a time fits into memory."""


class BadPolicy(JobError):
    """The policy raised, or returned something that is no Action."""


class JobCancelled(JobError):
    """Somebody cancelled the job."""


class HealthError(FtlabError):
    """The health monitor was given something it cannot judge, or was asked before it saw anything."""


class MissingRanks(HealthError):
    """Not all ranks came to a barrier in time; `ranks` lists them."""


class CheckpointError(FtlabError):
    """A checkpoint that cannot be written or used."""


class NoCheckpoint(CheckpointError):
    """There is none, or not the one that was asked for."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint whose digests do not match, or of which parts are missing."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint of another model; the message lists names and shapes."""


class CheckpointTooNew(CheckpointError):
    """A checkpoint that a later ftlab wrote."""


class CheckpointFenced(CheckpointError):
    """A save that is not committed: a later generation of its job has taken over."""


class StorageError(CheckpointError):
    """The storage refused, did not answer, or is not the same for all nodes."""


class FaultError(FtlabError):
    """A fault that cannot be injected."""


class UnknownFault(FaultError):
    """No fault has this name."""


class UnknownNode(FaultError):
    """No node has this name."""


class StepPassed(FaultError):
    """The step at which something was to be done is over, or the job ended before it came."""


class FaultUnavailable(FaultError):
    """This machine cannot do that fault."""


class WaitTimeout(FtlabError, TimeoutError):
    """A condition did not come true in time; the message tells what was seen instead."""


class WaitInterrupted(KeyboardInterrupt):
    """Somebody stopped a wait (Ctrl-C, a notebook's stop button); the message tells what goes on and how to end it.

    No FtlabError, as `except Exception` must not catch it.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message, self.hint = message, hint
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message}\n  try: {self.hint}" if self.hint else self.message

    def _render_traceback_(self) -> list[str]:
        """What IPython shows."""
        return render(self)


def from_dict(data: dict[str, Any]) -> FtlabError:
    """The error that `FtlabError.to_dict` described; an unknown name becomes a plain FtlabError."""
    kind = globals().get(str(data.get("error")), FtlabError)
    if not (isinstance(kind, type) and issubclass(kind, FtlabError)):
        kind = FtlabError
    return _rebuild(kind, str(data.get("message", "")), str(data.get("seen", "")), str(data.get("hint", "")),
                    dict(data.get("facts") or {}))


def _rebuild(kind: type[FtlabError], message: str, seen: str, hint: str, facts: dict[str, Any]) -> FtlabError:
    return kind(message, seen=seen, hint=hint, **facts)
