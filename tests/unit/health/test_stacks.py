"""Stacks of a real stuck process, taken from outside, and the one line that is shown to the user."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ftlab
from ftlab.health.stacks import (
    Frame,
    StackFile,
    arm,
    capture,
    describe,
    is_users,
    parse,
    stacks_of_this_process,
)
from tests.limits import SOON_S

SIGNAL = signal.SIGUSR1
FTLAB, TORCH = str(Path(ftlab.__file__).parent), "/x/lib/python3.11/site-packages/torch"
STANDARD = sysconfig.get_path("stdlib")

DUMP = """Thread 0x00007f2ab3fff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f2ad4f51740 (most recent call first):
  File "/home/j\\xfcrgen/train.py", line 12 in <lambda>
  File "/home/j\\xfcrgen/a "b", line 3.py", line 40 in train
  File "???", line ??? in ???
"""


@contextmanager
def child(file: StackFile, work: Callable[[], object]) -> Iterator[int]:
    """A fork that arms the file and then does some work for ever; its pid."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            file.arm(SIGNAL)
            os.write(writer, b"x")
            work()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        assert os.read(reader, 1) == b"x"
        yield pid
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def stacks_showing(pid: int, file: StackFile, function: str) -> str:
    """The stacks once they show a function; the child has only just begun to run."""
    deadline = time.monotonic() + SOON_S
    while True:
        text = capture(pid, file.fd, SIGNAL, timeout_s=SOON_S)
        if f"in {function}\n" in text or time.monotonic() > deadline:
            return text


def wait_for_a_lost_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hold_the_gil_in_c() -> None:
    sum(range(1 << 60))  # one call into C that lasts for years and never lets go of the GIL


def with_many_threads() -> None:
    for _ in range(40):
        threading.Thread(target=wait_for_a_lost_lock, daemon=True).start()
    wait_for_a_lost_lock()


@pytest.mark.parametrize("work", [wait_for_a_lost_lock, hold_the_gil_in_c])
def test_a_stuck_process_tells_where_it_is(work):
    with StackFile() as file, child(file, work) as pid:
        (main,) = [each for each in parse(stacks_showing(pid, file, work.__name__)) if each.main]
        assert (main.frames[0].file, main.frames[0].function) == (__file__, work.__name__)
        assert main.frames[1].function == "child", "with its callers"
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "and is still alive"


def test_each_capture_stands_for_itself():
    with StackFile() as file, child(file, wait_for_a_lost_lock) as pid:
        first = stacks_showing(pid, file, "wait_for_a_lost_lock")
        assert capture(pid, file.fd, SIGNAL, SOON_S) == first and first.count("most recent call first") == 1


def test_all_threads_are_in_the_dump_and_the_main_thread_is_known():
    with StackFile() as file, child(file, with_many_threads) as pid:
        threads = parse(stacks_showing(pid, file, "child"))
        deadline = time.monotonic() + SOON_S
        while len(threads) < 41 and time.monotonic() < deadline:
            threads = parse(capture(pid, file.fd, SIGNAL, SOON_S))
    assert len(threads) == 41 and len({each.ident for each in threads}) == 41
    assert [each.main for each in threads] == [False] * 40 + [True]
    assert "with_many_threads" in [frame.function for frame in threads[-1].frames], "the dump was complete"


def test_the_file_can_be_handed_over_as_a_descriptor():
    with StackFile() as file:
        copy = os.dup(file.fd)
        arm(copy, SIGNAL)
        try:
            assert "test_the_file_can_be_handed_over" in capture(os.getpid(), file.fd, SIGNAL, SOON_S)
        finally:
            import faulthandler
            faulthandler.unregister(SIGNAL)
            os.close(copy)


def test_a_process_that_is_gone_gives_nothing():
    with StackFile() as file:
        with child(file, wait_for_a_lost_lock) as pid:
            pass
        assert capture(pid, file.fd, SIGNAL) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which signals a process handles")
def test_a_process_that_never_armed_is_not_killed_by_the_question():
    with StackFile() as file, child(file, wait_for_a_lost_lock) as pid:
        assert capture(pid, file.fd, signal.SIGUSR2) == ""
        assert stacks_showing(pid, file, "wait_for_a_lost_lock") != "", "it is still there"


def test_a_stopped_process_does_not_answer_and_does_not_hold_us_up():
    with StackFile() as file, child(file, wait_for_a_lost_lock) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert capture(pid, file.fd, SIGNAL, timeout_s=0.05) == ""


def test_a_file_may_be_closed_twice():
    file = StackFile()
    file.close()
    file.close()
    assert file.fd == -1


def test_a_watchdog_thread_sees_the_main_thread_of_its_own_process():
    seen: list[str] = []
    watchdog = threading.Thread(target=lambda: seen.append(stacks_of_this_process()))
    watchdog.start()
    watchdog.join(SOON_S)
    (main,) = [each for each in parse(seen[0]) if each.main]
    assert main.ident == threading.main_thread().ident
    assert "test_a_watchdog_thread_sees_the_main_thread_of_its_own_process" in [each.function for each in main.frames]


def test_a_dump_is_read_with_odd_names_and_unknown_lines():
    helper, main = parse(DUMP)
    assert (helper.ident, helper.main, len(helper.frames)) == (0x7f2ab3fff6c0, False, 2)
    assert main.main and main.frames == (
        Frame(file="/home/jürgen/train.py", line=12, function="<lambda>"),
        Frame(file='/home/jürgen/a "b", line 3.py', line=40, function="train"),
        Frame(file="???", line=0, function="???"))


def test_newer_pythons_add_the_name_of_the_thread():
    text = DUMP.replace("0x00007f2ab3fff6c0 (", "0x00007f2ab3fff6c0 [loader] (")
    assert parse(text) == parse(DUMP)


@pytest.mark.parametrize("text", ["", "\n", "garbage\n  more\n"])
def test_what_is_no_dump_has_no_threads(text):
    assert parse(text) == []


def test_a_dump_without_its_oldest_threads_has_no_main_thread():
    assert [each.main for each in parse(DUMP + "\n...\n")] == [False, False]


def frame(file: str, line: int = 12, function: str = "train") -> Frame:
    return Frame(file=file, line=line, function=function)


def no_source(file: str, line: int) -> str:
    return ""


@pytest.mark.parametrize(("file", "users"), [
    ("/home/me/train.py", True), ("/tmp/ipykernel_123/456.py", True), ("<ipython-input-3-0123>", True),
    ("<stdin>", True), (__file__, True), (f"{FTLAB}/train/example.py", True),
    (f"{FTLAB}/train/trap.py", False), (f"{FTLAB}/train/session.py", False), (f"{STANDARD}/threading.py", False),
    (f"{TORCH}/autograd/__init__.py", False), ("/usr/lib/python3/dist-packages/numpy/x.py", False),
    ("<frozen runpy>", False), (FTLAB + "_mine/train.py", True),
])
def test_the_users_code_is_told_from_everybody_elses(file, users):
    assert is_users(frame(file)) is users


def test_the_users_line_is_shown_below_ftlabs_and_the_librarys_calls():
    stack = [frame(f"{FTLAB}/train/trap.py", 28, "block"), frame(f"{TORCH}/utils/data/dataloader.py", 5, "__next__"),
             frame("/home/me/train.py"), frame("/home/me/main.py", 3, "<module>")]
    shown = describe(stack, 3.14, source=lambda file, line: f"        batch = next(loader)   # {file}:{line}\n")
    assert shown == "in `batch = next(loader) # /home/me/train.py:12` (train.py:12, train) since 3.1 s"


def test_a_long_line_is_shortened():
    shown = describe([frame("/home/me/train.py")], 1.0, source=lambda file, line: "x = " + "1 + " * 40)
    assert "…`" in shown and len(shown.split("`")[1]) <= 60


def test_without_the_source_the_function_and_line_are_shown():
    assert describe([frame("/home/me/train.py")], 0.25, source=no_source) == "in train (train.py:12) since 0.2 s"


@pytest.mark.parametrize("file", ["/tmp/ipykernel_123/4567890.py", "<ipython-input-3-0123456789ab>"])
def test_a_cell_is_called_a_cell(file):
    assert describe([frame(file)], 2.0, source=no_source) == "in train (notebook cell:12) since 2.0 s"


def test_without_any_code_of_the_user_the_innermost_call_that_is_not_ours_is_shown():
    stack = [frame(f"{FTLAB}/train/trap.py"), frame(f"{TORCH}/serialization.py", 7, "save"), frame("<frozen runpy>")]
    assert describe(stack, 2.0, source=no_source) == "in save (serialization.py:7) since 2.0 s"
    assert describe(stack[:1], 2.0, source=no_source) == "in train (trap.py:12) since 2.0 s"
    assert describe([], 2.0) == "outside Python since 2.0 s"


def test_the_source_is_read_again_after_the_user_edited_it(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("first = 1\n")
    assert "`first = 1`" in describe([frame(str(file), 1)], 1.0)
    file.write_text("the_second = 22\n")
    assert "`the_second = 22`" in describe([frame(str(file), 1)], 1.0)


def test_a_process_that_is_blocked_inside_a_signal_handler_of_ours_shows_the_users_line():
    """As the stall fault does it: the handler in ftlab/train/trap.py lies on top of the user's call."""
    names: dict = {"time": time}
    code = "def spring(number, frame):\n    block()\ndef block():\n    while True:\n        time.sleep(3600)\n"
    exec(compile(code, f"{FTLAB}/train/trap.py", "exec"), names)

    def train() -> None:
        signal.signal(signal.SIGUSR2, names["spring"])
        os.kill(os.getpid(), signal.SIGUSR2)  # the user's line

    with StackFile() as file, child(file, train) as pid:
        (main,) = [each for each in parse(stacks_showing(pid, file, "block")) if each.main]
    assert [each.function for each in main.frames[:3]] == ["block", "spring", "train"]
    assert describe(main.frames, 1.0).startswith("in `os.kill(os.getpid(), signal.SIGUSR2) # the user's line` (")
