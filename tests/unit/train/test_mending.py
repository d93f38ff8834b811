"""Mending a step: what is remembered, what is asked, and what ends the job."""

from __future__ import annotations

import math

import pytest

from ftlab.config import HealthConfig, JobConfig
from ftlab.errors import BadPolicy, OutOfMemory, RecoveryExhausted
from ftlab.policy import Retry, Rollback, Skip, Split, decide
from ftlab.train.mending import FIRST_PATIENCE, Book, Mender, StepSpoiled

BAD, FULL = StepSpoiled("numbers", "the loss is NaN"), StepSpoiled("oom", "1 rank ran out of memory")


def make(policy=decide, **config) -> Mender:
    return Mender(JobConfig(**config), policy)


def ask(mender: Mender, spoiled: StepSpoiled, step: int, saved: int | None = None, can_split: bool = True):
    answer = mender.decide(spoiled, step, saved=saved, can_split=can_split)
    mender.note(spoiled.cause, step)
    return answer


def test_bad_numbers_are_raised_and_good_ones_kept():
    mender = make(health=HealthConfig(loss_spike=10, settle=5))
    for _ in range(6):
        mender.judge(1.0, 2.0)
    for loss, norm in ((math.nan, 1.0), (1.0, math.inf), (1e6, 2.0)):
        with pytest.raises(StepSpoiled) as spoiled:
            mender.judge(loss, norm)
        assert spoiled.value.cause == "numbers" and spoiled.value.reason
    mender.judge(1.0, 2.0)


def test_a_step_is_tried_again_before_its_batch_is_passed_over():
    mender = make()
    assert [ask(mender, BAD, 7), ask(mender, BAD, 7)] == [Retry(), Skip()]
    assert ask(mender, BAD, 9) == Retry(), "another step has its own tries"


def test_the_budget_of_a_cause_ends_the_job_and_comes_back_with_time():
    mender = make(budgets={"numbers": 2}, refill_steps=50)
    assert isinstance(ask(mender, BAD, 7), Retry) and isinstance(ask(mender, BAD, 7), Skip)
    ended = mender.decide(BAD, 8, saved=None, can_split=True)
    assert isinstance(ended, RecoveryExhausted) and ended.cause == "numbers"
    assert isinstance(mender.decide(BAD, 60, saved=None, can_split=True), Retry)


def test_memory_that_cannot_be_had_in_smaller_pieces_ends_the_job_with_advice():
    assert ask(make(), FULL, 3) == Split()
    ended = make().decide(FULL, 3, saved=None, can_split=False)
    assert isinstance(ended, OutOfMemory) and "data.shards" in ended.hint


def test_ranks_that_remember_different_things_end_with_one_book():
    """The world broke while an answer travelled: rank 2 heard it, the others did not."""
    unaware, aware = {"loaded": "a", "spent": {"numbers": [3]}}, {"passed_over": [34], "spent": {"numbers": [3, 34]}}
    cut = {"pieces": 4, "good": 7, "patience": 400}
    book = Book.of_all([Book(unaware), Book(cut), Book(aware)])
    assert book.notes == {"loaded": "a", "passed_over": [34], "spent": {"numbers": [3, 34]}, **cut}
    assert Book.of_all([Book(aware), Book(unaware)]).passed_over == [34]
    assert unaware == {"loaded": "a", "spent": {"numbers": [3]}}, "nobody's own notes were changed"


@pytest.mark.parametrize("policy", [lambda snapshot, budgets: None, lambda snapshot, budgets: 1 / 0,
                                    lambda snapshot, budgets: Rollback()])
def test_nonsense_of_a_policy_is_an_error_and_not_raised_in_the_middle(policy):
    assert isinstance(make(policy).decide(BAD, 3, saved=None, can_split=True), BadPolicy)


def test_a_checkpoint_that_was_just_loaded_is_suspected():
    mender = make()
    mender.book.loaded("step-30-x", 30)
    assert [ask(mender, BAD, 31, saved=30), ask(mender, BAD, 31, saved=30)] == [Retry(), Rollback(condemn=True)]


def test_larger_pieces_are_tried_again_and_each_failure_doubles_the_patience():
    book = Book({})
    book.split()
    assert book.pieces == 2 and not any(book.good_step() for _ in range(FIRST_PATIENCE - 1))
    assert book.good_step() and book.pieces == 1
    assert not book.good_step(), "nothing larger is left"
    book.split()
    assert not any(book.good_step() for _ in range(2 * FIRST_PATIENCE - 1)) and book.good_step()


def test_batches_in_a_row_are_counted_backwards_from_a_step():
    book = Book({})
    for step in (3, 5, 6, 7):
        book.pass_over(step)
    assert [book.skipped_before(step) for step in (3, 4, 5, 8, 9)] == [0, 1, 0, 3, 0]
    assert book.is_passed_over(5) and not book.is_passed_over(4)


def test_what_is_remembered_travels_to_a_replacement():
    mender, other = make(), make()
    mender.book.split()
    mender.book.pass_over(4)
    ask(mender, BAD, 9)
    other.load_state_dict(mender.state_dict())
    assert (other.book.pieces, other.book.passed_over) == (2, [4])
    assert other.book.budgets(other.config, 10) == mender.book.budgets(mender.config, 10)


def test_going_back_to_a_checkpoint_does_not_give_budgets_back_or_batches():
    mender = make(budgets={"numbers": 3})
    early = mender.state_dict()
    for step in (9, 9, 10):
        ask(mender, BAD, step)
    mender.book.pass_over(9)
    mender.load_state_dict(early)
    assert mender.book.passed_over == [9]
    assert isinstance(mender.decide(BAD, 5, saved=0, can_split=True), RecoveryExhausted)
