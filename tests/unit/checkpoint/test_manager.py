"""The checkpoint manager: what was saved is what comes back, behind the loop's back, whatever storage does."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ftlab.checkpoint import manager as module
from ftlab.checkpoint import ranks
from ftlab.checkpoint.manager import CheckpointManager
from ftlab.checkpoint.storage import LocalStorage
from ftlab.checkpoint.vault import COMMIT, DAMAGED, MANIFEST, digest
from ftlab.errors import CheckpointDamaged, CheckpointError, ConfigError, StorageError, WaitTimeout
from tests.limits import SOON_S


class Moody(LocalStorage):
    """A folder that a test can make slow, broken, or well again."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.well = threading.Event()
        self.well.set()
        self.entered = threading.Event()
        self.broken: set[str] = set()

    def write(self, folder: str, name: str, pieces: Any) -> None:
        self.entered.set()
        assert self.well.wait(SOON_S)
        self._refuse("write")
        super().write(folder, name, pieces)

    def read(self, folder: str, name: str) -> bytes:
        self._refuse("read")
        return super().read(folder, name)

    def open(self, folder: str, name: str) -> Any:
        self._refuse("open")
        return super().open(folder, name)

    def remove(self, folder: str, first: str) -> None:
        self._refuse("remove")
        super().remove(folder, first)

    def _refuse(self, what: str) -> None:
        if what in self.broken:
            raise StorageError(f"cannot {what}", seen="it is Monday")


class Run:
    """A manager with a moody storage, one tensor as its state, and what it said."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.storage = Moody(str(folder))
        monkeypatch.setattr(ranks, "open_storage", lambda url: self.storage)
        self.folder, self.events = folder, []
        self.manager = CheckpointManager(str(folder), on_event=self.heard, **settings)
        self.notes: dict[str, Any] = {"step": 0, "weight": torch.zeros(1000)}

    def heard(self, kind: str, facts: dict[str, Any]) -> None:
        self.events.append((kind, facts))

    def save(self, step: int, **more: Any) -> str:
        self.notes["step"] = step
        self.notes["weight"].fill_(step)
        return self.manager.save({"notes": self.notes}, step, **more)

    def load(self) -> int | None:
        """The step that `load_latest` gives; all of the state must be of it."""
        notes: dict[str, Any] = {}
        found = self.manager.load_latest({"notes": notes})
        if found is None:
            return None
        assert notes["step"] == found.step and notes["weight"].eq(found.step).all()
        return found.step

    def steps(self, kind: str) -> list[int]:
        return [facts["step"] for name, facts in self.events if name == kind]

    def facts(self, kind: str) -> dict[str, Any]:
        [facts] = [facts for name, facts in self.events if name == kind]
        return facts


@pytest.fixture
def start(tmp_path, monkeypatch, no_leaks) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(**settings: Any) -> Run:
        made.append(Run(tmp_path / "run", monkeypatch, **settings))
        return made[-1]

    yield make
    for run in made:
        run.storage.well.set()
        closing = threading.Thread(target=run.manager.close, daemon=True)
        closing.start()
        closing.join(5)
        assert not closing.is_alive(), "close() hangs"


def arenas() -> set[int]:
    """The slots of shared memory that this process holds."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "ftlab-arena" in os.readlink(f"/proc/self/fd/{fd}"):
                found.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
        except FileNotFoundError:
            pass
    return found


# ---- saving and loading


def test_what_was_saved_comes_back_and_the_manifest_tells_of_it(start):
    run = start()
    assert run.load() is None
    name = run.save(7, epoch=2, metrics={"loss": torch.tensor(0.5)}, wait=True)
    run.notes.clear()
    manifest = run.manager.load_latest({"notes": run.notes})
    assert (manifest.step, manifest.epoch, manifest.metrics) == (7, 2, {"loss": 0.5})
    assert run.notes["step"] == 7 and run.notes["weight"].eq(7).all()
    assert [kind for kind, _ in run.events] == ["checkpoint.snapshot", "checkpoint.committed", "checkpoint.loaded"]
    assert run.facts("checkpoint.committed")["name"] == name == run.manager.entries()[0].name


def test_the_newest_is_loaded_and_others_by_step_or_name(start):
    run = start(keep_last_n=9)
    names = {step: run.save(step) for step in (1, 2, 3)}
    run.manager.wait()
    assert run.load() == 3
    for which in (2, "2", names[2]):
        run.manager.load({"notes": run.notes}, which)
        assert run.notes["step"] == 2
    run.manager.remove(3)
    assert run.load() == 2


def test_steps_are_saved_when_it_is_time_and_the_count_goes_on_after_a_load(start):
    run = start(every=5, keep_last_n=9)
    assert [step for step in range(1, 13) if run.manager.step({"notes": run.notes}, step)] == [5, 10]
    run.manager.wait()
    again = start(every=5)
    assert again.manager.load_latest({"notes": again.notes}).step == 10
    assert [step for step in range(11, 22) if again.manager.step({"notes": again.notes}, step)] == [15, 20]


def test_the_first_snapshot_of_a_loop_finds_its_memory_ready(tmp_path):
    state = {"model": nn.Linear(1024, 1024)}
    with CheckpointManager(str(tmp_path), every=3) as manager:
        assert not manager.step(state, 1)
        for thread in threading.enumerate():
            if thread.name == "ftlab-room":
                thread.join(SOON_S)
        given = [os.fstat(slot.fd).st_blocks * 512 for slot in manager._writer._slots]
        assert min(given) > 4 << 20
        assert not manager.step(state, 2) and manager.step(state, 3)
        assert [os.fstat(slot.fd).st_blocks * 512 for slot in manager._writer._slots] == given


def test_time_between_saves_is_counted_from_the_last_one(start, monkeypatch):
    run = start(every="30s", keep_last_n=9)
    clock = [run.manager._last_time]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    saved = []
    for step in range(1, 10):
        clock[0] += 12
        saved += [step] if run.manager.step({"notes": run.notes}, step) else []
        run.manager.wait()
    assert saved == [3, 6, 9]


def test_closing_writes_what_is_left_and_may_be_done_twice(start):
    run = start()
    run.save(1)
    run.manager.close()
    run.manager.close()
    assert run.steps("checkpoint.committed") == [1]
    assert start().load() == 1


def test_a_save_after_closing_says_so(start):
    run = start()
    run.save(1)
    run.manager.close()
    with pytest.raises(CheckpointError, match="closed"):
        run.save(2)


# ---- the snapshot is taken when `save` returns


def test_what_changes_after_save_returns_does_not_change_what_is_saved(start):
    """Many times, with the other core busy, and storage that reads the snapshot late."""
    run = start(keep_last_n=99)
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    extra: dict[str, Any] = {"list": [], "tensor": torch.zeros(50_000)}
    state = {"model": model, "optimizer": optimizer, "extra": extra}
    busy, stop = torch.randn(300, 300), threading.Event()
    load = threading.Thread(target=lambda: [busy @ busy for _ in iter(stop.is_set, True)])
    load.start()
    digests = {}
    try:
        for step in range(1, 31):
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            extra["list"].append(step)
            extra["tensor"].add_(1)
            digests[step] = module.as_state(state, step).digest()
            run.manager.wait()
            run.storage.well.clear()
            run.manager.save(state, step)
            with torch.no_grad():  # everything at once, in place
                for tensor in [*model.state_dict().values(), extra["tensor"],
                               *(each for row in optimizer.state.values() for each in row.values())]:
                    tensor.fill_(77)
                for parameter in model.parameters():
                    parameter.grad.fill_(77)
            extra["list"].append("not saved")
            torch.rand(3)
            run.storage.well.set()  # only now the snapshot is read
            extra["list"].pop()
        run.manager.wait()
    finally:
        stop.set()
        load.join()
    for step in (1, 2, 15, 29, 30):
        run.manager.load(state, step)
        assert module.as_state(state, step).digest() == digests[step]


# ---- back-pressure


def test_slow_storage_delays_the_loop_in_bounded_memory_and_every_save_is_written(start):
    before = arenas()
    run = start(keep_last_n=99)
    run.storage.well.clear()
    run.save(1)
    run.save(2)  # both slots are taken now
    assert run.steps("checkpoint.committed") == [] and run.steps("checkpoint.delayed") == []
    third = threading.Thread(target=run.save, args=(3,))
    third.start()
    assert run.storage.entered.wait(SOON_S)
    third.join(0.05)
    assert third.is_alive(), "the third save waits for a slot"
    run.storage.well.set()
    third.join(SOON_S)
    for step in range(4, 12):
        run.save(step)
        assert len(arenas() - before) == 2, "two slots, however many saves"
    run.manager.wait()
    assert run.steps("checkpoint.committed") == list(range(1, 12))
    assert run.steps("checkpoint.delayed")[0] == 3
    for step in range(1, 12):
        run.manager.load({"notes": run.notes}, step)
        assert run.notes["weight"].eq(step).all()


def test_waiting_for_storage_that_does_not_answer_has_an_end(start):
    run = start()
    run.storage.well.clear()
    run.save(1)
    with pytest.raises(WaitTimeout, match="1 checkpoints are not written"):
        run.manager.wait(timeout=0.05)
    run.storage.well.set()
    run.manager.wait()
    assert run.load() == 1


# ---- saves that fail


def test_a_failed_save_is_told_by_event_and_wait_and_the_next_one_works(start):
    run = start()
    run.save(1, wait=True)
    run.storage.broken = {"write"}
    run.save(2)
    with pytest.raises(StorageError, match="cannot write"):
        run.manager.wait()
    assert run.facts("checkpoint.failed")["step"] == 2 and run.facts("checkpoint.failed")["seen"] == "it is Monday"
    run.save(3)  # does not raise, although the one before it failed
    with pytest.raises(StorageError, match="cannot write"):
        run.save(4, wait=True)
    assert run.load() == 1
    run.storage.broken = set()
    run.save(5)
    run.manager.wait()
    assert run.load() == 5 and run.steps("checkpoint.failed") == [2, 3, 4]


def test_a_checkpoint_that_is_durable_is_not_called_failed_because_an_old_one_cannot_be_removed(start):
    run = start(keep_last_n=1)
    run.save(1, wait=True)
    run.storage.broken = {"remove"}
    run.save(2, wait=True)
    assert run.steps("checkpoint.committed") == [1, 2] and run.steps("checkpoint.failed") == []
    assert run.load() == 2
    run.storage.broken = set()
    run.save(3, wait=True)
    assert [entry.step for entry in run.manager.entries()] == [3], "the next save removes both"


def test_a_state_that_cannot_be_saved_is_refused_each_time_and_costs_no_slot(start):
    run = start()
    done = threading.Event()

    def try_often() -> None:
        for step in range(5):
            run.notes["junk"] = object()
            with pytest.raises(ConfigError, match="object cannot be part of the training state"):
                run.save(step)
        del run.notes["junk"]
        run.save(9, wait=True)
        done.set()

    threading.Thread(target=try_often, daemon=True).start()
    assert done.wait(5), "the third attempt waits for a slot that never comes back"
    assert run.load() == 9


def test_an_observer_that_raises_does_not_stop_the_saving(start, tmp_path):
    run = start()
    calls = []

    def raises(kind: str, facts: dict[str, Any]) -> None:
        calls.append(kind)
        if kind == "checkpoint.committed":
            raise ZeroDivisionError("a bug in the observer")

    run.manager._on_event = raises
    run.save(1)
    run.save(2)
    run.manager.wait(timeout=SOON_S)
    assert calls.count("checkpoint.committed") == 2 and run.load() == 2


def test_a_closed_manager_holds_no_memory_not_even_in_the_traceback_of_its_error(start):
    before = arenas()
    run = start()
    run.storage.broken = {"write"}
    run.save(1)
    run.manager.close()
    gc.collect()
    assert run.steps("checkpoint.failed") == [1] and arenas() <= before


def test_metrics_that_are_no_numbers_are_refused(start):
    with pytest.raises(CheckpointError, match="metrics must be numbers"):
        start().save(1, metrics={"loss": "low"})


def test_a_part_of_ones_own_called_like_the_random_generators_is_not_lost(start):
    run = start()
    mine = {"seed": 3}
    try:
        run.manager.save({"generators": mine}, 1, wait=True)
    except ConfigError:
        return  # refused is as good as saved
    mine.clear()
    run.manager.load_latest({"generators": mine})
    assert mine == {"seed": 3}


# ---- damaged checkpoints


def flip(path: Path, at: float = 0.5) -> None:
    raw = bytearray(path.read_bytes())
    raw[int(at * (len(raw) - 1))] ^= 4
    path.write_bytes(raw)


def swap(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


DAMAGE: dict[str, Callable[[Path, Path], None]] = {
    "a bit of the first tensor": lambda new, old: flip(new / "shard-00000.bin", 0),
    "a bit in the middle of the shard": lambda new, old: flip(new / "shard-00000.bin"),
    "a bit at the end of the shard": lambda new, old: flip(new / "shard-00000.bin", 1),
    "a bit of the manifest": lambda new, old: flip(new / MANIFEST),
    "a bit of the marker": lambda new, old: flip(new / COMMIT),
    "the shard cut short": lambda new, old: os.truncate(new / "shard-00000.bin", 1000),
    "the shard empty": lambda new, old: os.truncate(new / "shard-00000.bin", 0),
    "the shard longer": lambda new, old: os.truncate(new / "shard-00000.bin", 10**6),
    "the manifest cut short": lambda new, old: os.truncate(new / MANIFEST, 20),
    "the shard missing": lambda new, old: (new / "shard-00000.bin").unlink(),
    "the manifest missing": lambda new, old: (new / MANIFEST).unlink(),
    "the shard of another checkpoint": lambda new, old: (new / "shard-00000.bin").write_bytes(
        (old / "shard-00000.bin").read_bytes()),
    "the manifest of another checkpoint": lambda new, old: (new / MANIFEST).write_bytes((old / MANIFEST).read_bytes()),
    "the marker of another checkpoint": lambda new, old: (new / COMMIT).write_bytes((old / COMMIT).read_bytes()),
    "a manifest that is no JSON, with a fitting marker": lambda new, old: (
        (new / MANIFEST).write_bytes(b"{"), (new / COMMIT).write_text(digest(b"{"))),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_with_an_event_and_the_next_older_one_is_used(start, kind):
    run = start()
    old, new = (run.folder / run.save(step, wait=True) for step in (1, 2))
    DAMAGE[kind](new, old)
    left = sorted(os.listdir(new))
    assert run.load() == 1
    facts = run.facts("checkpoint.damaged")
    assert facts["step"] == 2 and facts["name"] == new.name and facts["reason"] and facts["marked"]
    assert sorted(os.listdir(new)) == sorted([*left, DAMAGED]), "nothing is deleted"
    assert (new / DAMAGED).read_text() == facts["reason"]
    with pytest.raises(CheckpointDamaged):
        run.manager.load({"notes": run.notes}, 2)
    run.events.clear()
    assert run.load() == 1 and run.steps("checkpoint.damaged") == [], "once is enough"
    for step in range(3, 9):
        run.save(step)
    run.manager.wait()
    assert (new / DAMAGED).exists() and run.load() == 8


def test_shards_of_two_checkpoints_that_changed_places_damage_both(start):
    run = start(keep_last_n=9)
    folders = [run.folder / run.save(step, wait=True) for step in (1, 2, 3)]
    swap(folders[1] / "shard-00000.bin", folders[2] / "shard-00000.bin")
    assert run.load() == 1 and run.steps("checkpoint.damaged") == [3, 2]


def test_all_files_of_two_checkpoints_that_changed_places_are_never_taken_for_each_other(start):
    run = start(keep_last_n=9)
    folders = [run.folder / run.save(step, wait=True) for step in (1, 2)]
    for file in ("shard-00000.bin", MANIFEST, COMMIT):
        swap(folders[0] / file, folders[1] / file)
    assert run.load() == 2, "the state of step 1 is not the newest, whatever its folder is called"


def test_when_all_are_damaged_there_is_nothing_to_load_and_nothing_is_deleted(start):
    run = start()
    for step in (1, 2):
        flip(run.folder / run.save(step, wait=True) / "shard-00000.bin")
    assert run.load() is None and run.steps("checkpoint.damaged") == [2, 1]
    assert len(run.manager.entries()) == 2


@pytest.mark.parametrize("what", ["open", "read"])
def test_storage_that_does_not_answer_for_a_while_makes_no_good_checkpoint_a_damaged_one(start, what):
    run = start()
    for step in (1, 2):
        run.save(step, wait=True)
    run.storage.broken = {what}
    with pytest.raises(StorageError, match=f"cannot {what}"):
        run.load()
    run.storage.broken = set()
    assert not list(run.folder.glob(f"*/{DAMAGED}"))
    assert run.load() == 2


@pytest.mark.parametrize("bug", [KeyError("new_setting"), TypeError("not a number"), AttributeError("gone")])
def test_a_bug_in_somebodys_load_state_dict_is_told_and_makes_no_good_checkpoint_a_damaged_one(start, bug):
    class Part:
        def state_dict(self) -> dict[str, Any]:
            return {"value": 3}

        def load_state_dict(self, saved: dict[str, Any]) -> None:
            raise bug

    run = start()
    run.manager.save({"part": Part()}, 1, wait=True)
    with pytest.raises((type(bug), CheckpointError)) as caught:
        run.manager.load_latest({"part": Part()})
    assert str(bug.args[0]) in str(caught.value)
    assert not list(run.folder.glob(f"*/{DAMAGED}")) and run.steps("checkpoint.damaged") == []
