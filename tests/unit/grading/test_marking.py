"""Marking without a sandbox: what is run and judged, what is believed of what was told, what a graded cell gives."""

from __future__ import annotations

import base64
import json

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from ftlab.errors import ConfigError, JobError
from ftlab.grading.marking.judging import judge, run
from ftlab.grading.marking.playing import Played, _explain_absent, _take_in, outputs_of
from ftlab.grading.marking.record import Record, Records
from ftlab.grading.marking.sheet import Sheet, Step, names_in, sheet_of
from ftlab.grading.stage import Answer, Outcome

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 20


def cell(name, source, **marking):
    made = new_code_cell(source)
    made.id = name
    made.metadata["nbgrader"] = {"schema_version": 3, "grade_id": name, "grade": False, "solution": False,
                                 "locked": False, **marking}
    return made


class NoStage:
    """What a graded cell gets that plays nothing."""

    open, sandboxed = True, False


def test_a_graded_cell_is_judged_by_the_gradebooks_source_and_others_are_run():
    experiment = new_code_cell("cluster()")
    experiment.metadata["tags"] = ["experiment"]
    notebook = new_notebook(cells=[new_markdown_cell("text"), cell("stub", "def f(): ...", solution=True),
                                   cell("check", "forged()", grade=True, locked=True, points=99), experiment,
                                   cell("evil", "os.remove('x')", grade=True, locked=True, points=1)])
    sheet = sheet_of(notebook, {"check": ("check.lab91_task1(f)", 2.0)})
    assert [(step.id, step.graded, step.points) for step in sheet.steps] == [("stub", False, 0.0), ("check", True, 2.0)]
    assert sheet.steps[1].source == "check.lab91_task1(f)" and sheet.steps[1].names == ("f",)
    assert sheet.modules == ["ftlab.grading.marking.play", "ftlab.grading.lab91.scenes"]


@pytest.mark.parametrize(("source", "first"), [("import torch", "torch"), ("x = 1", "ftlab.grading.marking.play"),
                                               ("from torch import nn", "torch"), ("torchlike = 1", "ftlab.grading")])
def test_torch_is_imported_beforehand_where_a_cell_uses_it_and_else_nobody_waits_for_it(source, first):
    sheet = sheet_of(new_notebook(cells=[new_code_cell(source), cell("check", "", grade=True)]),
                     {"check": ("check.lab91_task1(f)", 2.0)})
    assert sheet.modules[0].startswith(first)


@pytest.mark.parametrize(("source", "names"), [
    ("check.lab01_task4(Mine, Batches, seed=max(3, 4))", ("Mine", "Batches")),
    ("import os\nfrom math import pi as p\nx = 3\ncheck.a(x, os, p, lambda y: y + z)", ("z",)), ("# nothing", ())])
def test_the_parts_a_graded_cell_needs_are_the_names_it_does_not_make(source, names):
    assert names_in(source, "cell") == names


def test_a_graded_cell_that_is_no_python_is_the_authors_mistake():
    with pytest.raises(ConfigError, match="no plain Python"):
        names_in("%time check.a(f)", "task1-check")


def test_a_sheet_survives_its_way_to_a_worker_and_its_key_depends_on_everything(tmp_path):
    (tmp_path / "data.csv").write_text("1")
    (tmp_path / "answer.ipynb").write_text("1")
    sheet = Sheet(steps=(Step(index=1, id="a", source="b", graded=True, points=2.0, names=("f",)),),
                  files=str(tmp_path))
    assert Sheet.from_json(sheet.to_json()) == sheet
    key = sheet.key("container")
    (tmp_path / "answer.ipynb").write_text("2")
    assert sheet.key("container") == key != sheet.key("limits")
    (tmp_path / "data.csv").write_text("2")
    assert sheet.key("container") != key


def test_what_a_cell_told_becomes_text_and_pictures_only():
    told = {"stdout": "\x1b[31mred\x1b[0m", "stderr": 5, "shown": "<b>", "result": "3", "html": "<script>",
            "pictures": [base64.b64encode(PNG).decode(), base64.b64encode(b"<svg>").decode(), "!", 7],
            "error": {"ename": "E" * 500, "evalue": ["x"], "traceback": "a\nb"}}
    outputs = outputs_of(told)
    assert [each.output_type for each in outputs] == ["stream", "display_data", "display_data", "execute_result",
                                                      "error"]
    assert outputs[0].text == "red" and outputs[2].data == {"image/png": base64.b64encode(PNG).decode()}
    assert len(outputs[-1].ename) == 100 and outputs[-1].evalue == ""


def test_a_play_that_says_it_is_done_before_it_is_is_not_believed():
    played = Played()
    assert _take_in(played, [{"begun": 3}, {"done": True}], {3, 4}) == 3
    assert _take_in(played, [{"cell": 3}, {"begun": 4}, {"cell": 4}, {"done": True}], {3, 4}) is None
    assert _take_in(Played(), [], {3}) == -1


@pytest.mark.parametrize("part", [None, 7, {"raw": 7}, {"raw": "no base64!"}, {"raw": ""}, {"absent": ["x"]}])
def test_a_part_that_makes_no_sense_is_absent(part):
    played = Played()
    _take_in(played, [{"parts": 1, "found": {"f": part}}], set())
    assert played.answers[1]["f"].absent and not played.answers[1]["f"].raw


def test_an_absent_part_says_which_cell_failed_and_how():
    sheet = Sheet(steps=(Step(index=0, id="stub", source="class Mine:\n    x = y"),
                         Step(index=1, id="check", source="", graded=True, names=("Mine", "Other"))))
    played = Played(errors={0: "NameError: y"})
    _explain_absent(played, sheet)
    assert "the cell stub ended with NameError: y" in played.answers[1]["Mine"].absent
    assert "no cell defines it" in played.answers[1]["Other"].absent


def graded(source, points=2.0, names=()):
    return Step(index=1, id="check", source=source, graded=True, points=points, names=names)


@pytest.mark.parametrize(("source", "points", "trouble"), [
    ("1.5", 1.5, False), ("2", 2.0, False), ("assert True", 2.0, False), ("assert False", 0.0, False),
    ("7.0", 2.0, True), ("-1.0", 0.0, True), ("True", 0.0, True), ("float('nan')", 0.0, True), ("'2'", 0.0, True),
    ("1 / 0", 0.0, True)])
def test_a_graded_cell_gives_a_number_within_its_bounds(source, points, trouble):
    judged = judge(graded(source), {}, NoStage)
    assert judged.points == points and bool(judged.trouble) == trouble


def test_what_a_check_prints_is_kept_and_stderr_is_not():
    judged = judge(graded("import sys\nprint('seen')\nprint('noise', file=sys.stderr)\n1.0"), {}, NoStage)
    assert [each.get("text", "") for each in judged.outputs] == ["seen\n", ""]
    assert judged.outputs[1].data == {"text/plain": "1.0"}


def test_a_graded_cell_sees_answers_and_never_a_live_part():
    assert run("type(f).__name__", "cell", {"f": Answer("f", b"x")}) == "Answer"


def test_a_cell_is_judged_again_in_a_new_sandbox_if_the_first_breaks_down():
    class Breaks(NoStage):
        open = False

    stages = [Breaks(), NoStage()]
    judged = judge(graded("stage.run()\n1.0", names=("stage",)), {"stage": Raises(len(stages))}, lambda: stages.pop(0))
    assert judged.points == 1.0 and not stages


class Raises:
    """Fails the first time."""

    def __init__(self, left: int) -> None:
        self.left = left

    def run(self) -> None:
        self.left -= 1
        if self.left:
            raise JobError("the stage's server ended")


def test_a_record_is_found_under_its_key_once_it_is_whole(tmp_path):
    records = Records(tmp_path / "records")
    assert records.find("k") is None
    records.keep("k", Record(points={"check": 1.0}, outputs={"0": [{"output_type": "stream", "name": "stdout",
                                                                   "text": "x"}]}))
    found = records.find("k")
    notebook = new_notebook(cells=[new_code_cell("1"), new_code_cell("2", outputs=[])])
    found.put_into(notebook)
    assert notebook.cells[0].outputs[0].text == "x" and notebook.cells[1].outputs == []
    (tmp_path / "records" / "k.json").write_text("{")
    assert records.find("k") is None


def test_what_a_child_says_in_place_of_an_outcome_has_the_right_types():
    outcome = Outcome.from_reply({"value": [1], "raised": {"a": 1}, "late": 0, "seconds": 1, "output": 5, "more": 1})
    assert outcome.raised == "{'a': 1}" and outcome.output == "5" and outcome.late is False
    assert json.dumps(outcome.value) == "[1]"
