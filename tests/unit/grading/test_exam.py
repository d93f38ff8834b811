"""What checks share: parts that are not there, and answers of the wrong kind."""

from __future__ import annotations

import sys

from ftlab.grading.exam import Exam
from ftlab.grading.stage import Answer


def test_a_part_that_is_absent_gets_nothing_and_is_not_played(capsys):
    exam = Exam("lab99_task1", 2.0, Answer("MyThing", absent="its cell raised NameError"))
    assert not exam.wants("anything") and exam.close() == 0.0
    assert "its cell raised NameError" in capsys.readouterr().out


def test_a_part_that_cannot_travel_gets_nothing(capsys):
    exam = Exam("lab99_task1", 2.0, sys.stdout)
    assert exam.close() == 0.0 and "cannot be sent" in capsys.readouterr().out


def test_a_scenario_says_how_it_is_repeated(capsys):
    exam = Exam("lab99_task1", 2.0, Answer("MyThing", b"x"), only="first")
    assert exam.wants("the first one") and not exam.wants("the second one")
    exam.expect("the first one", False, expected="a", got="b")
    assert exam.close() == 0.0
    assert "check.lab99_task1(MyThing, only='the first one')" in capsys.readouterr().out
