"""A check that is stopped, or whose server dies: the next one is right, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ftlab.errors import FtlabError, JobError
from ftlab.grading.stage import Play, Stage, Stopped, current, current_stage, held, one_check
from tests.limits import GROUP_S, SOON_S


@pytest.fixture(autouse=True)
def own_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins without a stage, also one of another test in this process, and leaves neither processes nor
    folders."""
    current.throw_away()
    monkeypatch.setenv("FTLAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(current, "Stage", lambda: Stage(preload=()))
    before = children()
    yield
    current.throw_away()
    assert children() <= before and left(tmp_path) == []


def children() -> set[int]:
    return {each.pid for each in psutil.Process().children(recursive=True)}


def left(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "runs").iterdir()) if (tmp_path / "runs").is_dir() else []


def ask(value: int, seconds: float = SOON_S) -> int:
    """What a play gives: its own number."""
    return int(current_stage().run(Play.of_any(lambda: value), seconds).value)


def endless() -> None:
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    while True:
        time.sleep(0.01)


def stop_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def interrupted(moments: list[float]) -> float:
    """A play that never ends, stopped at these moments; how long after the first one it ended."""
    timers, begin, took = [stop_after(each) for each in moments], time.monotonic(), GROUP_S
    try:
        try:
            current_stage().run(Play.of_any(endless), GROUP_S)
        except KeyboardInterrupt:
            took = time.monotonic() - begin - moments[0]
        for each in timers:
            each.join()
    except KeyboardInterrupt:  # the second press came when the first one had been dealt with
        pass
    return took


@pytest.mark.parametrize("moments", [[0.5], [0.5, 0.52], [0.5, 0.6]])
def test_after_an_interrupt_the_next_answer_is_its_own_and_nobody_is_left(tmp_path, moments):
    assert ask(1) == 1
    before = current_stage()
    assert interrupted(moments) < 5.0
    assert not before.open and [each for each in psutil.Process().children(recursive=True)
                                if "sleep" in each.cmdline()] == []
    assert [ask(number) for number in (2, 3)] == [2, 3]
    assert current_stage() is not before


@pytest.mark.parametrize("moment", [0.0, 0.01, 0.05, 0.2])
def test_an_interrupt_while_the_server_starts_leaves_no_server(tmp_path, moment):
    try:
        timer = stop_after(moment)
        ask(1)
        timer.join()
    except KeyboardInterrupt:
        pass
    assert ask(2) == 2


def test_an_interrupt_that_was_held_back_comes_at_the_end_of_the_block():
    reached = []
    with pytest.raises(KeyboardInterrupt):
        with held():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            reached.append("the end")
        reached.append("behind it")
    assert reached == ["the end"]


def test_a_reply_that_belongs_to_another_request_is_refused():
    stage = current_stage()
    stage._connection._requests += 1  # as if one had been asked whose reply is still to come
    assert ask(1) == 1
    stage._connection._raw = json.dumps({"id": 1, "value": {"value": 42}}).encode() + b"\n"
    with pytest.raises(JobError, match="nonsense"):
        ask(2)
    assert ask(3) == 3 and current_stage() is not stage


def test_a_server_that_owes_a_reply_is_not_asked_again():
    stage = current_stage()
    stage._connection._pending = True  # as after an interrupt that not even cleaning up survived
    assert not stage.open
    with pytest.raises(FtlabError, match="owes a reply"):
        stage._connection.ask("run", 1.0)
    assert ask(2) == 2 and current_stage() is not stage


def test_a_server_that_died_between_two_checks_costs_nothing():
    assert ask(1) == 1
    server = current_stage()._connection.server  # asked for once: the next stage may be another one already
    os.kill(server.pid, signal.SIGKILL)
    server.wait(SOON_S)
    assert ask(2) == 2


def test_within_a_check_a_server_that_died_is_told_and_not_replaced():
    with pytest.raises(JobError, match=r"is gone|ended"), one_check():
        folder = current_stage().new_folder("mine")
        assert ask(1) == 1 and folder.is_dir()
        server = current_stage()._connection.server
        os.kill(server.pid, signal.SIGKILL)
        server.wait(SOON_S)
        ask(2)
    with one_check():
        assert ask(3) == 3


def test_a_check_that_raises_takes_its_stage_with_it():
    with pytest.raises(ZeroDivisionError), one_check():
        first = current_stage()
        _ = 1 / 0
    assert not first.open and first is not current_stage()


def test_what_a_child_says_in_place_of_our_code_is_no_reply_of_the_server():
    def forge():
        for number in range(3, 200):
            try:
                os.write(number, b'{"error": {"error": "JobError", "message": "forged"}, "id": 7}\n')
            except OSError:
                pass
        os._exit(0)

    outcome = current_stage().run(Play.of_any(forge), SOON_S)
    assert outcome.value is None
    assert ask(2) == 2


def test_a_module_that_prints_when_it_is_imported_does_not_disturb_replies(tmp_path, monkeypatch):
    (tmp_path / "talkative.py").write_text("import os; print('hello'); os.write(1, b'{\"id\": 3}\\n')")
    monkeypatch.syspath_prepend(str(tmp_path))
    current_stage().need("talkative")
    assert ask(1) == 1


@pytest.mark.parametrize("busy", [True, False])
def test_when_the_kernel_is_killed_processes_and_folder_go_by_themselves(tmp_path, busy):
    code = ("import subprocess, sys, time\nfrom ftlab.grading.stage import Play, Stage\n"
            "def endless():\n"
            "    subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
            "    print('x', file=open(sys.argv[1], 'w'))\n    time.sleep(300)\n"
            "stage = Stage(preload=()).__enter__()\nprint('ready', flush=True)\n"
            f"stage.run(Play.of_any(endless), 300) if {busy} else time.sleep(300)")
    flag = tmp_path / "flag"
    with subprocess.Popen([sys.executable, "-c", code.replace("sys.argv[1]", repr(str(flag)))],
                          stdout=subprocess.PIPE) as kernel:
        assert kernel.stdout is not None
        kernel.stdout.readline()
        wait_for(lambda: flag.exists() or not busy)
        below = psutil.Process(kernel.pid).children(recursive=True)
        assert len(below) == (3 if busy else 1) and len(left(tmp_path)) == 2  # a folder and its lock
        kernel.kill()
    wait_for(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in below))
    wait_for(lambda: left(tmp_path) == [])


def test_temporary_files_and_clusters_of_a_part_go_with_it(tmp_path):
    def leave():
        import tempfile

        from ftlab.config import runs_dir
        runs_dir().mkdir()
        return [tempfile.mkdtemp(), str(runs_dir())]

    made = current_stage().run(Play.of_any(leave), SOON_S).value
    assert len(made) == 2 and all(Path(each).is_relative_to(tmp_path / "runs") for each in made)
    assert not any(Path(each).exists() for each in made)


def test_a_notebook_shows_one_line():
    assert Stopped("stopped")._render_traceback_() == ["stopped"] and issubclass(Stopped, KeyboardInterrupt)


def wait_for(condition) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
