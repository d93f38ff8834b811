"""Folders of this machine as storage: durable when it says so, and clear words when the disk says no.

What every storage must do is in tests/contract; here is what only a real file system can show.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ftlab.checkpoint.manager import CheckpointManager
from ftlab.checkpoint.storage import LocalStorage, ObjectStorage, open_storage
from ftlab.checkpoint.vault import COMMIT
from ftlab.errors import StorageError
from tests.conftest import require

MB = 1 << 20


# ---- durability


def test_a_write_that_the_kernel_takes_in_crumbs_is_still_whole(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:3]))
    LocalStorage(str(tmp_path)).write("a", "file", [b"0123456789", memoryview(b"abcdef")])
    assert (tmp_path / "a/file").read_bytes() == b"0123456789abcdef"


def test_content_is_synced_before_write_returns_and_names_by_sync(tmp_path, monkeypatch):
    synced: list[str] = []
    fsync = os.fsync

    def record(fd: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    storage = LocalStorage(str(tmp_path))
    storage.write("a", "file", [b"x"])
    assert synced == ["a/file"]
    storage.sync("a")
    assert synced == ["a/file", "a", "."]


def test_the_marker_goes_first_so_a_removal_that_stops_half_way_leaves_no_checkpoint(tmp_path, monkeypatch):
    storage = LocalStorage(str(tmp_path))
    for name in ("shard", COMMIT):
        storage.write("a", name, [b"x"])

    def stop(path: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "rmtree", stop)
    with pytest.raises(StorageError, match="cannot remove"):
        storage.remove("a", first=COMMIT)
    assert storage.files("a") == {"shard": 1}


def test_no_descriptor_stays_open_after_a_write_that_failed(tmp_path):
    storage = LocalStorage(str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))

    def pieces() -> Iterator[bytes]:
        yield b"x"
        raise OSError(5, "Input/output error")

    with pytest.raises(StorageError):
        storage.write("a", "file", pieces())
    assert len(os.listdir("/proc/self/fd")) == before


# ---- which storage


def test_paths_and_file_urls_are_folders_and_the_rest_goes_to_fsspec(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert open_storage(f"file://{tmp_path}/a").url == f"{tmp_path}/a"
    assert open_storage("~/b").url == f"{tmp_path}/b"
    assert open_storage("c/d").url == f"{tmp_path}/c/d"
    assert (tmp_path / "c/d").is_dir()
    assert isinstance(open_storage("memory://a"), ObjectStorage)


def test_a_url_nobody_knows_is_a_storage_error():
    with pytest.raises(StorageError, match="cannot open banana://x"):
        open_storage("banana://x")


def test_a_path_that_is_a_file_is_a_storage_error_and_the_file_stays(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="cannot make the folder"):
        open_storage(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


def test_every_answer_of_the_file_system_is_explained(tmp_path):
    storage = LocalStorage(str(tmp_path))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "a").mkdir()
    for ask in (lambda: storage.files("file"), lambda: storage.read("a", "b"), lambda: storage.sync("b"),
                lambda: storage.open("a", "b").__enter__(), lambda: storage.write("file", "b", [b"x"])):
        with pytest.raises(StorageError) as caught:
            ask()
        assert str(tmp_path) in caught.value.message and caught.value.seen


# ---- real faults of a real disk


@pytest.fixture
def mount(tmp_path) -> Iterator[Callable[[str], Path]]:
    """A small disk of its own, unmounted at the end."""
    mounted: list[Path] = []

    def make(size: str) -> Path:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "ftlab-test", str(folder)],
                              capture_output=True, text=True, check=False)
        require("mounts", done.returncode == 0, f"cannot mount a tmpfs: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    require("mounts", os.geteuid() == 0 and shutil.which("mount") is not None, "only root can mount")
    yield make
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


class Run:
    """A state of one megabyte, its manager, and what the manager said."""

    def __init__(self, folder: Path, keep: int = 1) -> None:
        self.model = nn.Linear(512, 512, bias=False)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.manager = CheckpointManager(str(folder), every=1, keep_last_n=keep,
                                         on_event=lambda kind, facts: self.events.append((kind, facts)))

    def save(self, step: int) -> None:
        with torch.no_grad():
            self.model.weight.fill_(step)
        self.manager.save({"model": self.model}, step)

    def loaded(self) -> tuple[int, float]:
        manifest = self.manager.load_latest({"model": self.model})
        assert manifest is not None
        return manifest.step, self.model.weight[0, 0].item()

    def kinds(self, kind: str) -> list[int]:
        return [facts["step"] for name, facts in self.events if name == kind]


def fill(folder: Path, leave: int) -> Path:
    """Take all of a disk but `leave` bytes."""
    free = os.statvfs(folder)
    (folder / "filler").write_bytes(b"x" * (free.f_bavail * free.f_bsize - leave))
    return folder / "filler"


def test_a_full_disk_fails_the_save_keeps_the_old_one_and_saving_goes_on_when_there_is_room(mount, no_leaks):
    disk = mount("4m")
    run = Run(disk)
    with run.manager:
        run.save(1)
        run.manager.wait()
        filler = fill(disk, leave=MB // 2)
        for step in (2, 3, 4):  # none of them raises
            run.save(step)
        with pytest.raises(StorageError, match="cannot write") as caught:
            run.manager.wait()
        assert "No space left" in caught.value.seen and "keep_last_n" in caught.value.hint
        assert run.kinds("checkpoint.failed") == [2, 3, 4] and run.kinds("checkpoint.committed") == [1]
        assert run.loaded() == (1, 1.0)
        filler.unlink()
        run.save(5)
        run.manager.wait()
        assert run.loaded() == (5, 5.0)
        assert [entry.step for entry in run.manager.entries()] == [5], "what the failed ones left is cleared up"


def test_what_a_failed_save_left_does_not_take_the_room_of_the_next(mount):
    disk = mount("2304k")  # two checkpoints of 1 MB and a little
    run = Run(disk)
    with run.manager:
        run.save(1)
        run.manager.wait()
        filler = fill(disk, leave=3 * MB // 4)
        run.save(2)
        with pytest.raises(StorageError, match="cannot write"):
            run.manager.wait()
        filler.unlink()
        run.save(3)
        run.manager.wait()
        assert run.loaded() == (3, 3.0)


def test_a_disk_too_small_for_any_checkpoint_never_makes_one(mount):
    run = Run(mount("512k"))
    with run.manager:
        run.save(1)
        with pytest.raises(StorageError, match="cannot write"):
            run.manager.wait()
        assert run.manager.load_latest({"model": run.model}) is None


def test_a_disk_that_turns_read_only_fails_saves_loads_all_the_same_and_comes_back(mount, no_leaks):
    disk = mount("8m")
    run = Run(disk)
    with run.manager:
        run.save(1)
        run.manager.wait()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        run.save(2)
        with pytest.raises(StorageError, match="cannot write") as caught:
            run.manager.wait()
        assert "read-only" in caught.value.hint and run.kinds("checkpoint.failed") == [2]
        assert run.loaded() == (1, 1.0)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        run.save(3)
        run.manager.wait()
        assert run.loaded() == (3, 3.0)


def test_a_damaged_checkpoint_on_a_read_only_disk_is_passed_over_though_it_cannot_be_marked(mount):
    disk = mount("8m")
    run = Run(disk, keep=2)
    with run.manager:
        for step in (1, 2):
            run.save(step)
        run.manager.wait()
        shard = next(disk.glob("step-0000000002-*/shard-*"))
        shard.write_bytes(b"\xff" + shard.read_bytes()[1:])
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert run.loaded() == (1, 1.0)
        [facts] = [facts for kind, facts in run.events if kind == "checkpoint.damaged"]
        assert facts["step"] == 2 and facts["marked"] is False


# ---- past the page cache -----------------------------------------------------------------------------------


def aligned(size: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, size + mmap.PAGESIZE))
    memory[:8] = b"begins.."
    memory[size - 8:size] = b"the end."
    return memory


@pytest.mark.parametrize("size", [4096, 1 << 20, (3 << 20) + 4096, (3 << 20) + 4097, (5 << 20) - 1])
@pytest.mark.parametrize("shift", [0, 1])  # memory that is not aligned cannot go straight to the disk
def test_large_pieces_arrive_whole_whatever_their_size_and_place_in_memory(tmp_path, size, shift):
    memory = aligned(size + shift)[shift:size + shift]
    LocalStorage(str(tmp_path)).write("folder", "file", [memory, b"tail", memory])
    assert (tmp_path / "folder" / "file").read_bytes() == bytes(memory) + b"tail" + bytes(memory)


def test_a_file_system_that_refuses_to_go_past_its_cache_is_written_in_the_usual_way(tmp_path, monkeypatch):
    asked = []

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        asked.append(flags)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, flags)

    real = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    memory = aligned(2 << 20)[:2 << 20]
    LocalStorage(str(tmp_path)).write("folder", "file", [memory])
    assert any(flags & os.O_DIRECT for flags in asked)
    assert (tmp_path / "folder" / "file").read_bytes() == bytes(memory)
