"""What is sent to a build, and which wheels fit: decided without an engine."""

from __future__ import annotations

import io
import platform
import sys
import tarfile
from pathlib import Path

import pytest

from ftlab.cluster import builder, wheelhouse
from ftlab.errors import ClusterError

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def project(folder: Path) -> Path:
    for name in (*builder._FILES, "ftlab/a.py", "ftlab/__pycache__/a.pyc", "secret", "build/wheels/x.whl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("[project]\ndependencies = []\n" if name == "pyproject.toml" else name)
    return folder


def packed(root: Path, offline: bool) -> bytes:
    context = io.BytesIO()
    builder._pack(root, offline, context)
    return context.getvalue()


@pytest.mark.parametrize("offline", [True, False])
def test_a_build_is_sent_what_the_dockerfile_names_and_nothing_else(tmp_path, offline):
    with tarfile.open(fileobj=io.BytesIO(packed(project(tmp_path), offline))) as tar:
        names = tar.getnames()
    wanted = {*builder._FILES, "ftlab/a.py"} | ({"build/wheels/x.whl"} if offline else set())
    assert set(names) == wanted


def test_the_same_files_are_sent_as_the_same_bytes(tmp_path):
    one, two = project(tmp_path / "one"), project(tmp_path / "two")
    (two / "ftlab/a.py").chmod(0o600)
    assert packed(one, True) == packed(two, True)


def test_the_builders_error_comes_with_its_last_words():
    lines = [{"stream": "Step 1/2 : RUN pip"}, {"stream": "no space\n"}, {"error": "pip returned 1"}]
    said: list[str] = []
    with pytest.raises(ClusterError, match="pip returned 1") as caught:
        builder._follow(iter(lines), said.append, lambda text: None)
    assert "no space" in caught.value.seen and said == ["step 1/2: RUN pip"]


def test_an_engine_that_goes_away_is_told_in_words():
    def lines():
        yield {"stream": "Step 1/2 : RUN pip"}
        raise OSError("connection broken")

    with pytest.raises(ClusterError, match="went away"):
        builder._follow(builder._unbroken(lines()), lambda text: None, lambda text: None)


def test_wheels_fit_the_same_python_on_the_same_machine_only(monkeypatch):
    assert wheelhouse.fits(HERE, platform.machine()) == (sys.platform == "linux")
    assert not wheelhouse.fits("3.99", platform.machine())
    assert not wheelhouse.fits(HERE, "another")
    monkeypatch.setattr(wheelhouse.sys, "platform", "darwin")
    assert not wheelhouse.fits(HERE, platform.machine())


def test_wheels_that_are_complete_are_not_fetched_again(tmp_path, monkeypatch):
    root, ran = project(tmp_path), []
    monkeypatch.setattr(wheelhouse, "_run", lambda command, say: ran.append(command))
    for _ in range(2):
        wheelhouse.fetch(root, lambda text: None)
    assert len(ran) == 1 and not (root / "build/wheels/x.whl").exists(), "an old wheel would be installed too"
    (root / "constraints.txt").write_text("torch==3")
    wheelhouse.fetch(root, lambda text: None)
    assert len(ran) == 2


def test_what_pip_says_is_passed_on(tmp_path):
    code = "print('Collecting torch'); print('ERROR: no such index'); raise SystemExit(1)"
    said: list[str] = []
    with pytest.raises(ClusterError, match="pip could not fetch") as caught:
        wheelhouse._run([sys.executable, "-c", code], said.append)
    assert caught.value.seen == "ERROR: no such index" and said == ["fetching torch"]
