"""`ftlab labs pack`: what students get works, and holds nothing that they should not see."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ftlab.cli.main import main
from ftlab.errors import FtlabError
from ftlab.grading.course import bundle, cells
from ftlab.grading.course.course import Course
from ftlab.grading.course.release_rules import secret_lines
from tests.limits import COMMAND_S, SOON_S

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def course() -> Course:
    return Course.find(ROOT)


@pytest.fixture(scope="module")
def packed(course, tmp_path_factory) -> Path:
    """The bundle of all labs, unpacked."""
    place = tmp_path_factory.mktemp("bundle")
    bundle.pack(course, course.labs(), place / "all.zip")
    with zipfile.ZipFile(place / "all.zip") as archive:
        archive.extractall(place)
    return place / bundle.FOLDER


def _texts(packed: Path) -> dict[str, str]:
    return {each.relative_to(packed).as_posix(): each.read_text(encoding="utf-8")
            for each in packed.rglob("*") if each.is_file()}


def test_it_holds_labs_and_a_way_to_install_and_nothing_else(packed, course):
    names = set(_texts(packed))
    assert {"Makefile", "README.md", "constraints.txt", "pyproject.toml", "ftlab/cli/main.py"} <= names
    assert {f"labs/{lab}/{course.notebook(lab).name}" for lab in course.labs()} <= names
    assert {name.split("/")[0] for name in names} == {"LICENSE", "Makefile", "README.md", "constraints.txt", "docs",
                                                      "ftlab", "labs", "pyproject.toml"}
    assert not [name for name in names if re.search(r"lab\d\d/hidden|solutions/|tests/|wrong|__pycache__", name)]


def test_no_solution_hidden_test_or_hidden_seed_is_in_it(packed, course):
    texts = _texts(packed)
    drawn = 0
    for lab in course.labs():
        source = cells.read(course.notebook(lab))
        given = "\n".join(text for name, text in texts.items() if name.startswith(f"labs/{lab}/"))
        assert not [line for line in secret_lines(source) if line in given] and not cells.SECRETS.search(given)
        for cell in filter(cells.hidden, source.cells):
            assert "unseen=True" in cell.source and not re.search(r"\b(seed|numbers|epochs|log)=", cell.source)
            drawn += 1
    assert drawn >= 10, "the hidden tests were looked at"
    assert not [name for name in texts if re.search(r"lab\d\d/hidden\.py$", name)]  # where their settings are drawn


def test_what_would_give_a_hidden_test_away_is_not_packed(course):
    hidden = "    check.lab01_task1(SavingManager, points=1.5, unseen=True)\n"
    with pytest.raises(FtlabError, match=r"hidden test of lab01: notes\.py holds"):
        bundle._refuse_hidden(course, "lab01", {"notes.py": hidden.encode()})


def test_a_check_runs_from_the_unpacked_bundle_and_hidden_ones_are_not_there(packed):
    code = """
import math, ftlab, ftlab.grading
from ftlab.errors import ConfigError
from ftlab.grading import check
class Monitor:
    def detect_nan_inf(self, loss): return not math.isfinite(float(loss))
print(ftlab.__file__, check.lab02_task1(Monitor))
for call in (lambda: check.lab02_task1(Monitor, seed=1), lambda: check.lab03_task5b):
    try: call()
    except ConfigError as error: print("refused:", error.message)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=COMMAND_S, cwd=packed,
                          env={**os.environ, "PYTHONPATH": str(packed)})
    assert done.returncode == 0, done.stderr
    assert f"{packed}/ftlab/__init__.py 2.0" in done.stdout
    assert done.stdout.count("refused:") == 2, done.stdout


def test_its_makefile_offers_what_it_can_do(packed):
    said = subprocess.run(["make", "help"], capture_output=True, text=True, cwd=packed, timeout=SOON_S).stdout
    assert "make lab" in said and "make demo" in said and "make test" not in said
    plan = subprocess.run(["make", "-n", "setup"], capture_output=True, text=True, cwd=packed, timeout=SOON_S).stdout
    assert '-c constraints.txt --no-build-isolation -e ".[labs]"' in plan


def test_one_lab_alone_gives_the_same_bytes_each_time_and_no_checks_of_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    files = [tmp_path / "one.zip", tmp_path / "two.zip"]
    for file in files:
        assert main(["labs", "pack", "lab00", "--to", str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    names = zipfile.ZipFile(files[0]).namelist()
    assert any("grading/lab00/" in name for name in names) and not any("lab01" in name for name in names)
    assert "make lab" in capsys.readouterr().out


def test_a_place_that_is_not_there_is_told_before_anything_is_done(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["labs", "pack", "--to", str(tmp_path / "nowhere" / "labs.zip")]) == 2
    assert "no folder" in capsys.readouterr().err and not list(tmp_path.iterdir())
