"""`ftlab labs run` and `ftlab labs render`, on a small course with real kernels."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat

from ftlab.cli.main import main
from ftlab.grading.course import cells
from ftlab.grading.course.kernel import Kernel
from ftlab.grading.course.rendering import render


def test_a_solution_runs_with_full_points_and_progress(course, capsys):
    assert main(["labs", "run", "--json"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)["labs"]["lab90"]
    assert (facts["earned"], facts["points"], facts["ok"]) == (6, 6, True)
    assert "[lab90 3/" in err and "2 of 2 points" in err
    assert not list((course.sources / "lab90").glob("*.jsonl"))  # it ran in a copy


def test_a_solution_that_fails_is_told_and_not_rendered(course, capsys):
    file = course.notebook("lab90")
    notebook = cells.read(file)
    notebook.cells[3].source = notebook.cells[3].source.replace("2 * x", "3 * x")
    cells.write(notebook, file)
    assert main(["labs", "run"]) == 1
    assert "task1-check" in capsys.readouterr().err
    assert main(["labs", "render"]) == 1
    assert not (course.root / "build" / "labs").exists()


def test_pages_show_the_students_view_with_the_outputs_of_the_reference(course):
    assert main(["labs", "render"]) == 0
    page = (course.root / "build" / "labs" / "lab90.html").read_text()
    text = re.sub(r"<[^>]+>", "", page)
    assert "NotImplementedError" in text and "1 of 1 scenarios, 2 of 2 points" in text
    assert not re.search(r"8121|2 \* x|any reason", text) and "<script" not in page


def test_a_page_fetches_nothing_and_shows_the_last_version_of_a_line():
    stream = nbformat.v4.new_output("stream", text="1 %\r50 %\r100 %\nend\n")
    widget = nbformat.v4.new_output("display_data", data={
        "application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "text/html": "<svg></svg>"})
    cell = nbformat.v4.new_code_cell("go()", id="go", outputs=[stream, widget])
    solved = nbformat.v4.new_notebook(cells=[cell])
    page = render(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("go()", id="go")]), solved, "x")
    assert "100 %\nend" in page and "50 %" not in page and "<svg>" in page
    assert "widget-view" not in page and "<script" not in page and not re.search(r"(src|href)=.https?:", page)


def test_a_kernel_gives_outputs_as_a_notebook_would(tmp_path: Path):
    with Kernel(tmp_path) as kernel:
        outputs, trouble = kernel.run("print('a'); print('b'); import os; print(os.getcwd()); 3.5", 60)
        assert [each.output_type for each in outputs] == ["stream", "execute_result"] and not trouble
        assert outputs[0].text == f"a\nb\n{tmp_path}\n" and outputs[1].data["text/plain"] == "3.5"
        outputs, _ = kernel.run("from IPython.display import display, clear_output\nh = display('x', display_id=True)\n"
                                "h.update('y')", 60)
        assert [each.data["text/plain"] for each in outputs] == ["'y'"]
        outputs, _ = kernel.run("print('gone'); clear_output(); print('here'); 1/0", 60)
        assert outputs[0].text == "here\n" and outputs[1].ename == "ZeroDivisionError"
        outputs, trouble = kernel.run("input()", 60)
        assert outputs[-1].ename == "StdinNotImplementedError"
