"""The crash harness as graders use it: real processes, real system calls, every image loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from ftlab.errors import FaultError, FaultUnavailable, JobError, NotPicklable, WaitTimeout
from ftlab.grading.crash import ptrace
from ftlab.grading.crash.check import check_crashes
from ftlab.grading.crash.result import CrashResult
from ftlab.grading.stage import Stage
from tests.integration.grading import saves
from tests.integration.grading.saves import get, in_place, new, old
from tests.wrong_managers import WRONG, RightManager, Steps, state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="crash points need ptrace")


@pytest.fixture(scope="module")
def stage():
    """One server for all tests: importing torch takes seconds, forking a child does not."""
    with Stage() as stage:
        yield stage


@pytest.fixture(autouse=True)
def nothing_left_behind(stage):
    """No process below this one and no folder of ours but those of the shared stage."""
    before = traces()
    yield
    assert traces() == before


def traces() -> set:
    folders = {str(each) for each in Path(tempfile.gettempdir()).glob("ftlab-stage-*")}
    return folders | {each.pid for each in psutil.Process().children(recursive=True)}


def manage(manager: type[RightManager], stage: Stage, **options) -> CrashResult:
    return check_crashes(lambda folder: manager().save(folder, state(1)),
                         lambda folder: manager().save(folder, state(2)),
                         lambda folder: manager().load(folder), stage=stage, **options)


# ---- managers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manager", [RightManager, Steps])
def test_a_right_manager_survives_every_crash(manager, stage):
    result = manage(manager, stage)
    assert result.ok and result.images == result.survived > 10, str(result)
    assert result.first_failure is None and not result.capped


@pytest.mark.parametrize("manager", WRONG, ids=lambda manager: manager.__name__)
def test_a_wrong_manager_is_caught_and_its_mistake_named(manager, stage):
    result = manage(manager, stage)
    assert not result.ok and 0 < result.survived < result.images
    assert result.first_failure.explanation.mistake == WRONG[manager], str(result)


def test_what_a_student_reads(stage):
    result = manage(next(iter(WRONG)), stage)
    text = str(result)
    assert "`checkpoint.pt` was renamed into place before its data was synced: os.fsync(file) before os.replace" in text
    assert "checkpoint.pt                    0 bytes" in text and "EOFError" in text
    assert "died after: renamed `checkpoint.pt.tmp` to `checkpoint.pt`" in text
    assert "died here" in result._repr_html_() and "<script" not in result._repr_html_()


# ---- who may write ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepare, save", [
    (old, saves.in_a_thread), (saves.start_pool, saves.in_a_pool_of_before), (old, saves.in_a_fork),
    (old, saves.in_a_program)], ids=lambda each: each.__name__)
def test_threads_and_processes_of_a_save_are_followed(prepare, save, stage):
    result = check_crashes(prepare, save, get, stage=stage)
    kinds = [each.kind for each in result.operations]
    assert result.ok, str(result)
    assert kinds == ["create", "write", "fsync", "rename", "fsync", "returned"]


def test_a_save_that_returns_before_its_thread_has_written_is_caught(stage):
    result = check_crashes(old, saves.later, get, stage=stage)
    assert result.first_failure.explanation.mistake == "returned-early", str(result)


def test_a_save_whose_thread_dies_with_the_process_is_caught(stage):
    result = check_crashes(old, saves.never, get, stage=stage)
    assert not result.ok and result.first_failure.explanation.mistake == "no-new-state"


# ---- everything that can be done to a folder ----------------------------------------------------------------


def test_every_way_to_change_a_folder_is_recorded(stage):
    result = check_crashes(old, saves.everything, lambda folder: len(list(folder.iterdir())), stage=stage, limit=5)
    text = [str(each) for each in result.operations]  # that they add up to what is on disk was checked on the way
    for expected in ("made the directory `a`", "wrote 5000 bytes to `a/one` at 0", "wrote 4 bytes to `a/one` at 5000",
                     "wrote 6 bytes to `two` at 0", "wrote 1 bytes to `two` at 3", "cut `two` to 20 bytes",
                     "wrote 5004 bytes to `copy` at 0", "wrote 4000 bytes to `range` at 0", "renamed `a` to `b`",
                     "wrote 14 bytes to `copy` at 0", "deleted `hard`", "removed the directory `empty`",
                     "gave a file the name `named`", "gave a file the name `moved`", "deleted `range`",
                     "renamed `copy` to `two`", "wrote 4 bytes to `relative` at 0", "synced `durable`",
                     "synced everything"):
        assert expected in text, text


@pytest.mark.parametrize("prepare, save, words", [
    (old, saves.through_memory, "mmap"), (saves.map_before, saves.through_memory_of_before, "could not follow")])
def test_writes_through_shared_memory_are_refused(prepare, save, words, stage):
    with pytest.raises(FaultError, match=words):
        check_crashes(prepare, save, get, stage=stage)


# ---- saves and loads that misbehave -------------------------------------------------------------------------


def test_a_save_that_hangs_is_ended_with_all_its_processes(stage):
    with pytest.raises(WaitTimeout, match="did not return within 1 s") as caught:
        check_crashes(old, saves.hang, get, stage=stage, save_s=1.0)
    assert caught.value.operations == 1 and "created `half`" in str(caught.value)
    assert "sleep" not in [each.name() for each in psutil.Process().children(recursive=True)]


def test_a_busy_save_has_the_same_limit(stage):
    def spin(folder: Path) -> None:
        while True:
            os.stat(folder)

    with pytest.raises(WaitTimeout):
        check_crashes(old, spin, get, stage=stage, save_s=1.0)


@pytest.mark.parametrize("save, words", [
    (saves.fail, "save raised ZeroDivisionError: in save"), (saves.end, "exit status 3")])
def test_a_save_that_fails_by_itself_is_no_crash(save, words, stage):
    with pytest.raises(JobError, match=words):
        check_crashes(old, save, get, stage=stage)


def test_prepare_must_leave_something_to_load(stage):
    with pytest.raises(JobError, match="what prepare left"):
        check_crashes(lambda folder: None, new, get, stage=stage)


def test_a_process_that_a_save_leaves_running_is_ended(stage):
    def leave(folder: Path) -> None:
        new(folder)
        subprocess.Popen(["sleep", "1000"], start_new_session=True)

    assert check_crashes(old, leave, get, stage=stage).ok


@pytest.mark.parametrize("load, words", [(saves.load_or_end, "exit status 7"), (saves.load_or_kill, "signal 9"),
                                         (saves.load_or_hang, "did not end within 1 s")])
def test_a_load_that_takes_its_process_down_is_one_failed_image(load, words, stage):
    result = check_crashes(old, in_place, load, stage=stage, load_s=1.0)
    assert words in result.first_failure.found
    assert 0 < result.survived < result.images


def test_functions_that_cannot_travel_are_named(stage):
    lock = threading.Lock()
    with pytest.raises(NotPicklable):
        check_crashes(old, lambda folder: lock.acquire(), get, stage=stage)


def test_a_limit_takes_an_even_selection_and_says_so(stage):
    def slowly(folder: Path) -> None:
        with open(folder / "new", "wb", buffering=0) as file:
            for number in range(30):
                file.write(bytes([number]))
        in_place(folder)

    one, two = (check_crashes(old, slowly, get, stage=stage, limit=20) for _ in range(2))
    assert one.images == 20 < one.possible and one.capped and "a selection" in str(one)
    assert not one.ok and str(one) == str(two)


def up_and_down(folder: Path) -> None:
    with open(folder / "new", "wb") as file:
        for _ in range(20):
            file.truncate(1 << 30)
            file.truncate(0)


def far_out(folder: Path) -> None:
    with open(folder / "new", "wb") as file:
        os.pwrite(file.fileno(), b"x", 60 << 30)


def from_outside(folder: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=folder.parent, delete=False) as file:
        file.truncate(60 << 30)
    os.rename(file.name, folder / "new")


def often(folder: Path) -> None:
    with open(folder / "new", "wb", buffering=0) as file:
        for _ in range(20_000):
            file.write(b"x")


@pytest.mark.parametrize(("save", "words"), [
    (up_and_down, "made files grow by, more than 64 MB"), (far_out, "more than 64 MB"),
    (from_outside, "more than 64 MB"), (often, "more than 10000 operations")])
def test_a_save_takes_only_so_much_of_the_graders_memory_and_time(stage, save, words):
    with pytest.raises(FaultError, match=words):
        check_crashes(old, save, get, stage=stage)


def test_a_sparse_file_that_prepare_left_is_not_read(stage):
    def prepare(folder: Path) -> None:
        old(folder)
        with open(folder / "sparse", "wb") as file:
            file.truncate(60 << 30)

    with pytest.raises(FaultError, match="holds more than 64 MB"):
        check_crashes(prepare, new, get, stage=stage)


def test_of_a_save_in_many_small_pieces_some_places_are_tried_and_it_says_so(stage):
    def bit_by_bit(folder: Path) -> None:
        with open(folder / "new", "wb", buffering=0) as file:
            for _ in range(1500):
                file.write(b"xy")
            os.fsync(file.fileno())
        new(folder)

    result = check_crashes(old, bit_by_bit, get, stage=stage, limit=60)
    assert result.ok and result.sampled and len(result.operations) > 1500 and result.images == 60
    assert "(a selection: more than" in str(result)


def test_a_check_of_its_own_removes_everything(tmp_path):
    assert check_crashes(old, new, get, folder=tmp_path).ok
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_ptrace_says_so(stage, monkeypatch):
    monkeypatch.setattr(ptrace.platform, "machine", lambda: "riscv64")
    with pytest.raises(FaultUnavailable, match="riscv64"):
        manage(RightManager, stage)
