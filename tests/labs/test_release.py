"""`ftlab labs release` and `ftlab labs check`, on a small course: what is generated, what is refused, what is found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest

from ftlab.cli.main import main
from ftlab.errors import ConfigError, FtlabError
from ftlab.grading.course import cells
from ftlab.grading.course.audit import audit
from ftlab.grading.course.course import Course
from ftlab.grading.course.release import release, tree


def source(course: Course):
    return cells.read(course.notebook("lab90"))


def change(course: Course, cell_id: str, **to) -> None:
    """Change a cell of the source: its text, or its nbgrader metadata."""
    notebook = source(course)
    [cell] = [each for each in notebook.cells if each.id == cell_id]
    cell.source = to.pop("source", cell.source)
    cell.metadata.get("nbgrader", {}).update(to)
    cells.write(notebook, course.notebook("lab90"))


def problems(course: Course) -> list[str]:
    return [str(each) for each in audit(course, ["lab90"])]


# ---- release -----------------------------------------------------------------------------------------------


def test_a_release_holds_stubs_and_visible_checks_and_no_secret(course):
    notebook = cells.read(course.releases / "lab90" / "small.ipynb")
    by_id = {cell.id: cell for cell in notebook.cells}
    assert "raise NotImplementedError()" in by_id["task1-stub"].source and "2 * x" not in by_id["task1-stub"].source
    assert by_id["task1-check"].source == "check.lab90_task1(double)"
    assert by_id["task1-hidden"].source == "# Hidden: other numbers."
    everything = b"".join(tree(course.releases).values()).decode()
    assert not re.search("8121|MARK SCHEME|any reason|Because it is", everything)
    assert (course.releases / "lab90" / "note.md").read_text() == "A file that travels with the lab.\n"


def test_releasing_twice_gives_the_same_bytes_and_leaves_no_database(course):
    before = tree(course.root)
    for path in course.releases.rglob("*"):
        if path.is_file():
            path.unlink()
    assert release(course, ["lab90"], force=True) == ["lab90"]
    assert release(course, ["lab90"]) == []
    assert tree(course.root) == before


def test_a_broken_source_leaves_the_old_release(course):
    before = tree(course.releases)
    change(course, "task1-stub", source="### BEGIN SOLUTION\n1")
    with pytest.raises(FtlabError, match="no end solution statement"):
        release(course, ["lab90"])
    assert tree(course.releases) == before and not (course.root / "build").exists()


def test_work_in_a_release_is_not_overwritten(course):
    file = course.releases / "lab90" / "small.ipynb"
    notebook = cells.read(file)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="only run")]
    cells.write(notebook, file)
    release(course, ["lab90"])  # a notebook that was only run is replaced
    notebook.cells[3].source = "def double(x): return x + x"
    cells.write(notebook, file)
    with pytest.raises(ConfigError, match=r"was edited since its release: small\.ipynb"):
        release(course, ["lab90"])
    assert cells.read(file).cells[3].source == "def double(x): return x + x"
    assert release(course, ["lab90"], force=True) == ["lab90"]


def test_an_unknown_lab_is_bad_usage(course, capsys):
    assert main(["labs", "release", "lab77"]) == 2
    assert "the labs are lab90" in capsys.readouterr().err


# ---- check -------------------------------------------------------------------------------------------------


def test_a_fresh_release_is_in_order(course, capsys):
    assert problems(course) == []
    assert main(["labs", "check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "labs": ["lab90"], "problems": []}


def test_drift_is_found_and_names_the_cell(course, capsys):
    change(course, "task2", source="## Task 2: square it")
    assert main(["labs", "check"]) == 1
    out = capsys.readouterr().out
    assert "labs/lab90/small.ipynb: is not what its source gives (cell task2); ftlab labs release" in out


@pytest.mark.parametrize(("cell", "to", "words"), [
    ("task1-check", {"points": 5}, "counts 5 points, but its check gives up to 2"),
    ("task1-check", {"source": "check.lab90_task7(double)"}, "there is no check.lab90_task7; did you mean"),
    ("task1-check", {"source": "check.lab90_task1(double) > 1"}, "does not end with a plain check"),
    ("task1-check", {"source": "check.lab90_task1(helper)"}, "uses helper, which no cell above defines"),
    ("task1-check", {"locked": False}, "students may change it"),
    ("task1-stub", {"source": "def double(x):\n    return 2 * x"}, "students would get an empty cell"),
    ("task1-stub", {"grade_id": "other"}, "its grade_id is 'other'"),
    ("task1-check", {"schema_version": 2}, "its nbgrader metadata is not valid"),
    ("task2-why", {"points": 0}, "is graded but counts nothing"),
    ("task2-why", {"source": "Why?\n\n### BEGIN MARK SCHEME\n2: all\n### END MARK SCHEME"},
     "students would not see 'Why?'"),
    ("title", {"source": "# Lab 90\n\nSee [this](gone.md)."}, "its link gone.md leads nowhere"),
])
def test_what_is_wrong_with_a_source_is_found(course, cell, to, words):
    change(course, cell, **to)
    if "link" in words:
        release(course, ["lab90"])
    found = problems(course)
    assert any(words in line for line in found), found


def test_ids_outputs_and_order_of_tasks_are_looked_at(course):
    notebook = source(course)
    notebook.cells[3].id, notebook.cells[3].metadata.nbgrader.grade_id = "1a2b3c4d", "1a2b3c4d"
    notebook.cells[4].outputs = [nbformat.v4.new_output("stream", text="3")]
    notebook.cells[6].metadata["scrolled"] = True
    cells.write(notebook, course.notebook("lab90"))
    found = problems(course)
    assert any("1a2b3c4d: its id says nothing" in line for line in found)
    assert any("task1-check: its outputs are not stripped" in line for line in found)
    assert any("task1-cluster: has metadata that only makes noise: scrolled" in line for line in found)


def test_tasks_out_of_order_are_found(course):
    notebook = source(course)
    for cell in notebook.cells:
        cell.id = cell.id.replace("task2", "task4")
        if "nbgrader" in cell.metadata:
            cell.metadata.nbgrader.grade_id = cell.id
    cells.write(notebook, course.notebook("lab90"))
    assert any("task4: comes after task 1; number the tasks in order" in line for line in problems(course))


@pytest.mark.parametrize(("text", "words"), [
    ("### BEGIN HIDDEN TESTS", "still has the marker 'BEGIN HIDDEN TESTS'"),
    ("check.lab90_task1(double, points=1, number=8121)", "gives away 'check.lab90_task1(double, points=1, number=81"),
])
def test_a_secret_in_a_release_is_found(course, text, words):
    (course.releases / "lab90" / "note.md").write_text(text)
    assert any(words in line for line in problems(course))


def test_a_release_without_a_source_and_a_stale_page_of_points_are_found(course):
    (course.releases / "lab07").mkdir()
    Path(course.root / "docs" / "points.md").write_text("old")
    found = problems(course)
    assert any(line.startswith("labs/lab07: has no source") for line in found)
    assert any(line.endswith("ftlab labs points") for line in found)


def test_the_page_of_points_adds_up(course):
    page = (course.root / "docs" / "points.md").read_text()
    assert "| lab90 | 5 | 1 | 2 | 8 |" in page and "| task 1 | 2 | 1 |  | 3 |" in page
