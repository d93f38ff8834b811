"""The ledger of committed steps: a step counts once, when every rank of its generation has committed it.

A fault in mid all-reduce may let some ranks commit a step that others did not; the newest step wins and is sent to the
others, so it was committed all the same. Such a step is entered when the next generation goes on behind it. When all
live state was lost, a generation begins at an earlier step, from a checkpoint: the steps after it are committed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ftlab.messages import RESERVED_VALUES, StepDone


@dataclass
class Entry:
    """One step, as the ranks of one generation reported it."""

    step: int
    generation: int
    world: int
    commits: dict[int, float] = field(default_factory=dict)  # rank → when
    values: dict[str, list[float]] = field(default_factory=dict)
    samples: list[int] | None = None
    digests: set[int] = field(default_factory=set)
    skipped: str = ""  # why its batch was passed over

    @property
    def complete(self) -> bool:
        """Whether all ranks have committed it."""
        return len(self.commits) >= self.world

    @property
    def at(self) -> float:
        """When the last rank committed it."""
        return max(self.commits.values())

    def facts(self) -> dict[str, Any]:
        """For the event log."""
        means = {name: sum(values) / len(values) for name, values in self.values.items() if name not in RESERVED_VALUES}
        facts: dict[str, Any] = {**means, "world": self.world, "ranks": len(self.commits)}
        if self.skipped:
            return {**facts, "skipped": self.skipped, "passed_over": self.samples or []}
        if self.samples is not None:
            facts["samples"] = self.samples
        if self.digests:
            facts["digest"] = min(self.digests)
        return facts


class Ledger:
    """Step records in, committed steps out."""

    def __init__(self, step: int = 0, generation: int = 0) -> None:
        self.step = step  # committed so far
        self.generation = generation  # in which it was committed
        self._open: dict[tuple[int, int], Entry] = {}

    def add(self, rank: int, world: int, done: StepDone) -> list[Entry]:
        """Take in one rank's step; the steps that are committed by it, oldest first."""
        step, generation = done.step, done.generation
        if step <= self.step and generation > self.generation:
            self.step, self.generation, self._open = step - 1, generation, {}  # back to a checkpoint
        if step <= self.step:
            return []
        entry = self._open.setdefault((step, generation), Entry(step, generation, world))
        if rank in entry.commits:
            return []
        entry.commits[rank] = done.at
        for name, value in (done.values or {}).items():
            entry.values.setdefault(name, []).append(value)
        entry.skipped = done.skipped
        if done.samples is not None:
            entry.samples = done.samples
        if done.digest:
            entry.digests.add(done.digest)
        return list(self._close(entry)) if entry.complete else []

    def flush(self, step: int) -> list[Entry]:
        """Enter what is still open up to `step`: the last steps of a job, which no later one can complete."""
        found = list(self._partial(step + 1))
        self.step = max([self.step, *(entry.step for entry in found)])
        return found

    def _close(self, entry: Entry) -> Iterator[Entry]:
        """Enter a complete step, after those before it that only some ranks committed."""
        yield from self._partial(entry.step)
        yield entry
        self.step, self.generation = entry.step, max(entry.generation, self.generation)
        self._open = {key: other for key, other in self._open.items() if key[0] > entry.step}

    def _partial(self, before: int) -> Iterator[Entry]:
        for step in range(self.step + 1, before):
            partial = [other for (number, _), other in self._open.items() if number == step]
            if partial:
                yield max(partial, key=lambda other: other.generation)
