"""Lab 91 as its author wrote it, and the submissions that broken tools, honest mistakes and bad students make of it.

`SUBMISSIONS` says for each what it does, what it gets, and why that is fair. The lab has 7 points that are given
automatically: task 1 has 2 + 1 (hidden), task 2 has 3 + 1 (hidden).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbformat import NotebookNode, writes
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

SECRETS = ("40961", "51203")  # numbers that stand in hidden tests only
NAME = "hostile.ipynb"
KERNEL = {"kernelspec": {"display_name": "Python 3 (ftlab)", "language": "python", "name": "python3"},
          "language_info": {"name": "python"}}

DOUBLE, SQUARE = "def double(number):\n    return 2 * number", "def square(number):\n    return number * number"
WRONG_DOUBLE, WRONG_SQUARE = "def double(number):\n    return 1", "def square(number):\n    return 1"


def cell(name: str, source: str, **marking: Any) -> NotebookNode:
    meta = {"schema_version": 3, "grade_id": name, "grade": False, "solution": False, "locked": False, "task": False,
            **marking}
    made = new_code_cell(source) if marking.get("kind") != "text" else new_markdown_cell(source)
    meta.pop("kind", None)
    made.id, made.metadata["nbgrader"] = name, meta
    return made


def solution() -> NotebookNode:
    """The lab with solutions and hidden tests."""
    def body(text: str) -> str:
        head, _, rest = text.partition("\n")
        return f"{head}\n    ### BEGIN SOLUTION\n{rest}\n    ### END SOLUTION"

    def hidden(text: str) -> str:
        return f"### BEGIN HIDDEN TESTS\n{text}\n### END HIDDEN TESTS"

    graded = {"grade": True, "locked": True}
    intro = new_markdown_cell("# Lab 91")
    intro.id = "intro"
    return new_notebook(metadata=copy.deepcopy(KERNEL), cells=[
        intro,
        cell("setup", "import ftlab\nfrom ftlab.grading import check", locked=True),
        cell("task1-stub", body(DOUBLE), solution=True),
        cell("task1-check", "check.lab91_task1(double)", points=2, **graded),
        cell("task1-hidden", hidden("check.lab91_task1(double, points=1, number=40961)"), points=1, **graded),
        cell("task2-stub", body(SQUARE), solution=True),
        cell("task2-check", "check.lab91_task2(square)", points=3, **graded),
        cell("task2-hidden", hidden("check.lab91_task2(square, points=1, number=51203)"), points=1, **graded),
        cell("question", "Why?\n\n### BEGIN MARK SCHEME\nbecause\n### END MARK SCHEME", kind="text", grade=True,
             solution=True, points=2)])


def answered(double: str = DOUBLE, square: str = SQUARE, between: str = "", first: str = "",
             last: str = "") -> NotebookNode:
    """What a student hands in, out of the release: the stubs filled in, and cells of their own."""
    notebook = solution()
    for each in notebook.cells:
        if each.id.endswith("-hidden"):
            each.source = ""
        each.source = {"task1-stub": double, "task2-stub": square, "question": "Because."}.get(each.id, each.source)
    if between:
        notebook.cells.insert(5, new_code_cell(between))
    if first:
        notebook.cells.insert(2, new_code_cell(first))
    if last:
        notebook.cells.append(new_code_cell(last))
    return notebook


@dataclass(frozen=True, kw_only=True)
class Case:
    """One submission: what is handed in, what it gets, and why."""

    make: Callable[[], NotebookNode | str]
    score: float
    why: str
    problem: str = ""  # a part of what is told, if it cannot be graded
    note: str = ""  # a part of what is told besides
    file: str = NAME


def _without(*names: str) -> NotebookNode:
    notebook = answered()
    notebook.cells = [each for each in notebook.cells if each.id not in names]
    return notebook


def _twice(*names: str) -> NotebookNode:
    notebook = answered()
    for name in names:
        at = next(index for index, each in enumerate(notebook.cells) if each.id == name)
        again = copy.deepcopy(notebook.cells[at])
        again.id = f"{name}-copy"
        notebook.cells.insert(at, again)
    bare = new_code_cell("1 + 1")
    bare.metadata["nbgrader"] = {}
    notebook.cells.append(bare)
    return notebook


def _changed(name: str, source: str | None = None, notebook: NotebookNode | None = None,
             **marking: Any) -> NotebookNode:
    notebook = notebook or answered()
    for each in notebook.cells:
        if each.id == name:
            each.source = each.source if source is None else source
            each.metadata["nbgrader"].update(marking)
    return notebook


def _planted() -> NotebookNode:
    """A graded cell of the student's own, which a careless grader would run in its own process."""
    notebook = answered()
    source = "import os\nopen(os.path.join(os.getcwd(), 'planted'), 'w').write('x')\n7.0"
    notebook.cells.append(cell("evil", source, grade=True, locked=True, points=7))
    notebook.cells.append(cell("task1-hidden", source, grade=True, locked=True, points=7))
    return notebook


def _stripped() -> NotebookNode:
    notebook = answered()
    for each in notebook.cells:
        each.metadata = NotebookNode()
    return notebook


SPY = f"""
import glob, os, sys
def tried(f):
    try:
        return f()
    except OSError as error:
        return type(error).__name__
found = []
skipped = ("/proc", "/sys", "/usr", "/lib", "/lib64", "/bin", "/sbin", sys.prefix, sys.base_prefix)
for folder, folders, files in os.walk("/"):
    folders[:] = [each for each in folders if os.path.join(folder, each) not in skipped]
    found += [os.path.join(folder, each) for each in files if each.endswith((".ipynb", ".db"))]
for name in ("environ", "cmdline", "maps", "mem"):
    def read(name=name):
        with open("/proc/1/" + name, "rb") as file:
            if name == "mem":
                file.seek(0x400000)
            return file.read(1 << 20).decode(errors="replace")
    text = tried(read)
    found += [name + " tells it" for secret in {SECRETS!r} if secret in str(text) and 'SECRETS' not in str(text)]
print("found", sorted(set(found)))
print("pipes", tried(lambda: os.listdir("/proc/1/fd")), tried(lambda: open("/proc/1/fd/1", "w")))
print("others", [each for each in os.listdir("/proc") if each.isdigit()])
"""

FORGE = """
def double(number):
    import os
    for number in range(3, 64):
        try:
            os.write(number, b'{"value": true, "points": 7, "task1-check": 2.0}\\n')
        except OSError:
            pass
    try:
        open('/proc/1/fd/1', 'w').write('{"value": 42}\\n')
    except OSError:
        pass
    return 1
"""

PATCH = """
import builtins, ftlab.grading.card, ftlab.grading.stage.outcome, ftlab.grading.stage.play, ftlab.grading.check
ftlab.grading.card.Card.score = property(lambda self: self.points)
ftlab.grading.card.Card.close = lambda self, **cost: self.points
ftlab.grading.stage.outcome.Outcome.ok = property(lambda self: True)
ftlab.grading.stage.play.ask = lambda function, args: 2 * args[0]
builtins.print = lambda *args, **kwargs: None
builtins.isinstance = lambda *args: True
class check:
    lab91_task1 = staticmethod(lambda *args, **kwargs: 2.0)
    lab91_task2 = staticmethod(lambda *args, **kwargs: 3.0)
"""

PATCH_JSON = "import json\njson.dumps = lambda *args, **kwargs: '{\"done\": true}'\njson.loads = lambda text: {}"

SCRIPTS = """
from IPython.display import HTML, Javascript, display
display(HTML('<script>alert(91)</script>'))
display(Javascript('alert(91)'))
HTML('<b>alert(91)</b>')
"""
UNSAFE = "Because <script>alert(92)</script><img src=x onerror=alert(92)>[so](javascript:alert(92))"

FILL = """
for number in range(100):
    with open(f"large{number}", "wb", buffering=0) as file:
        for _ in range(512):
            file.write(bytes(1 << 20))
"""
ALLOCATE = """
import os
for number in range(40):
    with open(f"large{number}", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 30)
"""

SURROGATES = """
import sys
print("\\ud800", chr(0xdfff))
print("\\ud800", file=sys.stderr)
def double(number):
    print("\\ud801", end="")
    return 2 * number
raise ValueError("\\ud802")
"""


def _no_text() -> str:
    """A notebook with half characters in its own cells, their ids and tags."""
    notebook = answered(between="# HALF\n'HALF'")
    notebook.cells[5].id, notebook.cells[5].metadata["tags"] = "own", ["HALF"]
    return writes(notebook).replace("HALF", "\\ud83d")


SUBMISSIONS: dict[str, Case] = {
    "honest": Case(make=answered, score=7, why="all is right"),
    "untouched": Case(make=lambda: answered("def double(number):\n    raise NotImplementedError()",
                                            "def square(number):\n    raise NotImplementedError()"), score=0,
                      why="nothing was done"),
    "wrong": Case(make=lambda: answered(square=WRONG_SQUARE), score=3, why="task 1 is right"),
    "syntax-error": Case(make=lambda: answered(double="def double(number:\n    return"), score=4,
                         why="there is no double; task 2 is right"),
    "loops-in-a-cell": Case(make=lambda: answered(between="while True:\n    pass"), score=7,
                            why="the cell is interrupted, all parts are right"),
    "loops-for-good": Case(
        make=lambda: answered(between="import time\nwhile True:\n    try:\n        time.sleep(60)\n"
                                      "    except BaseException:\n        pass"), score=7, note="did not end",
        why="the process is killed, and the cells are run again without this one"),
    "loops-in-its-part": Case(make=lambda: answered(double="def double(number):\n    while True:\n        pass"),
                              score=4, why="task 1 never answers, task 2 is right"),
    "fork-bomb": Case(make=lambda: answered(between="import os\nwhile True:\n    os.fork()"), score=7,
                      why="the limit on processes ends it, all parts are right"),
    "fork-bomb-in-its-part": Case(make=lambda: answered(
        square="def square(number):\n    import os\n    while True:\n        try:\n            os.fork()\n"
               "        except OSError:\n            pass"), score=3, why="task 2 never answers"),
    "memory-bomb": Case(make=lambda: answered(between="kept = []\nwhile True:\n    kept.append(bytearray(1 << 26))"),
                        score=7, why="the kernel kills it, or Python refuses; the rest is run again without it"),
    "exits": Case(make=lambda: answered(first="import sys\nsys.exit(0)", between="import os\nos._exit(0)"), score=7,
                  note="ended its process", why="a cell that ends the process costs itself"),
    "kills-all": Case(make=lambda: answered(between="import os\nos.kill(1, 9)\nos.kill(1, 2)\nos.kill(-1, 9)"),
                      score=7, why="the server cannot be reached"),
    "deleted-tests": Case(make=lambda: _without("task1-check", "task1-hidden", "task2-hidden", "setup"), score=7,
                          note="was missing", why="they are put back"),
    "deleted-task": Case(make=lambda: _without("task1-stub", "task1-check", "task1-hidden"), score=4,
                         note="was missing", why="there is no double, task 2 is right"),
    "duplicated": Case(make=lambda: _twice("task1-stub", "task1-check", "task2-hidden"), score=7,
                       note="2 times", why="each counts once"),
    "edited-tests": Case(
        make=lambda: _changed("task1-check", "2.0", _changed("task1-hidden", "1.0", answered(double=WRONG_DOUBLE))),
        score=4, note="locked", why="the real tests are run"),
    "changed-points": Case(make=lambda: _changed("task1-check", points=100), score=7, note="metadata",
                           why="points are the gradebook's"),
    "changed-roles": Case(
        make=lambda: _changed("task1-check", "2.0", answered(double=WRONG_DOUBLE), solution=True, locked=False),
        score=4, why="what a cell is for is the gradebook's to say"),
    "stripped": Case(make=_stripped, score=7, why="some editors drop all metadata; cells are known by their ids"),
    "planted-cells": Case(make=_planted, score=7, why="a graded cell that is not in the gradebook is a plain cell"),
    "renamed": Case(make=answered, score=7, file="my answer (final).ipynb", note="was taken for",
                    why="its cells say which notebook it is"),
    "invalid-json": Case(make=lambda: writes(answered())[:-40], score=0, problem="no notebook",
                         why="nobody can read it"),
    "empty-file": Case(make=lambda: "", score=0, problem="no notebook", why="there is nothing in it"),
    "spy": Case(make=lambda: answered(between=SPY), score=7, why="it finds nothing, and all parts are right"),
    "writes-the-gradebook": Case(make=answered, score=3, why="task 2 is wrong, and the gradebook cannot be reached"),
    "patches": Case(make=lambda: answered(WRONG_DOUBLE, WRONG_SQUARE, first=PATCH), score=0, why="both are wrong"),
    "patches-in-its-part": Case(
        make=lambda: answered("def double(number):\n" + "\n".join(f"    {line}" for line in PATCH.strip().splitlines())
                              + "\n    return 1"), score=4, why="task 1 is wrong, wherever it is patched"),
    "patches-json": Case(make=lambda: answered(WRONG_DOUBLE, SQUARE, first=PATCH_JSON), score=4,
                         why="task 1 is wrong; the cell that makes the rest unreadable costs itself"),
    "forges": Case(make=lambda: answered(FORGE), score=4, why="task 1 is wrong, and no pipe leads to the marks"),
    "daemons": Case(make=lambda: answered(
        "import os\ndef double(number):\n    import subprocess\n    subprocess.Popen(['sleep', '91919'], "
        "start_new_session=True)\n    if os.fork() == 0:\n        os.setsid()\n        os.execvp('sleep', ['sleep', "
        "'91919'])\n    return 2 * number"), score=7, why="they are ended with the play"),
    "prints-a-gigabyte": Case(make=lambda: answered(
        "def double(number):\n    import os\n    for _ in range(200):\n        os.write(1, b'x' * 1000000)\n"
        "    return 2 * number", between="for _ in range(10000):\n    print('x' * 100000)"), score=7,
        why="what is printed is cut, all parts are right"),
    "fills-the-disk": Case(make=lambda: answered(last=FILL), score=7,
                           why="the cell costs itself, and what was told before it stands"),
    "allocates-the-disk": Case(make=lambda: answered(between=ALLOCATE), score=7,
                               why="the cell costs itself, and is not run again"),
    "scripts": Case(make=lambda: _changed("question", UNSAFE, answered(between=SCRIPTS)), score=7,
                    why="only text is kept"),
    "no-text": Case(make=_no_text, score=7, why="half a character is shown as such"),
    "prints-no-text": Case(make=lambda: answered(between=SURROGATES), score=7,
                           why="half a character is shown as such"),
    "no-text-as-answer": Case(make=lambda: answered("def double(number):\n    return '\\ud800'"), score=4,
                              why="that is no number; task 2 is right"),
    "latin-1-beside": Case(make=answered, score=7, why="the name of a file is any bytes"),
    "brackets [1] {x} *?!": Case(make=answered, score=7, why="a name is no pattern"),
    "Zoë Müller 学生": Case(make=answered, score=7, why="a name is text"),
    "link-as-notebook": Case(make=lambda: "", score=0, problem="link", why="a link to somebody else's work is no work"),
    "link-beside": Case(make=answered, score=7, note="symbolic link", why="the link is left out"),
}


def hand_in(case: Case, name: str, course: Path) -> None:
    """Put a submission where students' work is collected."""
    folder = course / "submitted" / name / "lab91"
    folder.mkdir(parents=True)
    if name == "link-as-notebook":
        (folder / NAME).symlink_to(course / "solutions" / "lab91" / NAME)
        return
    made = case.make()
    if name == "writes-the-gradebook":
        attack = (f"import sqlite3\nfor path in ({str(course / 'gradebook.db')!r}, '../gradebook.db'):\n"
                  f"    sqlite3.connect(path).execute('update grade set auto_score = 7')")
        made = answered(square=WRONG_SQUARE, between=attack)
    if name == "latin-1-beside":
        with open(os.fsencode(folder) + b"/caf\xe9.txt", "wb") as file:
            file.write(b"\xe9")
        os.mkdir(os.fsencode(folder) + b"/\xff")
        with open(os.fsencode(folder) + b"/\xff/\xe9.txt", "wb") as file:
            file.write(b"\xe9")
    if name == "link-beside":
        os.symlink(course / "gradebook.db", folder / "data.txt")
        os.symlink(course / "solutions", folder / "more")
    (folder / case.file).write_text(made if isinstance(made, str) else writes(made))


def author(course: Path) -> None:
    """The source of lab 91 in a course's folder."""
    folder = course / "solutions" / "lab91"
    folder.mkdir(parents=True)
    (folder / NAME).write_text(json.dumps(solution(), indent=1))
