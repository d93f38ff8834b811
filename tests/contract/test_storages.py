"""What every storage must do, the same for a folder, fsspec's memory, and S3 with the real client."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ftlab.checkpoint.arena import Slot
from ftlab.checkpoint.fence import take_over
from ftlab.checkpoint.manager import CheckpointManager
from ftlab.checkpoint.saving import SaveOrder, retire
from ftlab.checkpoint.storage import Storage, open_storage
from ftlab.checkpoint.tree import pack
from ftlab.checkpoint.vault import COMMIT, DAMAGED, Vault
from ftlab.checkpoint.writer import write_and_report
from ftlab.errors import CheckpointError, StorageError, WaitTimeout
from tests import groups

BIG = 11 << 20  # more than one part of an upload, and more than one block of a download


@pytest.fixture
def storage(url: str) -> Storage:
    return open_storage(url)


def contents(storage: Storage, folder: str, name: str) -> bytes:
    """A file, read in small pieces."""
    found, piece = b"", memoryview(bytearray(1 << 20))
    with storage.open(folder, name) as read:
        for offset in range(0, storage.files(folder)[name], 1 << 20):
            found += bytes(piece[:read(offset, [piece[:1000], piece[1000:1000], piece[1000:]])])
    return found


# ---- folders and files


def test_a_new_storage_is_empty(storage):
    assert storage.folders() == [] and storage.files("nothing") == {}


def test_what_was_written_is_listed_with_its_size_and_read_back(storage):
    storage.write("b", "file", [b"hello ", memoryview(b"world")])
    storage.write("a", "other", [b""])
    storage.sync("a")
    assert storage.folders() == ["a", "b"]
    assert storage.files("b") == {"file": 11} and storage.files("a") == {"other": 0}
    assert storage.read("b", "file") == contents(storage, "b", "file") == b"hello world"


def test_a_second_look_by_somebody_else_sees_the_same(storage, url):
    storage.files("a")  # whoever keeps listings keeps this one
    open_storage(url).write("a", "file", [b"1"])
    assert storage.files("a") == {"file": 1} and storage.folders() == ["a"]
    open_storage(url).write("a", "second", [b"12"])
    assert storage.files("a") == {"file": 1, "second": 2}
    open_storage(url).remove("a", first="file")
    assert storage.files("a") == {} and storage.folders() == []


def test_writing_again_replaces_a_file_whole(storage):
    storage.write("a", "file", [b"a long content"])
    storage.write("a", "file", [b"short"])
    assert storage.files("a") == {"file": 5} and storage.read("a", "file") == b"short"
    assert contents(storage, "a", "file") == b"short"


def test_large_files_come_back_bit_by_bit_and_from_any_place(storage):
    data = random.Random(1).randbytes(BIG)
    storage.write("a", "large", (memoryview(data)[start:start + (1 << 20)] for start in range(0, BIG, 1 << 20)))
    assert storage.files("a") == {"large": BIG}
    assert contents(storage, "a", "large") == data
    end = bytearray(1000)
    with storage.open("a", "large") as read:
        assert read(BIG - 1000, [memoryview(end)]) == 1000
        assert read(0, [memoryview(bytearray(10))]) == 10
        assert read(BIG - 5, [memoryview(bytearray(10))]) == 5, "no more than there is"
    assert bytes(end) == data[-1000:]


def test_a_file_that_is_not_there_is_a_storage_error_that_names_it(storage):
    storage.write("a", "file", [b"1"])
    with pytest.raises(StorageError, match=r"cannot read .*a/gone"):
        storage.read("a", "gone")
    with pytest.raises(StorageError, match=r"cannot read .*a/gone"), storage.open("a", "gone") as read:
        read(0, [memoryview(bytearray(1))])


def test_removing_takes_the_whole_folder_and_nothing_else(storage):
    for folder in ("a", "ab", "b"):
        for name in ("first", "second"):
            storage.write(folder, name, [b"1"])
    storage.remove("a", first="first")
    assert storage.files("a") == {} and storage.folders() == ["ab", "b"]
    assert storage.files("ab") == {"first": 1, "second": 1}


def test_a_folder_that_holds_only_the_first_file_can_be_removed(storage):
    storage.write("a", "first", [b"1"])
    storage.remove("a", first="first")
    assert storage.folders() == []


def test_a_folder_without_the_first_file_can_be_removed(storage):
    storage.write("a", "second", [b"1"])
    storage.remove("a", first="first")
    assert storage.folders() == []


def test_a_write_that_fails_half_way_is_a_storage_error(storage):
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise OSError(5, "Input/output error")

    with pytest.raises(StorageError, match=r"cannot write .*a/file"):
        storage.write("a", "file", pieces())


# ---- checkpoints in it


class Run:
    """A manager over a storage, with a state of a few megabytes."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.manager = CheckpointManager(url, on_event=lambda kind, facts: self.events.append((kind, facts)),
                                         **settings)
        self.notes: dict[str, Any] = {"step": 0, "weight": torch.zeros(500_000)}

    def save(self, step: int, **more: Any) -> str:
        self.notes.update(step=step, weight=torch.full((500_000,), float(step)))
        return self.manager.save({"notes": self.notes}, step, **more)

    def load(self) -> int | None:
        notes: dict[str, Any] = {}
        found = self.manager.load_latest({"notes": notes})
        assert found is None or (notes["step"] == found.step and notes["weight"].eq(found.step).all())
        return found.step if found else None

    def steps(self, kind: str) -> list[int]:
        return [facts["step"] for name, facts in self.events if name == kind]


@pytest.fixture
def run(url: str, no_leaks: None) -> Iterator[Run]:
    run = Run(url, keep_last_n=2)
    yield run
    run.manager.close()


def test_checkpoints_are_kept_found_and_retained(run, url):
    assert run.load() is None
    for step in range(1, 6):
        run.save(step)
    run.manager.wait()
    assert [entry.step for entry in run.manager.entries()] == [5, 4]
    other = Run(url)
    assert other.load() == 5
    other.manager.load({"notes": other.notes}, 4)
    assert other.notes["step"] == 4
    other.manager.close()


@pytest.mark.parametrize("file", ["shard-00000.bin", "manifest.json", "COMMIT"])
def test_a_damaged_checkpoint_is_set_aside_and_the_older_one_is_used(run, file):
    run.save(1, wait=True)
    name = run.save(2, wait=True)
    storage = run.manager.vault.storage
    raw = bytearray(storage.read(name, file))
    raw[len(raw) // 2] ^= 1
    storage.write(name, file, [bytes(raw)])
    assert run.load() == 1 and run.steps("checkpoint.damaged") == [2]
    assert {file, DAMAGED} <= set(storage.files(name))


def test_a_save_without_its_marker_is_no_checkpoint_and_is_cleared_up(run):
    run.save(1, wait=True)
    run.manager.vault.storage.write("step-0000000002-half", "shard-00000.bin", [b"half"])
    assert run.load() == 1
    run.save(3, wait=True)
    assert [entry.step for entry in run.manager.entries()] == [3, 1]


def test_everything_resumes_exactly(url):
    twin = groups.Everything(seed=1)
    twin.train(until=14)
    expected = twin.digest()
    first = groups.Everything(seed=1)
    first.train(until=7)
    with CheckpointManager(url) as manager:
        manager.save(first.state, 7, wait=True)
    second = groups.Everything(seed=2)
    with CheckpointManager(url) as manager:
        manager.load_latest(second.state)
    second.train(until=14)
    assert second.digest() == expected


def test_the_marker_of_a_removed_checkpoint_goes_first(run, monkeypatch):
    """Whatever is left when a removal stops half way, it is no checkpoint."""
    name = run.save(1, wait=True)
    storage = run.manager.vault.storage
    if hasattr(storage, "_fs"):
        monkeypatch.setattr(storage._fs, "rm", refuse)
    else:
        monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(StorageError):
        storage.remove(name, first=COMMIT)
    assert COMMIT not in storage.files(name) and "shard-00000.bin" in storage.files(name)


def refuse(*args: Any, **kwargs: Any) -> None:
    raise OSError(5, "Input/output error")


# ---- S3 that does not answer


@pytest.fixture
def stopped(s3_server: Any) -> Iterator[Any]:
    """The server's process, to be stopped with SIGSTOP; it is continued in any case."""
    yield s3_server.process
    os.kill(s3_server.process.pid, signal.SIGCONT)


def test_a_server_that_stops_answering_does_not_stop_the_loop_and_the_save_is_there_in_the_end(
        stopped, tmp_path, no_leaks):
    run = Run(f"s3://ftlab-tests/{tmp_path.name}")
    run.save(1, wait=True)
    os.kill(stopped.pid, signal.SIGSTOP)
    run.save(2)
    run.save(3)
    with pytest.raises(WaitTimeout, match="not written"):
        run.manager.wait(timeout=0.5)
    assert run.steps("checkpoint.committed") == [1] and run.steps("checkpoint.failed") == []
    os.kill(stopped.pid, signal.SIGCONT)
    run.manager.wait(timeout=groups.GROUP_S)
    assert run.load() == 3 and run.steps("checkpoint.committed") == [1, 2, 3]
    run.manager.close()


def test_a_server_that_is_away_for_longer_than_the_clients_patience_fails_the_save_and_the_next_works(
        stopped, tmp_path, monkeypatch, no_leaks):
    import fsspec
    import s3fs

    patience = {"connect_timeout": 1, "read_timeout": 1, "retries": {"max_attempts": 0}}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": patience})
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    run = Run(f"s3://ftlab-tests/{tmp_path.name}")
    run.save(1, wait=True)
    os.kill(stopped.pid, signal.SIGSTOP)
    run.save(2)
    with pytest.raises(StorageError, match="cannot write"):
        run.manager.wait(timeout=groups.GROUP_S)
    assert run.steps("checkpoint.failed") == [2]
    with pytest.raises(CheckpointError):
        run.load()
    os.kill(stopped.pid, signal.SIGCONT)
    run.save(3)
    run.manager.wait(timeout=groups.GROUP_S)
    assert run.load() == 3 and run.steps("checkpoint.damaged") == []
    run.manager.close()


# ---- the one conditional step


def test_a_file_is_created_once_and_whole_and_whoever_comes_later_changes_nothing(storage, url):
    storage.write("a", "other", [b"1"])
    assert storage.create("a", "file", b"mine")
    assert not open_storage(url).create("a", "file", b"yours") and not storage.create("a", "file", b"mine")
    storage.sync("a")
    assert storage.read("a", "file") == b"mine" and storage.files("a") == {"file": 4, "other": 1}


def test_of_many_who_create_the_same_file_at_once_one_does(storage, url):
    storage.write("a", "other", [b"1"])
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda who: open_storage(url).create("a", "file", b"%d" % who), range(8)))
    assert made.count(True) == 1 and storage.read("a", "file") == b"%d" % made.index(True)
    assert set(storage.files("a")) == {"file", "other"}, "and nothing is left of the others"


# ---- a generation that was given up


@pytest.fixture
def vault(storage: Storage) -> Vault:
    return Vault(storage)


def attempt(vault: Vault, step: int, generation: int, keep: int = 9) -> tuple[str, list[str]]:
    """Save as the agent of a node does; the folder, and what was reported."""
    slot, told = Slot(), list[str]()
    filled = slot.fill(pack({"step": step}))
    order = SaveOrder(step=step, tag=f"abcg{generation:x}", bytes=filled.bytes, header_bytes=filled.header_bytes)
    write_and_report(vault, order, slot.view(filled.bytes), keep=keep, timeout_s=groups.GROUP_S,
                     report=lambda kind, **facts: told.append(kind))
    slot.close()
    return order.name, told


def good_steps(vault: Vault) -> list[int]:
    return [entry.step for entry in vault.entries() if entry.good]


def test_a_generation_that_was_given_up_commits_nothing_and_the_one_that_took_over_does(vault):
    attempt(vault, 1, 1)
    assert take_over(vault.storage, "abc", 11) == [], "what is committed stays"
    name, told = attempt(vault, 2, 10)
    assert told == ["checkpoint.refused"] and vault.storage.files(name) == {}, "nothing is left of it"
    assert attempt(vault, 3, 11)[1] == ["checkpoint.committed"] and good_steps(vault) == [3, 1]


def test_a_late_take_over_by_somebody_who_was_given_up_himself_changes_nothing(vault):
    take_over(vault.storage, "abc", 3)
    take_over(vault.storage, "abc", 2)
    assert attempt(vault, 1, 2)[1] == ["checkpoint.refused"]
    assert attempt(vault, 2, 3)[1] == ["checkpoint.committed"]


def test_other_jobs_and_managers_in_the_same_folder_are_not_fenced(vault, url):
    take_over(vault.storage, "abd", 9)
    assert attempt(vault, 1, 1)[1] == ["checkpoint.committed"]
    run = Run(url)
    run.save(2, wait=True)
    run.manager.close()
    assert good_steps(vault) == [2, 1]


def test_an_attempt_that_is_under_way_is_closed_by_who_takes_over(vault):
    """The writer has looked for fences already: only the marker itself can stop it."""
    vault.storage.write("step-0000000007-abcg1", "shard-00000.bin", [b"data"])
    assert take_over(vault.storage, "abc", 2) == ["step-0000000007-abcg1"]
    [entry] = vault.entries()
    assert entry.status == "incomplete" and "generation 2 of job abc has taken over" in entry.reason
    assert not vault.storage.create(entry.name, COMMIT, b"late")
    attempt(vault, 8, 2)
    assert [entry.step for entry in vault.entries()] == [8], "the next save clears up"


def test_retention_does_not_act_for_who_was_given_up(vault):
    for step in (1, 2, 3):
        name, _ = attempt(vault, step, 1)
    take_over(vault.storage, "abc", 2)
    assert retire(vault, 1, name) == [] and good_steps(vault) == [3, 2, 1]


def test_a_marker_without_data_is_set_aside_by_whoever_sees_it(vault):
    attempt(vault, 1, 2)
    vault.storage.write("step-0000000009-abcg1", COMMIT, [b"0" * 32])
    assert attempt(vault, 2, 2)[1] == ["checkpoint.committed", "checkpoint.damaged"]
    assert vault.look("step-0000000009-abcg1").status == "set aside"
    assert attempt(vault, 3, 2)[1] == ["checkpoint.committed"], "it is told of once"
