"""The ledger: a step counts once, when all ranks of its generation have committed it."""

from __future__ import annotations

from typing import Any

from ftlab.messages import StepDone
from ftlab.recovery.ledger import Entry, Ledger


def record(step: int, generation: int = 1, at: float = 0.0, **more: Any) -> StepDone:
    return StepDone(generation, step, at or float(step), **more)


def numbers(entries: list[Entry]) -> list[tuple[int, int]]:
    """(step, generation) of each entry."""
    return [(entry.step, entry.generation) for entry in entries]


def test_a_step_is_committed_only_when_all_ranks_have_reported_it():
    ledger = Ledger()
    assert ledger.add(2, 3, record(1)) == []
    assert ledger.add(0, 3, record(1)) == []
    assert ledger.step == 0
    assert numbers(ledger.add(1, 3, record(1))) == [(1, 1)]
    assert ledger.step == 1


def test_a_record_that_comes_twice_counts_once():
    ledger = Ledger()
    assert ledger.add(0, 2, record(1, values={"loss": 1.0})) == []
    assert ledger.add(0, 2, record(1, values={"loss": 1.0})) == []
    (entry,) = ledger.add(1, 2, record(1, values={"loss": 3.0}))
    assert entry.facts()["loss"] == 2.0 and entry.facts()["ranks"] == 2


def test_records_that_are_sent_again_after_the_commit_are_ignored():
    ledger = Ledger()
    for rank in (0, 1):
        ledger.add(rank, 2, record(1))
    for rank in (0, 1):
        assert ledger.add(rank, 2, record(1)) == []
    assert ledger.step == 1
    assert ledger.add(0, 2, record(2)) == [], "and leave nothing behind"
    assert numbers(ledger.add(1, 2, record(2))) == [(2, 1)]


def test_a_restored_ledger_ignores_what_its_journal_already_has():
    ledger = Ledger(step=5, generation=1)
    assert ledger.add(0, 1, record(5)) == []
    assert numbers(ledger.add(0, 1, record(6))) == [(6, 1)]


def test_a_generation_that_begins_at_a_checkpoint_commits_the_steps_after_it_again():
    ledger = Ledger(step=5, generation=1)
    ledger.add(0, 2, record(6))  # nobody will complete it
    assert ledger.add(0, 2, record(3, generation=2)) == [] and ledger.step == 2
    assert numbers(ledger.add(1, 2, record(3, generation=2))) == [(3, 2)]
    assert ledger.add(0, 2, record(3, generation=2)) == [], "sent again"
    assert ledger.add(0, 2, record(5)) == [], "of the lost generation"
    for rank in (0, 1):
        last = ledger.add(rank, 2, record(4, generation=2))
    assert numbers(last) == [(4, 2)] and (ledger.step, ledger.generation) == (4, 2)


def test_a_step_that_only_some_ranks_committed_is_entered_when_the_next_generation_goes_on_behind_it():
    ledger = Ledger()
    for rank in (0, 1):
        ledger.add(rank, 2, record(1))
    assert ledger.add(0, 2, record(2, samples=[4, 5])) == []  # rank 1 dies in mid all-reduce
    assert ledger.add(0, 2, record(3, generation=2)) == []
    partial, whole = ledger.add(1, 2, record(3, generation=2))
    assert numbers([partial, whole]) == [(2, 1), (3, 2)]
    assert (partial.facts()["ranks"], whole.facts()["ranks"]) == (1, 2)
    assert partial.facts()["samples"] == [4, 5]
    assert ledger.step == 3


def test_a_step_that_is_done_again_is_entered_once_for_the_generation_that_completed_it():
    ledger = Ledger()
    ledger.add(0, 2, record(1))  # rank 0 commits it and dies with it
    ledger.add(0, 2, record(1, generation=2))
    assert numbers(ledger.add(1, 2, record(1, generation=2))) == [(1, 2)]
    ledger.add(0, 2, record(2, generation=2))
    assert numbers(ledger.add(1, 2, record(2, generation=2))) == [(2, 2)]


def test_of_two_unfinished_tries_the_newer_generation_is_entered():
    ledger = Ledger()
    ledger.add(0, 2, record(1, generation=1))
    ledger.add(1, 2, record(1, generation=2))
    ledger.add(0, 2, record(2, generation=3))
    assert numbers(ledger.add(1, 2, record(2, generation=3))) == [(1, 2), (2, 3)]


def test_steps_come_out_in_order_when_ranks_report_several_at_once():
    ledger = Ledger()
    for step in (1, 2, 3):
        assert ledger.add(0, 2, record(step)) == []
    out = [entry for step in (1, 2, 3) for entry in ledger.add(1, 2, record(step))]
    assert numbers(out) == [(1, 1), (2, 1), (3, 1)]


def test_a_step_is_committed_when_its_last_rank_committed_it():
    ledger = Ledger()
    ledger.add(0, 2, record(1, at=7.5))
    (entry,) = ledger.add(1, 2, record(1, at=7.25))
    assert entry.at == 7.5


def test_ranks_that_saw_different_samples_are_visible():
    ledger = Ledger()
    ledger.add(0, 2, record(1, digest=11))
    (entry,) = ledger.add(1, 2, record(1, digest=12))
    assert entry.digests == {11, 12}
    ledger.add(0, 2, record(2, digest=13))
    (agreed,) = ledger.add(1, 2, record(2, digest=13))
    assert agreed.digests == {13} and agreed.facts()["digest"] == 13


def test_a_step_without_samples_or_values_has_none_in_its_facts():
    (entry,) = Ledger().add(0, 1, record(1, values=None, samples=None, digest=0))
    assert entry.facts() == {"world": 1, "ranks": 1}
