"""Mending a step: bad numbers and memory that ran out, while every node and worker is well.

All ranks know of a spoiled step at the same moment: the sum of their gradients carries it. Rank 0 asks the policy and
tells the others what to do, which costs nothing while all is well.
What has to be remembered (batches passed over, the number of pieces, budgets) rides with the training state, to
replacements and into checkpoints, but is no part of the state's digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftlab import policy as acts
from ftlab.config import JobConfig
from ftlab.errors import BadPolicy, FtlabError, OutOfMemory, RecoveryExhausted
from ftlab.health.numbers import NumberWatch
from ftlab.policy import Action, Failure, Policy, Snapshot

FIRST_PATIENCE = 200  # good steps before a larger micro-batch is tried again; twice as many after each failure


class StepSpoiled(Exception):
    """A step that must not be committed; raised on all ranks at once."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause, self.reason = cause, reason


class Book:
    """What mending remembers, as plain data."""

    def __init__(self, notes: dict[str, Any]) -> None:
        self.notes = notes

    @property
    def pieces(self) -> int:
        """How many pieces each shard is cut into."""
        return int(self.notes.get("pieces", 1))

    @property
    def passed_over(self) -> list[int]:
        """Steps whose batches are passed over."""
        return list(self.notes.get("passed_over", []))

    def split(self) -> None:
        """Twice as many pieces, and more patience before fewer are tried again."""
        again = "patience" in self.notes
        self.notes.update(pieces=2 * self.pieces, good=0,
                          patience=2 * int(self.notes["patience"]) if again else FIRST_PATIENCE)

    def good_step(self) -> bool:
        """A step went well; whether a larger micro-batch is tried from now on."""
        if self.pieces == 1:
            return False
        self.notes["good"] = int(self.notes.get("good", 0)) + 1
        if self.notes["good"] < int(self.notes["patience"]):
            return False
        self.notes.update(pieces=self.pieces // 2, good=0)
        return True

    def pass_over(self, step: int) -> None:
        """Remember a batch that is not to be trained on."""
        self.notes["passed_over"] = sorted({*self.passed_over, step})

    def merged_with(self, other: Book) -> dict[str, Any]:
        """What is not forgotten when another book is taken over."""
        mine, theirs = self.notes.get("spent", {}), other.notes.get("spent", {})
        spent = {cause: max(mine.get(cause, []), theirs.get(cause, []), key=len) for cause in {*mine, *theirs}}
        rehearsed = self.notes.get("rehearsed") or other.notes.get("rehearsed")
        return {"passed_over": sorted({*self.passed_over, *other.passed_over}), "spent": spent,
                **({"rehearsed": rehearsed} if rehearsed else {})}

    @classmethod
    def of_all(cls, books: Sequence[Book]) -> Book:
        """One book for all ranks: when the world breaks while an answer travels, some have heard it and some have not.
        A rank that passed over a batch which the others train on would be a step ahead of them for ever."""
        first, *others = books
        notes = dict(first.notes)
        for other in others:
            notes.update(Book(notes).merged_with(other))
        most = max(books, key=lambda book: book.pieces).notes
        return cls({**notes, **{name: most[name] for name in ("pieces", "good", "patience") if name in most}})

    def is_passed_over(self, step: int) -> bool:
        """Whether a step's batch is not to be trained on; asked in every step."""
        return step in self.notes.get("passed_over", ())

    def skipped_before(self, step: int) -> int:
        """How many batches in a row just before this step were passed over."""
        skipped, count = set(self.passed_over), 0
        while step - 1 - count in skipped:
            count += 1
        return count

    @property
    def loop(self) -> int:
        """Up to which step the loop goes that the state was in; a train function may have several, as for epochs."""
        return int(self.notes.get("loop", 0))

    @property
    def rehearsed(self) -> bool:
        """Whether a step was run twice already, or is not to be."""
        return "rehearsed" in self.notes

    @property
    def foreign(self) -> bool:
        """Whether the train function was seen to call collectives of its own; a replacement must know it too."""
        return bool(self.notes.get("rehearsed", {}).get("foreign"))

    def note_rehearsed(self, trained: int, copying: bool = False, foreign: bool = False) -> None:
        """Remember what a rehearsal found: with which parameters, whether steps need a copy to go back to, and whether
        the train function calls collectives of its own."""
        self.notes["rehearsed"] = {"trained": trained, "copying": copying, "foreign": foreign}

    def rehearse_again_if_other(self, trained: int) -> None:
        """Forget the rehearsal if it was with other parameters."""
        if self.rehearsed and self.notes["rehearsed"]["trained"] != trained:
            del self.notes["rehearsed"]

    def loaded(self, name: str, step: int) -> None:
        """The state came from this checkpoint."""
        self.notes.update(loaded=name, loaded_step=step)

    def budgets(self, config: JobConfig, step: int) -> dict[str, int]:
        """Recoveries left per cause; a cause that stayed away for long has its full budget again."""
        spent: dict[str, list[int]] = self.notes.setdefault("spent", {})
        for cause, steps in spent.items():
            if steps and step - steps[-1] >= config.refill_steps:
                spent[cause] = []
        return {cause: budget - len(spent.get(cause, [])) for cause, budget in config.all_budgets().items()}

    def spend(self, cause: str, step: int) -> None:
        """Count one recovery."""
        spent = self.notes.setdefault("spent", {})
        spent[cause] = [*spent.get(cause, []), step]


class Mender:
    """Judges the numbers of each step, and decides what becomes of a spoiled one."""

    def __init__(self, config: JobConfig, policy: Policy) -> None:
        self.config, self.policy, self.book = config, policy, Book({})
        self.watch = NumberWatch(config.health)
        self._tried = (-1, 0)  # a step, and how often it has failed

    def state_dict(self) -> dict[str, Any]:
        """What a replacement must know."""
        return {**self.book.notes, "numbers": self.watch.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Know what the one that was replaced knew. Batches passed over here stay so, and budgets spent stay spent:
        who goes back to a checkpoint must not forget what led there, or it would go back for ever."""
        notes = {name: value for name, value in saved.items() if name != "numbers"}
        self.book = Book({**notes, **self.book.merged_with(Book(notes))})
        if "numbers" in saved:
            self.watch.load_state_dict(saved["numbers"])

    def judge(self, loss: float | None, norm: float) -> None:
        """Raise StepSpoiled if the numbers that all ranks agreed on are bad."""
        reason = self.watch.judge(loss, norm)
        if reason:
            raise StepSpoiled("numbers", reason)
        self.watch.accept(loss, norm)

    def decide(self, spoiled: StepSpoiled, step: int, *, saved: int | None, can_split: bool) -> Action | FtlabError:
        """What to do about a spoiled step, or the error that ends the job. Rank 0 asks; all ranks `note` the answer."""
        notes, tries = self.book.notes, self._tries(step)
        since = step - int(notes["loaded_step"]) if "loaded_step" in notes else None
        snapshot = Snapshot(failures=(Failure(cause=spoiled.cause, detail=spoiled.reason),), members=(), spares=(),
                            wanted=1, minimum=1, can_start=False, step=step, holders=1, saved=saved, tries=tries,
                            skipped=self.book.skipped_before(step), since_load=since, can_split=can_split)
        action, problem = acts.decide_step(self.policy, snapshot, self.book.budgets(self.config, step))
        if problem:
            return BadPolicy(problem, hint="return one of ftlab.policy's actions for a step, e.g. Retry() or Skip()")
        if isinstance(action, acts.Abort):
            kind = OutOfMemory if action.error == "OutOfMemory" else RecoveryExhausted
            return kind(action.reason, cause=spoiled.cause, seen=f"{step} steps committed, {tries} tries of this one "
                                                                 f"failed before", hint=_HINTS.get(spoiled.cause, ""))
        return action

    def note(self, cause: str, step: int) -> None:
        """A step is mended once more."""
        self._tried = (step, self._tries(step) + 1)
        self.book.spend(cause, step)

    def _tries(self, step: int) -> int:
        return self._tried[1] if self._tried[0] == step else 0


_HINTS = {"oom": "write `for ids in data.shards(step): ...; ctx.backward(loss)`, so that the batch can be cut into "
                 "smaller pieces, or lower global_batch",
          "numbers": "lower the learning rate, look at the samples of this step, or raise budgets={'numbers': n}"}
