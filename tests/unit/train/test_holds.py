"""A worker pauses between two steps, or says that it is too late."""

from __future__ import annotations

import threading

import pytest

from ftlab.messages import Held, Message
from ftlab.train import holds as module
from ftlab.train.holds import Holds


class Worker:
    """A training thread that commits steps as fast as it can."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.changed = threading.Condition()
        self.holds = Holds(self.changed, self._take)
        self.over = False

    def _take(self, message: Message) -> None:
        with self.changed:
            self.sent.append(message)
            self.changed.notify_all()

    def train(self, first: int, total: int) -> threading.Thread:
        thread = threading.Thread(target=self._train, args=(first, total), daemon=True)
        thread.start()
        return thread

    def _train(self, first: int, total: int) -> None:
        for step in range(first, total):
            self.holds.begun = step
            if step >= self.holds.first:
                self.holds.pause(step, 1, lambda: self.over)

    def ask(self, *steps: int) -> list[Held]:
        with self.changed:
            answers = self.holds.ask(steps, 1)
            self.changed.notify_all()
        return answers

    def wait_for_word(self) -> Message:
        with self.changed:
            assert self.changed.wait_for(lambda: self.sent, 10)
            return self.sent[-1]


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_it_pauses_at_the_step_and_goes_on_when_that_is_not_asked_for_any_more(worker):
    assert worker.ask(25) == []
    thread = worker.train(0, 100)
    assert worker.wait_for_word() == Held(generation=1, asked=25, step=25) and worker.holds.begun == 25
    assert thread.is_alive()
    worker.ask()
    thread.join(10)
    assert worker.holds.begun == 99 and len(worker.sent) == 1


def test_a_step_that_has_begun_is_too_late_and_said_so_once(worker):
    worker.train(0, 30).join(10)
    assert worker.ask(25, 40) == [Held(generation=1, asked=25, step=29, missed=True)]
    assert worker.holds.first == 40


def test_a_step_that_was_jumped_over_is_missed(worker):
    worker.ask(25)
    worker.train(26, 30).join(10)
    assert worker.sent == [Held(generation=1, asked=25, step=26, missed=True)]


@pytest.mark.parametrize("how", ["the generation ends", "the controller is gone", "the deadline is over"])
def test_a_pause_ends_when(worker, monkeypatch, how):
    monkeypatch.setattr(module, "LONGEST_S", 0.05 if how == "the deadline is over" else 60.0)
    worker.ask(5)
    thread = worker.train(0, 10)
    worker.wait_for_word()
    with worker.changed:
        worker.over = how == "the generation ends"
        if how == "the controller is gone":
            worker.holds.go_on()
        worker.changed.notify_all()
    thread.join(10)
    assert not thread.is_alive() and worker.holds.begun == 9
    missed = [word.missed for word in worker.sent if isinstance(word, Held) and word.asked == 5]
    assert missed == ([False, True] if how == "the deadline is over" else missed)


def test_the_same_step_may_be_asked_for_again_in_the_next_generation(worker):
    worker.ask(5)
    thread = worker.train(0, 6)
    worker.wait_for_word()
    with worker.changed:
        worker.holds.begin_anew([5])
        worker.over = True
        worker.changed.notify_all()
    thread.join(10)
    assert worker.holds.first == 5, "the training thread that left did not take it along"
