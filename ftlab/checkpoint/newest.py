"""The newest good checkpoint: the one way to it, for managers, cluster jobs and recovery loops alike.

Damage that a look shows (a missing shard, a bad manifest) and damage that only reading shows are treated alike: the
checkpoint is set aside, that is told, and the next one is tried. Nothing is passed over without a word. Ranks that load
together load the same one, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftlab.checkpoint.vault import Entry, Vault
from ftlab.errors import CheckpointDamaged, CheckpointTooNew, FtlabError

Load = Callable[[], object]
Gather = Callable[[FtlabError | None], Sequence[FtlabError | None]]  # this rank's problem: those of all ranks


@dataclass(frozen=True)
class Damage:
    """A checkpoint that cannot be used, and is set aside."""

    name: str
    step: int
    reason: str
    marked: bool  # whether that could be written

    @classmethod
    def mark(cls, vault: Vault, entry: Entry, reason: str) -> Damage:
        """Set a checkpoint aside."""
        return cls(entry.name, entry.step, reason, vault.set_aside(entry.name, reason))


def sift(vault: Vault, entries: Sequence[Entry], tell: Callable[[Damage], None]) -> list[Entry]:
    """The good ones, in the same order; damaged ones are set aside and told of. Raises CheckpointTooNew if all that
    could be used needs a later ftlab."""
    for entry in entries:
        if entry.status == "damaged":
            tell(Damage.mark(vault, entry, entry.reason))
    good = [entry for entry in entries if entry.good]
    newer = next((entry for entry in entries if entry.status == "too new"), None)
    if newer is not None and not good:
        raise CheckpointTooNew(newer.reason)
    return good


def load_first(entries: Sequence[Entry], read: Callable[[Entry], Load],
               condemn: Callable[[Entry, str], None], gather: Gather = lambda problem: [problem]) -> Entry | None:
    """Load the first of these that turns out to be whole; those before it are condemned, with the reason.

    Ranks that load together call this with the same entries and a `gather` that gives each of them everybody's
    problem. `read` changes nothing and returns what loads: a checkpoint of which one rank cannot read its part is
    loaded by none. Raises on all ranks what was wrong on one, if it was no damage.
    """
    for entry in entries:
        load, problem = _try(read, entry)
        problems = [each for each in gather(problem) if each is not None]
        if not problems and load is not None:
            load()
            return entry
        for each in problems:
            if not isinstance(each, CheckpointDamaged):
                raise each
        condemn(entry, problems[0].message)
    return None


def _try(read: Callable[[Entry], Load], entry: Entry) -> tuple[Load | None, FtlabError | None]:
    try:
        return read(entry), None
    except FtlabError as error:
        return None, error
