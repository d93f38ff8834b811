"""Fencing that reaches storage: a generation that was given up commits nothing, wherever its writer was stopped.

Every attempt to save has a folder of its own, whose name tells the job and the generation. Two rules, in this order on
each side, leave no gap between them:

    a writer     makes its attempt's folder, then looks for fences, then creates the marker, only if there is none;
    a take-over  writes its fence, then looks for attempts, and creates the marker of each that has none: a closed one.

Whoever creates a marker first has it: creating it is the one conditional step, on a file system (a hard link) as on an
object store (`If-None-Match`). A writer that was stopped anywhere, for however long, either committed before the
take-over or finds a fence or a closed marker. One small file is left per generation: a fence is never removed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ftlab.checkpoint.storage import Storage
from ftlab.errors import CheckpointFenced, StorageError

COMMIT = "COMMIT"  # the marker that makes a folder a checkpoint
_FENCES = "fences"
_ATTEMPT = re.compile(r"step-\d{10}-([0-9a-z]+)g([0-9a-f]+)")
_FENCE = re.compile(r"([0-9a-z]+)g([0-9a-f]+)")
_CLOSED = b"closed: "  # how the marker of an attempt begins that cannot be committed any more
_GIVEN_UP = "the node that saved it was given up; the job goes on without it"


class Attempt(NamedTuple):
    """Who saves: a generation of a job."""

    job: str
    generation: int


def attempt_of(folder: str) -> Attempt | None:
    """Whose attempt a folder is; None if its writer belongs to no generation and cannot be fenced."""
    return _parse(_ATTEMPT, folder)


def take_over(storage: Storage, job: str, generation: int) -> list[str]:
    """From now on, earlier generations of this job cannot commit; their attempts that were closed by this call."""
    word = f"generation {generation} of job {job} has taken over"
    storage.write(_FENCES, f"{job}g{generation:x}", [f"{word}: earlier ones commit nothing any more\n".encode()])
    storage.sync(_FENCES)
    closed = []
    for folder in storage.folders():
        attempt = attempt_of(folder)
        earlier = attempt is not None and attempt.job == job and attempt.generation < generation
        if earlier and _close(storage, folder, _CLOSED + word.encode()):
            closed.append(folder)
    return closed


def _close(storage: Storage, folder: str, marker: bytes) -> bool:
    """Whether this call closed an attempt. One that is gone meanwhile cannot be committed either; any other error is
    the caller's: an attempt that stays open could still be committed."""
    try:
        return storage.create(folder, COMMIT, marker)
    except StorageError:
        if folder in storage.folders():
            raise
        return False


def require_unfenced(storage: Storage, folder: str) -> None:
    """Raise CheckpointFenced if a later generation has taken over from the one whose attempt this is."""
    attempt = attempt_of(folder)
    if attempt is None:
        return
    fences = [fence for name in storage.files(_FENCES) if (fence := _parse(_FENCE, name)) is not None]
    newest = max((fence.generation for fence in fences if fence.job == attempt.job), default=0)
    if newest > attempt.generation:
        raise CheckpointFenced(f"generation {newest} of this job has taken over: generation {attempt.generation} "
                               "commits and removes no checkpoint any more", seen=folder, hint=_GIVEN_UP)


def commit_once(storage: Storage, folder: str, marker: bytes) -> None:
    """Create an attempt's marker, unless a later generation has taken over: then raise CheckpointFenced."""
    require_unfenced(storage, folder)
    if storage.create(folder, COMMIT, marker):
        return
    found = storage.read(folder, COMMIT)
    if found != marker:  # the same marker: ours, and the storage's answer was lost
        why = closed_by(found) or "it was committed before"
        raise CheckpointFenced(f"{folder} is not committed: {why}", hint=_GIVEN_UP)


def closed_by(marker: bytes) -> str:
    """Who has taken over, if that is what a marker says; else nothing."""
    return marker.removeprefix(_CLOSED).decode(errors="replace") if marker.startswith(_CLOSED) else ""


def _parse(pattern: re.Pattern[str], name: str) -> Attempt | None:
    match = pattern.fullmatch(name)
    return Attempt(match[1], int(match[2], 16)) if match else None
