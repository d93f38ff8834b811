"""Sandboxes, each kind for real: what code in them can reach, and what is left of them."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ftlab
from ftlab.cluster import confined, engine, jail, runs
from ftlab.cluster.sandbox import Limits, Sandbox, choose, readable, usage
from ftlab.errors import ConfigError, FtlabError
from ftlab.grading.crash.check import check_crashes
from ftlab.grading.marking.play import play_cells
from ftlab.grading.stage import Play, Stage, current_stage, using
from tests.conftest import require
from tests.limits import COMMAND_S, START_S

KINDS = ("container", "namespaces")


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    reason = confined.why_not() if request.param == "container" else jail.why_not()
    require("docker" if request.param == "container" else "namespaces", not reason, reason)
    return choose(request.param, Limits(memory_mb=600, pids=64, disk_mb=16))


@pytest.fixture(scope="module")
def stage(sandbox: Sandbox):
    with Stage(preload=(), opener=sandbox.opener) as stage:
        yield stage


def play(stage: Stage, function, seconds: float = 60.0):
    return stage.run(Play.of_any(function), seconds)


def test_the_rest_of_the_repository_is_not_there(stage):
    place = str(Path(ftlab.__file__).parents[1])
    found = play(stage, lambda: os.listdir(place)).value
    assert "ftlab" in found and not {"tests", "docs", "solutions", "pyproject.toml", ".git"} & set(found)


def test_it_is_not_root_and_can_write_to_its_own_folders_only(stage):
    code = str(Path(ftlab.__file__))

    def attempts():
        found = {"user": os.getuid()}
        for path in ("/etc/x", "/usr/x", "/x", code, "/tmp/x"):
            try:
                with open(path, "a"):
                    found[path] = True
            except OSError:
                found[path] = False
        return found

    found = play(stage, attempts).value
    user = found.pop("user")
    assert user != 0 and user == (os.getuid() or user)
    assert found == {"/etc/x": False, "/usr/x": False, "/x": False, code: False, "/tmp/x": True}


def test_a_fork_bomb_next_door_takes_nothing_from_this_one(sandbox, stage):
    def bomb():
        while True:  # it takes whatever place becomes free
            try:
                os.fork()
            except OSError:
                time.sleep(0.01)

    def forks():
        for _ in range(20):
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)
        return "all"

    with Stage(preload=(), opener=sandbox.opener) as neighbour, ThreadPoolExecutor(1) as pool:
        bombing = pool.submit(play, neighbour, bomb, 4.0)
        while not bombing.done():
            assert play(stage, forks).value == "all"
        assert bombing.result().late


def test_there_is_no_network_but_its_own_loopback(stage):
    with socket.create_server(("127.0.0.1", 0)) as outside:
        address = outside.getsockname()

        def attempts():
            with socket.create_server(("127.0.0.1", 0)) as own:
                socket.create_connection(own.getsockname(), 2).close()
            interfaces = [name for _, name in socket.if_nameindex()]
            try:
                socket.create_connection(address, 2)
            except OSError as error:
                return [interfaces, type(error).__name__]

        assert play(stage, attempts).value == [["lo"], "ConnectionRefusedError"]


def test_the_server_cannot_be_reached_by_what_it_runs(stage):
    def attempts():
        found = []
        for name in ("fd/1", "mem", "environ", "maps"):
            try:
                with open(f"/proc/1/{name}", "rb") as file:
                    found.append(file.read(1))
            except OSError as error:
                found.append(type(error).__name__)
        for number in (2, 9, 15, 19):
            os.kill(1, number)
        return found

    assert play(stage, attempts).value == ["PermissionError"] * 4
    assert play(stage, lambda: 1).value == 1


def test_nothing_in_tmp_or_shm_outlives_a_play(stage):
    def leave():
        for folder in ("/tmp", "/dev/shm"):
            os.makedirs(f"{folder}/mine/deep")
            os.chmod(f"{folder}/mine", 0)
        return True

    assert play(stage, leave).value is True
    assert play(stage, lambda: [each for folder in ("/tmp", "/dev/shm") for each in os.listdir(folder)
                                if each == "mine"]).value == []


def test_files_of_both_sides_are_seen_by_the_other(stage):
    folder = stage.new_folder("shared")
    (folder / "ours").write_text("from us")
    stage.hand_over(folder)

    def work():
        with open(folder / "theirs", "w") as file:
            file.write("from them")
        os.rename(folder / "ours", folder / "taken")
        return sorted(os.listdir(folder))

    assert play(stage, work).value == ["taken", "theirs"] and (folder / "theirs").read_text() == "from them"


def test_a_link_in_the_room_leads_none_of_our_writes_elsewhere(stage, tmp_path):
    (tmp_path / "precious").write_text("untouched")
    room = stage.new_folder("a").parent

    def plant():
        for name in ("b", "play", "functions", "recording.json", "checkpoints"):
            os.symlink(tmp_path, room / name)
        return True

    assert play(stage, plant).value is True
    assert stage.new_folder("b").is_dir() and not (room / "b").is_symlink()
    assert play(stage, lambda: 2).value == 2
    assert os.listdir(tmp_path) == ["precious"] and (tmp_path / "precious").read_text() == "untouched"


def test_a_save_can_be_traced_inside(stage):
    def save(folder):
        with open(folder / "new", "w") as file:
            file.write("new")
        os.rename(folder / "new", folder / "state")

    def prepare(folder):
        (folder / "state").write_text("old")

    def load(folder):
        return (folder / "state").read_text()

    with using(stage):
        result = check_crashes(prepare, save, load)
    assert result.images > result.survived > 0


def test_a_fork_bomb_ends_at_its_deadline_and_leaves_nobody(stage):
    def bomb():
        while True:
            try:
                os.fork()
            except OSError:
                pass

    assert play(stage, bomb, 2.0).late
    assert play(stage, lambda: [each for each in os.listdir("/proc") if each.isdigit() and each != "1"
                                and int(each) != os.getpid()]).value == []


def test_taking_all_the_memory_costs_one_play(stage):
    def bomb():
        kept = []
        while True:
            kept.append(bytearray(1 << 24))

    assert not play(stage, bomb, 60.0).ok
    assert play(stage, lambda: 1).value == 1


def test_filling_the_disk_ends_the_sandbox(sandbox):
    with Stage(preload=(), opener=sandbox.opener) as stage:
        folder = stage.new_folder("full")

        def fill():
            with open(folder / "large", "wb") as file:
                while True:
                    try:
                        file.write(b"x" * (1 << 20))
                        file.flush()
                    except OSError:
                        time.sleep(1)

        with pytest.raises(FtlabError, match="ended"):
            stage.run(Play.of_any(fill), 60.0)
            stage.run(Play.of_any(lambda: 1), 5.0)
        assert not stage.open


def test_what_was_told_before_the_sandbox_went_down_stands(sandbox):
    with Stage(preload=(), opener=sandbox.opener) as stage:
        folder = str(stage.new_folder("full"))
        fill = "for number in range(1000):\n    with open(str(number), 'wb') as file: file.write(bytes(4 << 20))"
        steps = [{"index": 1, "code": "print('told')"}, {"index": 2, "code": fill}]
        told, end = stage.hear(Play.of(play_cells, steps=steps, cell_s=60.0, folder=folder), 60.0, 60.0)
        assert [line.get("stdout", line.get("begun")) for line in told] == [1, "told\n", 2]
        assert "more than it may" in end.ended and not stage.open, end


def test_nobody_takes_the_disk_without_writing_to_it(sandbox):
    with Stage(preload=(), opener=sandbox.opener) as stage:
        folder = str(stage.new_folder("full"))

        def allocate():
            libc, found = ctypes.CDLL(None, use_errno=True), []
            for number in range(20):
                with open(f"{folder}/{number}", "wb") as file:
                    libc.fallocate(file.fileno(), 0, ctypes.c_long(0), ctypes.c_long(12 << 20))
                    found += [ctypes.get_errno()]
            return found, sum(os.stat(f"{folder}/{number}").st_blocks for number in range(20))

        assert play(stage, allocate).value == [[errno.EOPNOTSUPP] * 20, 0]


def test_keyrings_do_not_lead_from_one_submission_to_the_next(stage):
    def leave_a_note():
        libc, found = ctypes.CDLL(None, use_errno=True), []
        numbers = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[platform.machine()]
        for number in numbers:
            found.append((libc.syscall(number, b"user", b"note", b"text", 4, -4), ctypes.get_errno()))
        return found, Path("/proc/keys").read_text() if os.path.exists("/proc/keys") else ""

    found, shown = play(stage, leave_a_note).value
    assert all(result == -1 and error in (errno.ENOSYS, errno.EPERM) for result, error in found) and shown == ""


def test_two_submissions_share_no_memory_queue_socket_or_user(sandbox):
    def leave():
        libc = ctypes.CDLL(None, use_errno=True)
        made = [libc.shmget(91919, 4096, 0o1666), libc.msgget(91919, 0o1666), libc.semget(91919, 1, 0o1666)]
        Path("/dev/shm/note").write_text("x")
        Path("/tmp/note").write_text("x")
        server = socket.socket(socket.AF_UNIX)
        server.bind("\0ftlab-note")
        server.listen()
        kept.append(server)
        return [each >= 0 for each in made]

    def find():
        libc = ctypes.CDLL(None, use_errno=True)
        found = [libc.shmget(91919, 0, 0), libc.msgget(91919, 0), libc.semget(91919, 0, 0)]
        with socket.socket(socket.AF_UNIX) as client:
            found.append(-1 if client.connect_ex("\0ftlab-note") else 1)
        seen = [each for each in ("/dev/shm/note", "/tmp/note") if os.path.exists(each)]
        return found, seen, os.getuid()

    kept: list[socket.socket] = []
    with Stage(preload=(), opener=sandbox.opener) as one, Stage(preload=(), opener=sandbox.opener) as two:
        assert play(one, leave).value == [True] * 3
        found, seen, user = play(two, find).value
        assert found == [-1] * 4 and seen == []
        assert os.getuid() or user != play(one, os.getuid).value


def test_no_check_leaves_the_sandbox_even_when_it_is_broken(sandbox):
    with Stage(preload=(), opener=sandbox.opener) as stage, using(stage):
        assert current_stage() is stage
        with pytest.raises(FtlabError, match="outside of the sandbox"), Stage(preload=()):
            pass
        stage.close()
        with pytest.raises(FtlabError, match="closed"):
            current_stage().run(Play.of_any(lambda: os.getpid()), 5.0)


def test_a_sandbox_in_use_is_not_left_over_and_is_gone_after(tmp_path):
    reason = confined.why_not()
    require("docker", not reason, reason)
    with Stage(tmp_path, preload=(), opener=choose("container").opener):
        [mine] = [each for each in engine.look() if str(each.folder).startswith(str(tmp_path))]
        assert mine.cluster not in [each.cluster for each in runs.find_leftovers()]
    assert [each for each in engine.look() if str(each.folder).startswith(str(tmp_path))] == []
    assert os.listdir(tmp_path) == []


def test_a_container_whose_grader_is_killed_goes_away(tmp_path):
    reason = confined.why_not()
    require("docker", not reason, reason)
    code = ("import os, sys; from pathlib import Path; from ftlab.cluster.sandbox import choose; "
            "from ftlab.grading.stage import Stage; "
            "Stage(Path(sys.argv[1]), preload=(), opener=choose('container').opener).__enter__(); "
            "os.kill(os.getpid(), 9)")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=COMMAND_S, check=False)
    deadline = time.monotonic() + START_S
    while any(str(each.folder).startswith(str(tmp_path)) for each in engine.look()):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_limits_alone_say_loudly_what_is_missing(monkeypatch):
    monkeypatch.setattr(jail.os, "getuid", lambda: 1000)
    warning = jail.limits_only(Limits()).warning()
    assert warning.startswith("WARNING") and "hidden tests and the gradebook" in warning and "network" in warning


def test_an_unknown_kind_and_limits_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="no sandbox"):
        choose("bubble")
    with pytest.raises(ConfigError, match="at least 512"):
        Limits(memory_mb=100)


def test_no_folder_on_the_path_is_shown_unless_it_holds_packages(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) not in readable() and str(Path(ftlab.__file__).parent) in readable()


def test_what_a_folder_holds_is_counted_up_to_a_limit(tmp_path):
    for number in range(20):
        (tmp_path / str(number)).write_bytes(b"x" * 5000)
    size, files = usage(tmp_path, 1000)
    assert files == 20 and size >= 100_000
    (tmp_path / "loop").symlink_to(tmp_path)
    assert usage(tmp_path, 1000)[1] == 21
