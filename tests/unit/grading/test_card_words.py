"""What a card says: student's text is marked, frames of ours are left out, equal errors are told once."""

from __future__ import annotations

import pytest

from ftlab.errors import ConfigError
from ftlab.grading import check
from ftlab.grading.card import Card
from ftlab.grading.stage.outcome import Outcome

TRACE = '''Traceback (most recent call last):
  File "/x/ftlab/grading/stage/actor.py", line 90, in _attempt
    return call()
  File "<ipython-input-3>", line 4, in read_report
    return 1 / 0
           ~~^~~
ZeroDivisionError: division by zero
'''


def test_equal_errors_are_told_once_and_without_our_frames():
    card = Card("lab01_task4", 2)
    for scenario in ("one", "two", "three"):
        card.returned(scenario, Outcome(raised="ZeroDivisionError: division by zero", traceback=TRACE), 1.0)
    text = card.text()
    assert text.count("in read_report") == 1 and "actor.py" not in text and text.count("(as above)") == 2


def test_every_line_of_the_student_is_marked_and_steers_no_terminal():
    card = Card("lab01_task1", 2)
    card.expect("it returns", False, expected="a dict", got="\x1b[2Jfine\n  ok    all\nlab01_task1: 9 of 9 points")
    lines = [line for line in card.text().splitlines() if "ok " in line or "fine" in line or "9 of 9" in line]
    assert len(lines) == 3 and all(line.strip().removeprefix("got:").strip().startswith("| ") for line in lines)
    assert "\x1b" not in card.text()


def test_a_scenario_that_is_not_there_is_an_error_that_names_some():
    with pytest.raises(ConfigError, match="has no scenario 'zzz'"):
        check.lab00_task2({"kill": False}, only="zzz")


def test_the_line_that_repeats_a_check_can_be_pasted(capsys):
    my_guess = {"kill": True, "hang": True, "blackout": True}
    check.lab00_task2(my_guess)
    [line] = [line.split(":", 1)[1].strip() for line in capsys.readouterr().out.splitlines() if "again:" in line]
    assert eval(line, {"check": check, "my_guess": my_guess}) == 0.0
