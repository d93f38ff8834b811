"""A worker's page: written by one process, read by another at any moment."""

from __future__ import annotations

import json
import os
import time

import pytest

from ftlab.messages import Place
from ftlab.train.status import StatusPage


def in_a_child(work) -> None:
    """Run something in a forked process and wait for its end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_new_page_says_that_its_worker_starts():
    progress = StatusPage().read()
    assert (progress.generation, progress.rank, progress.step, progress.place) == (0, -1, 0, Place.STARTING)


def test_what_a_child_writes_its_parent_reads():
    page = StatusPage()

    def train() -> None:
        page.generation, page.rank = 3, 2
        page.move(Place.COMPUTING)
        page.commit(41, at=123.5)
        page.move(Place.COMMUNICATING)

    in_a_child(train)
    progress = page.read()
    assert (progress.generation, progress.rank, progress.step) == (3, 2, 41)
    assert progress.place == Place.COMMUNICATING and progress.committed_at == 123.5
    assert progress.since > 123.5


def test_a_page_outlives_a_worker_and_is_reset_for_the_next():
    page = StatusPage()
    in_a_child(lambda: page.commit(1 << 40, at=1.0))
    assert page.read().step == 1 << 40
    page.reset()
    assert (page.read().step, page.read().rank, page.read().place) == (0, -1, Place.STARTING)


def test_a_commit_moves_out_of_the_step():
    page = StatusPage()
    page.move(Place.COMMUNICATING)
    page.commit(7, at=99.0)
    progress = page.read()
    assert (progress.place, progress.since, progress.committed_at, progress.step) == (Place.OUTSIDE, 99.0, 99.0, 7)


def test_a_step_that_is_entered_shows_until_it_is_committed():
    page = StatusPage()
    page.commit(7, at=time.monotonic())
    assert page.read().place == Place.OUTSIDE
    page.enter()
    inside = page.read()
    assert (inside.place, inside.step, page.place) == (Place.COMPUTING, 7, Place.COMPUTING)
    assert inside.since > inside.committed_at
    page.move(Place.COMMUNICATING)
    assert page.read().place == Place.COMMUNICATING
    page.commit(8, at=time.monotonic())
    after = page.read()
    assert (after.place, after.step, after.since) == (Place.OUTSIDE, 8, after.committed_at)


@pytest.mark.parametrize("before", [Place.RECOVERING, Place.COMMUNICATING, Place.COMPUTING])
def test_the_first_step_of_a_generation_and_one_that_is_run_again_are_entered_too(before):
    page = StatusPage()
    came = page.move(before)
    page.enter()
    assert page.read().place == Place.COMPUTING and page.read().since > came


def test_a_page_that_is_read_while_it_is_written_shows_one_moment():
    page = StatusPage()
    writer = os.fork()
    if writer == 0:
        try:
            for number in range(60_000):
                page.generation = page.rank = number
                page.commit(number, float(number))
        finally:
            os._exit(0)
    torn = reads = 0
    while os.waitpid(writer, os.WNOHANG)[0] == 0:
        seen = page.read()
        reads += 1
        torn += seen.place == Place.OUTSIDE and not (
            seen.generation == seen.rank == seen.step == seen.since == seen.committed_at)
    assert reads and torn == 0, f"{torn} of {reads} reads were torn"


def test_pages_do_not_share_their_memory():
    first, second = StatusPage(), StatusPage()
    first.commit(5, at=1.0)
    assert second.read().step == 0


def test_progress_is_fit_for_a_message():
    page = StatusPage()
    page.move(Place.PARKED)
    told = json.loads(json.dumps(page.read().to_dict()))
    assert told["place"] == 1 and set(told) == {"generation", "rank", "step", "place", "since", "committed_at"}
