"""The stage as checks use it: real children, and students whose code does what it likes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from ftlab.errors import ConfigError, NotPicklable
from ftlab.grading.stage import Play, Stage, pack
from ftlab.grading.stage.play import call


@pytest.fixture(scope="module")
def stage():
    with Stage(preload=()) as stage:
        yield stage


@pytest.fixture(autouse=True)
def nothing_left_behind(stage):
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    yield
    assert {each.pid for each in psutil.Process().children(recursive=True)} == before


def play(stage, function, seconds=20.0):
    return stage.run(Play.of_any(function), seconds)


def test_a_value_comes_back_with_what_was_printed(stage):
    def speak():
        print("hello")
        os.write(2, b"and an error")
        return {"steps": [1, 2]}

    outcome = play(stage, speak)
    assert outcome.ok and outcome.value == {"steps": [1, 2]} and outcome.output == "hello\nand an error"


def test_an_exception_comes_back_in_words_with_its_traceback(stage):
    def fail():
        raise ValueError("no such step")

    outcome = play(stage, fail)
    assert not outcome.ok and outcome.trouble() == "ValueError: no such step" and "in fail" in outcome.traceback


def test_a_value_that_is_no_json_is_an_error_of_the_play(stage):
    assert "TypeError" in play(stage, lambda: {1, 2}).raised


@pytest.mark.parametrize(("end", "words"), [
    (lambda: os._exit(3), "exit status 3"), (lambda: os.kill(os.getpid(), 9), "signal 9"),
    (lambda: sys.exit(0), "SystemExit")])
def test_a_child_that_ends_itself_costs_one_play(stage, end, words):
    assert words in play(stage, end).trouble()
    assert play(stage, lambda: 1).value == 1


def test_a_loop_is_ended_at_its_deadline(stage):
    def loop():
        while True:
            time.sleep(0.01)

    outcome = play(stage, loop, 1.0)
    assert outcome.late and "within 1 s" in outcome.trouble(1.0)


def test_a_flood_of_output_is_cut_in_the_middle(stage):
    def flood():
        for _ in range(1000):
            print("x" * 100_000)
        print("the end")

    outcome = play(stage, flood)
    assert outcome.ok and len(outcome.output) < 20_000 and "bytes left out" in outcome.output
    assert outcome.output.endswith("the end\n")


def test_daemons_are_swept(stage):
    def leave():
        return subprocess.Popen(["sleep", "300"], start_new_session=True).pid

    pid = play(stage, leave).value
    assert not psutil.pid_exists(pid)


def test_what_cannot_travel_is_named(stage):
    with pytest.raises(NotPicklable, match="cannot be sent"):
        pack(sys.stdout)


def test_a_play_names_a_function_of_ours_only():
    with pytest.raises(ConfigError, match=r"ftlab\.grading"):
        Play("os:system", (), {})
    assert Play.of(call, len).function == "ftlab.grading.stage.play:call"
