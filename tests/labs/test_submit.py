"""`ftlab submit`: what is repaired, what is said, what is packed; on a small course, with real kernels where needed."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ftlab.cli.main import main
from ftlab.errors import ConfigError
from ftlab.grading.course import cells
from ftlab.grading.course.parcel import Parcel
from ftlab.grading.course.record import Record
from ftlab.grading.course.repair import repair
from tests.limits import COMMAND_S, SOON_S

RIGHT = {"task1-stub": "def double(x):\n    return x + x", "task2-stub": "def square(x):\n    return x ** 2",
         "task2-why": "Since it is so."}


@pytest.fixture
def record(course) -> Record:
    return Record.read(course.releases / "lab90")


def solved(record: Record, answers=RIGHT) -> dict:
    """The released notebook with answers in it, as plain JSON."""
    notebook = copy.deepcopy(record.content)
    for cell in notebook["cells"]:
        cell["source"] = answers.get(cell["id"], "".join(cell["source"]))
    return notebook


def fixed(notebook: dict, record: Record) -> tuple[dict[str, str], list[str], list[str]]:
    """Repaired: sources by id, the order of ids, the notes."""
    done = repair(json.dumps(notebook), record)
    return {cell.id: cell.source for cell in done.notebook.cells}, [cell.id for cell in done.notebook.cells], done.notes


# ---- repair (pure) -----------------------------------------------------------------------------------------


def test_a_good_notebook_is_left_as_it_is(record):
    sources, order, notes = fixed(solved(record), record)
    assert notes == [] and order == [cell["id"] for cell in record.content["cells"]]
    assert {name: sources[name] for name in RIGHT} == RIGHT


def test_an_edited_check_is_put_back(record):
    notebook = solved(record, {**RIGHT, "task1-check": "99.0"})
    sources, _, notes = fixed(notebook, record)
    assert sources["task1-check"] == "check.lab90_task1(double)"
    assert notes == ["task1-check was changed but is locked: put back as it was"]


def test_deleted_cells_are_put_back_in_their_place(record):
    notebook = solved(record)
    notebook["cells"] = [cell for cell in notebook["cells"] if cell["id"] not in ("title", "task1-check", "task2-why")]
    _, order, notes = fixed(notebook, record)
    assert order == [cell["id"] for cell in record.content["cells"]]
    assert notes == ["title was missing: put back", "task1-check was missing: put back",
                     "task2-why was missing: put back empty, without an answer"]


def test_an_answer_in_a_new_cell_takes_the_place_of_a_deleted_stub(record):
    notebook = solved(record)
    for cell in notebook["cells"]:
        if cell["id"] == "task1-stub":
            cell["id"], cell["metadata"] = "abcdef01", {}
    sources, order, notes = fixed(notebook, record)
    assert sources["task1-stub"] == RIGHT["task1-stub"] and "own-1" not in order
    assert notes[0] == "task1-stub was missing: the cell that defines double took its place"


def test_of_duplicated_cells_the_last_that_was_worked_on_counts(record):
    notebook = solved(record)
    stub = next(cell for cell in notebook["cells"] if cell["id"] == "task1-stub")
    place = notebook["cells"].index(stub)
    older = {**copy.deepcopy(stub), "id": "aaaaaaaa", "source": "def double(x):\n    return 3 * x"}
    check = {**copy.deepcopy(notebook["cells"][place + 1]), "id": "bbbbbbbb"}
    notebook["cells"][place:place] = [older]
    notebook["cells"].append(check)
    sources, order, notes = fixed(notebook, record)
    assert sources["task1-stub"] == RIGHT["task1-stub"] and order.count("task1-check") == 1
    assert sources["own-1"] == older["source"] and order.index("own-1") < order.index("task1-stub")
    assert any(note.startswith("task1-stub was there 2 times") for note in notes)


def test_moved_cells_go_back_and_own_cells_stay_behind_what_they_followed(record):
    notebook = solved(record)
    stub = notebook["cells"].pop(3)
    helper = {"cell_type": "code", "id": "cccccccc", "metadata": {}, "source": "helper = 1", "outputs": [],
              "execution_count": 4}
    notebook["cells"] += [stub, helper]
    _, order, notes = fixed(notebook, record)
    assert order.index("task1-stub") < order.index("task1-check")
    assert order.index("own-1") == order.index("task1-stub") + 1
    assert notes == ["the cells were not in the order of the lab: put back into it"]


@pytest.mark.parametrize("break_it", [
    lambda cell: cell["metadata"].clear(), lambda cell: cell.update(metadata=None),
    lambda cell: cell["metadata"]["nbgrader"].update(points=100),
    lambda cell: cell["metadata"].update(nbgrader={}), lambda cell: cell.pop("id"),
])
def test_broken_metadata_is_restored(record, break_it):
    notebook = solved(record)
    break_it(next(cell for cell in notebook["cells"] if cell["id"] == "task1-check"))
    done = repair(json.dumps(notebook), record)
    check = next(cell for cell in done.notebook.cells if cell.id == "task1-check")
    assert check.metadata.nbgrader == record.content["cells"][4]["metadata"]["nbgrader"]
    assert len(done.notebook.cells) == len(notebook["cells"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}', '{"nbformat": 4}', "null", '"cells"'])
def test_what_is_no_notebook_is_refused_with_a_reason(record, text):
    with pytest.raises(ConfigError, match="this is no notebook"):
        repair(text, record)


# ---- the command, with real kernels ------------------------------------------------------------------------


def hand_in(course, notebook: dict, name: str = "small.ipynb") -> Path:
    file = course.releases / "lab90" / name
    file.write_text(json.dumps(notebook))
    return file


def test_a_solved_lab_is_packed_with_its_evidence(course, record, capsys):
    file = hand_in(course, solved(record))
    before = file.read_bytes()
    assert main(["submit", "lab90", "--student", "alice"]) == 0
    out, err = capsys.readouterr()
    assert "visible checks: 5 of 5 points" in out and "hidden checks: 1 points" in out
    assert "written answers: 2 points, read by a person\n" in out and "lab90-alice.zip" in out
    assert "[lab90 1/" in err and "task2-check" in err
    assert file.read_bytes() == before
    parcel = Parcel.read(Path("lab90-alice.zip").read_bytes(), "it")
    assert parcel.manifest.lab == "lab90" and parcel.manifest.earned == 5 and parcel.altered == []
    assert parcel.files["evidence/task1.events.jsonl"] == b"{}\n"
    assert parcel.manifest.versions["torch"] and parcel.manifest.release == record.digest
    packed = cells.parse(parcel.files["small.ipynb"].decode(), "it")
    assert not any(cell.get("outputs") for cell in packed.cells)


def test_a_renamed_and_half_solved_lab_says_honestly_what_fails(course, record, capsys):
    answers = {"task1-stub": "def double(x):\n    return 2 * x", "task2-stub": "def square(x):\n    return abs(x) * x"}
    (course.releases / "lab90" / "small.ipynb").unlink()
    hand_in(course, solved(record, answers), "my copy (1).ipynb")
    assert main(["submit", "lab90", "--student", "bob", "--quick"]) == 1
    out, err = capsys.readouterr()
    assert "repaired: the notebook was called my copy (1).ipynb: packed as small.ipynb" in out
    assert "not well: task2-check: 2 of 3 points" in out and "visible checks: 4 of 5 points" in out
    assert "still unanswered: task2-why" in out and "task1-cluster" not in err
    assert list(Parcel.read(Path("lab90-bob.zip").read_bytes(), "it").files) == ["small.ipynb"]


def test_an_endless_cell_costs_its_deadline_and_a_dead_kernel_is_told(course, record, capsys):
    answers = {**RIGHT, "task1-stub": "while True: pass", "task2-stub": "import os; os._exit(3)"}
    hand_in(course, solved(record, answers))
    assert main(["submit", "lab90", "--student", "eve", "--cell-timeout", "3", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    errors = {cell["cell"]: cell["error"] for cell in facts["cells"] if cell["error"]}
    assert "KeyboardInterrupt" in errors["task1-stub"] or "no end within 3 s" in errors["task1-stub"]
    assert errors["task1-check"].startswith("NameError") and errors["task2-stub"] == "the kernel died"
    assert errors["task2-check"].startswith("not run") and facts["manifest"]["earned"] == 0
    assert Path(facts["file"]).is_file()


@pytest.mark.parametrize(("argument", "words"), [
    ("lab77", "found no lab at 'lab77'"), ("nowhere.ipynb", "there is no nowhere.ipynb"),
])
def test_what_cannot_be_found_is_bad_usage(course, capsys, argument, words):
    assert main(["submit", argument, "--student", "alice"]) == 2
    assert words in capsys.readouterr().err


def test_a_notebook_from_elsewhere_is_recognised_by_its_cells(course, record, tmp_path, capsys):
    file = tmp_path / "downloaded.ipynb"
    file.write_text(json.dumps(solved(record)))
    assert main(["submit", str(file), "--student", "alice", "--quick"]) == 0
    assert "packed as small.ipynb" in capsys.readouterr().out


def test_without_nbgrader_it_says_what_to_install(course):
    code = ("import sys; sys.modules['nbgrader'] = None; from ftlab.cli.main import main; "
            "sys.exit(main(['submit', 'lab90']))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 2 and "nbgrader" in done.stderr and "ftlab[labs]" in done.stderr


def test_an_interrupted_submit_leaves_no_kernel_and_no_folder(course, record):
    hand_in(course, solved(record, {"task1-stub": "import time; time.sleep(300)"}))
    command = [sys.executable, "-m", "ftlab.cli.main", "submit", "lab90", "--student", "alice"]
    temporary = course.root / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    for line in running.stderr:
        if "/" in line and "start" in line:
            break
    time.sleep(0.5)  # it is in the cell that sleeps now
    below = psutil.Process(running.pid).children(recursive=True)
    assert below
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == 130
    running.stderr.close()
    assert not psutil.wait_procs(below, timeout=SOON_S)[1]
    assert not list(temporary.glob("ftlab-*")) and not Path("lab90-alice.zip").exists()
