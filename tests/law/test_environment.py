"""Laws on the environment: who reads it, what is pinned, and what lies at the top level."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.law.source_rules import HOSTS, environment_reads, prints, project_files
from tests.limits import START_S

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ftlab"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

TOP_LEVEL = {
    ".ci", ".gitattributes", ".gitignore", "LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml",
    "cluster", "docs", "ftlab", "labs", "nbgrader_config.py", "solutions", "tests",
}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, list[str]]:
    """Package -> its pinned versions (several only where markers tell them apart)."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        requirement = line.split("#")[0].split(";")[0].strip()
        if requirement:
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", requirement), f"not an exact pin: {line}"
            name, version = requirement.split("==")
            found.setdefault(normal(name), []).append(version)
    return found


def named_in_pyproject() -> list[str]:
    extras = [each for group in PROJECT["project"]["optional-dependencies"].values() for each in group]
    return [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"], *extras]


@pytest.mark.parametrize("requirement", named_in_pyproject())
def test_constraints_pin_what_pyproject_names(requirement):
    assert normal(re.match(r"[A-Za-z0-9._-]+", requirement)[0]) in pins()


def test_torch_is_pinned_without_a_local_suffix():
    assert pins()["torch"] == ["2.13.0"]


def test_constraints_hold_no_option_hash_or_address():
    text = (ROOT / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert not [line for line in lines if line.startswith("-") or "--hash" in line or "://" in line or "@" in line]


def test_the_environment_is_read_in_config_only():
    found = [f"{file.relative_to(ROOT)}:{line}" for file in sorted(PACKAGE.rglob("*.py"))
             if file != PACKAGE / "config.py" for line in environment_reads(file.read_text())]
    assert not found, f"read these in config.py: {found}"


def test_the_library_does_not_print_outside_the_command_line():
    sheets = PACKAGE / "grading" / "card.py"  # what a check prints is what it is called for
    found = [f"{file.relative_to(ROOT)}:{line}" for file in sorted(PACKAGE.rglob("*.py"))
             if PACKAGE / "cli" not in file.parents and file != sheets for line in prints(file.read_text())]
    assert not found, f"log or return these instead: {found}"


def test_no_text_file_names_a_package_registry():
    found = []
    for file in project_files(ROOT):
        raw = file.read_bytes()
        if b"\0" not in raw[:8192]:
            lines = enumerate(raw.decode("utf-8", "replace").splitlines(), 1)
            found += [f"{file.relative_to(ROOT)}:{number}" for number, line in lines if HOSTS.search(line)]
    assert not found, f"clients are configured on the machine, not here: {found}"


def test_the_top_level_holds_only_what_belongs_there():
    found = {file.relative_to(ROOT).parts[0] for file in project_files(ROOT)}
    assert found <= TOP_LEVEL, f"unexpected at the top level: {sorted(found - TOP_LEVEL)}"


# ---- the laws above can fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [
    "import os\nx = os.environ['A']", "import os\nx = os.environ.get('A')", "import os\nx = os.getenv('A')",
    "import os\nx = {**os.environ}", "from os import environ", "import os\ndef f():\n    return os.environ.copy()",
])
def test_reading_the_environment_is_seen(source):
    assert environment_reads(source)


@pytest.mark.parametrize("source", [
    "import os\nos.environ['A'] = '1'", "import os\ndel os.environ['A']", "import os\nos.environ.update(A='1')",
    "environ = 3", "import os\nos.getpid()",
])
def test_setting_the_environment_is_not_reading_it(source):
    assert environment_reads(source) == []


def test_printing_is_seen():
    assert prints("def f():\n    print('x')") == [2]
    assert prints("log.print('x')\n'print()'") == []


@pytest.mark.parametrize("host", ["https://" + "pypi" + ".org/simple", "docker" + ".io/library/x", "ghcr" + ".io/x"])
def test_a_registry_is_seen(host):
    assert HOSTS.search(host)


@pytest.mark.parametrize("text", ["apt-get install docker.io", "the index that pip is configured for", "torch.io"])
def test_plain_words_are_no_registry(text):
    assert not HOSTS.search(text)


def test_ignored_files_do_not_belong_to_the_project(tmp_path):
    (tmp_path / ".gitignore").write_text("# words\n.venv/\n*.pyc\n/runs/\nlabs/**/runs/\n")
    for name in ("a.py", "a.pyc", ".venv/b.py", "runs/c", "labs/one/runs/d", "labs/one/e", ".git/f"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    names = {str(file.relative_to(tmp_path)) for file in project_files(tmp_path)}
    assert names == {".gitignore", "a.py", "labs/one/e"}


def test_a_folder_called_ftlab_beside_a_script_does_not_hide_the_package(tmp_path: Path) -> None:
    """As in the folder into which somebody has cloned it: `module 'ftlab' has no attribute 'Cluster'`."""
    (tmp_path / "ftlab").mkdir()
    (tmp_path / "script.py").write_text("import ftlab\nprint(ftlab.__file__)\n")
    said = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=START_S)
    assert said.returncode == 0 and str(PACKAGE) in said.stdout, said.stderr
