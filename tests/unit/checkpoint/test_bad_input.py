"""What a person, a broken disk or an attacker may hand to the manager: a clear error each time, and nothing deleted."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ftlab.checkpoint import tree
from ftlab.checkpoint.digest import digest
from ftlab.checkpoint.manager import CheckpointManager
from ftlab.checkpoint.manifest import FORMAT
from ftlab.checkpoint.vault import COMMIT, MANIFEST
from ftlab.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointTooNew,
    ConfigError,
    NoCheckpoint,
    StorageError,
)


@pytest.fixture
def manager(tmp_path) -> Iterator[CheckpointManager]:
    with CheckpointManager(str(tmp_path / "run"), keep_last_n=9) as manager:
        yield manager


def folder(manager: CheckpointManager, name: str) -> Path:
    return Path(manager.vault.storage.url) / name


def tree_of(path: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def rewrite(path: Path, header: bytes | None = None, **changes: Any) -> None:
    """Change a checkpoint as somebody would who also makes the digests fit."""
    manifest = json.loads((path / MANIFEST).read_text())
    if header is not None:
        [shard] = manifest["shards"]
        raw = (path / shard["file"]).read_bytes()[:shard["bytes"] - shard["header_bytes"]] + header
        (path / shard["file"]).write_bytes(raw)
        shard.update(bytes=len(raw), header_bytes=len(header), digest=digest(raw))
    raw = json.dumps({**manifest, **changes}).encode()
    (path / MANIFEST).write_bytes(raw)
    (path / COMMIT).write_text(digest(raw))


def saved_header(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


# ---- settings


@pytest.mark.parametrize(("settings", "words"), [
    ({"keep_last_n": 0}, "nothing to come back to"), ({"keep_last_n": -1}, "nothing to come back to"),
    ({"keep_last_n": 2.5}, "keep_last_n must be"), ({"keep_last_n": "3"}, "keep_last_n must be"),
    ({"every": 0}, "every must be"), ({"every": -5}, "every must be"), ({"every": "banana"}, "every must be"),
    ({"every": "0s"}, "every must be"), ({"every": "s"}, "every must be"), ({"every": 2.5}, "every must be"),
    ({"every": True}, "every must be"), ({"every": "nans"}, "every must be"), ({"timeout_s": 0}, "timeout_s"),
])
def test_settings_that_cannot_work_are_refused_with_the_reason(tmp_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        CheckpointManager(str(tmp_path / "run"), **settings)
    assert not (tmp_path / "run").exists(), "nothing is made for a run that cannot be"


def test_without_a_folder_and_without_checkpoint_dir_it_says_what_to_set(monkeypatch):
    monkeypatch.delenv("CHECKPOINT_DIR", raising=False)
    with pytest.raises(ConfigError, match="no folder for checkpoints") as caught:
        CheckpointManager()
    assert "CHECKPOINT_DIR" in caught.value.hint


def test_checkpoint_dir_of_the_environment_is_used_when_no_folder_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("CHECKPOINT_DIR", str(tmp_path / "there"))
    with CheckpointManager() as manager:
        assert manager.vault.storage.url == str(tmp_path / "there")
    with CheckpointManager(str(tmp_path / "mine")) as manager:
        assert manager.vault.storage.url == str(tmp_path / "mine")


@pytest.mark.parametrize("part", [3, "text", None, [1], object()])
def test_a_part_without_a_state_is_refused_by_its_name(manager, part):
    with pytest.raises(ConfigError, match="cannot protect thing="):
        manager.save({"thing": part}, 1)
    assert manager.entries() == []


# ---- folders


def test_a_missing_or_empty_folder_holds_nothing_to_resume_from(manager):
    assert manager.load_latest({"notes": {}}) is None
    with pytest.raises(NoCheckpoint, match="no checkpoint 5") as caught:
        manager.load({"notes": {}}, 5)
    assert "none" in caught.value.seen


def test_a_folder_with_other_things_in_it_holds_nothing_to_resume_from_and_they_stay(tmp_path, manager):
    root = Path(manager.vault.storage.url)
    (root / "step-0000000005-abc").mkdir()
    (root / "notes.txt").write_text("mine")
    (root / "step-0000000007-abc").write_text("a file, not a folder")
    assert manager.load_latest({"notes": {}}) is None
    manager.save({"notes": {}}, 9, wait=True)
    assert (root / "notes.txt").read_text() == "mine" and (root / "step-0000000007-abc").is_file()


def test_a_path_that_is_a_file_is_refused_and_stays(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="cannot make the folder"):
        CheckpointManager(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


# ---- another model


def model(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def test_a_checkpoint_of_another_model_is_refused_with_names_and_shapes_and_nothing_changes(manager):
    manager.save({"model": model(8)}, 1, wait=True)
    other = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2), nn.Linear(2, 2))
    before = tree.digest(other.state_dict())
    files = tree_of(Path(manager.vault.storage.url))
    for load in (manager.load_latest, lambda state: manager.load(state, 1)):
        with pytest.raises(CheckpointMismatch) as caught:
            load({"model": other})
        assert "model.0.weight: (6, 4) float32 here, (8, 4) float32 there" in caught.value.seen
        assert "model.3.weight: (2, 2) float32 here, missing there" in caught.value.seen
    assert tree.digest(other.state_dict()) == before
    assert tree_of(Path(manager.vault.storage.url)) == files, "it is not damaged, and stays as it is"


def test_a_part_that_the_checkpoint_does_not_hold_is_named(manager):
    manager.save({"model": model()}, 1, wait=True)
    with pytest.raises(CheckpointMismatch) as caught:
        manager.load_latest({"model": model(), "average": model()})
    assert "average: here, not in the checkpoint" in caught.value.seen


def test_parts_that_are_not_asked_for_are_left_out(manager):
    original = model()
    manager.save({"model": original, "notes": {"best": 1}}, 1, wait=True)
    other = model()
    manager.load_latest({"model": other})
    assert tree.digest(other.state_dict()) == tree.digest(original.state_dict())


def frozen() -> nn.Module:
    net = model()
    net[0].weight.requires_grad_(False)
    return net


def adamw(net: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], **settings)


@pytest.mark.parametrize("kind", ["a frozen layer", "an optimizer of fewer parameters", "two parameter groups"])
def test_an_optimizer_or_model_that_does_not_fit_is_a_mismatch_and_nothing_changes(manager, kind):
    net = model()
    optimizer = adamw(net)
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    manager.save({"model": net, "optimizer": optimizer}, 1, wait=True)
    other = frozen() if kind == "a frozen layer" else model()
    fewer = torch.optim.AdamW([other[2].weight])
    groups = torch.optim.AdamW([{"params": [*other[:1].parameters()]}, {"params": [*other[1:].parameters()]}])
    chosen = {"a frozen layer": adamw(other), "an optimizer of fewer parameters": fewer, "two parameter groups": groups}
    state = {"model": other, "optimizer": chosen[kind]}
    before = tree.digest({name: part.state_dict() for name, part in state.items()})
    with pytest.raises(CheckpointMismatch):
        manager.load_latest(state)
    assert tree.digest({name: part.state_dict() for name, part in state.items()}) == before
    assert manager.entries()[0].good


def test_a_frozen_layer_without_an_optimizer_is_a_mismatch_or_loads_but_does_not_stop_half_way(manager):
    net = model()
    net(torch.randn(3, 4)).sum().backward()
    manager.save({"model": net}, 1, wait=True)
    other = frozen()
    before = tree.digest(other.state_dict())
    try:
        manager.load_latest({"model": other})
    except CheckpointMismatch:
        assert tree.digest(other.state_dict()) == before
    else:
        assert tree.digest(other.state_dict()) == tree.digest(net.state_dict())


# ---- another format


def test_a_checkpoint_of_a_newer_format_is_an_error_that_says_so_and_stays(manager):
    path = folder(manager, manager.save({"notes": {"a": 1}}, 1, wait=True))
    rewrite(path, format=FORMAT + 1, something_new=[1, 2])
    files = tree_of(path)
    notes: dict[str, Any] = {"mine": 1}
    for load in (lambda: manager.load({"notes": notes}, 1), lambda: manager.load_latest({"notes": notes})):
        with pytest.raises(CheckpointTooNew, match=f"format {FORMAT + 1}"):
            load()
    assert notes == {"mine": 1} and tree_of(path) == files
    for step in range(2, 15):
        manager.save({"notes": notes}, step)
    manager.wait()
    assert tree_of(path) == files, "retention does not touch what it does not know"


# ---- files that were changed


def test_a_truncated_file_is_a_clear_error_when_it_is_asked_for_by_name(manager):
    path = folder(manager, manager.save({"notes": {"a": torch.ones(100)}}, 1, wait=True))
    os.truncate(path / "shard-00000.bin", 100)
    with pytest.raises(CheckpointDamaged, match="cannot be used") as caught:
        manager.load({"notes": {}}, 1)
    assert "has 100 bytes" in caught.value.seen


def test_an_unfinished_save_is_a_clear_error_when_it_is_asked_for_by_name(manager):
    path = folder(manager, manager.save({"notes": {}}, 1, wait=True))
    (path / COMMIT).unlink()
    with pytest.raises(CheckpointDamaged, match="incomplete"):
        manager.load({"notes": {}}, 1)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_hostile_header_with_fitting_digests_is_refused_and_runs_nothing(manager, tmp_path):
    for step in (1, 2):
        path = folder(manager, manager.save({"notes": {"step": step}}, step, wait=True))
    crater = tmp_path / "crater"
    header = saved_header({"step": 2, "parts": {"notes": Bomb(str(crater))}, "grads": []})
    rewrite(path, header)
    torch.load(io.BytesIO(header), weights_only=False)
    assert crater.is_dir(), "the bomb is live: only weights_only stands between it and us"
    crater.rmdir()
    notes: dict[str, Any] = {}
    with pytest.raises(CheckpointDamaged, match="header that cannot be read"):
        manager.load({"notes": notes}, 2)
    assert not crater.exists() and notes == {}
    found = manager.load_latest({"notes": notes})
    assert found is not None and found.step == 1 and notes == {"step": 1}, "the older one is used"
    assert not crater.exists() and (path / "shard-00000.bin").exists()


PLACE = tree.pack({"x": torch.zeros(2)})
TENSOR = next(key for key in torch.load(io.BytesIO(PLACE.header), weights_only=True)["x"] if key.startswith("\0"))
NONSENSE = {
    "no tree at all": 3,
    "a list": [1, 2],
    "no parts": {"step": 2, "grads": []},
    "parts that are a number": {"step": 2, "parts": 3, "grads": []},
    "a tensor that is not there": {"step": 2, "parts": {"notes": {"x": {TENSOR: 9, "dtype": "float32", "shape": [0]}}},
                                   "grads": []},
    "a tensor of no type": {"step": 2, "parts": {"notes": {"x": {TENSOR: 0, "dtype": "load", "shape": [2]}}},
                            "grads": []},
    "a tensor of negative size": {"step": 2, "parts": {"notes": {"x": {TENSOR: 0, "dtype": "float32", "shape": [-2]}}},
                                  "grads": []},
    "a tensor larger than memory": {"step": 2, "parts": {"notes": {"x": {TENSOR: 0, "dtype": "float32",
                                                                        "shape": [1 << 50]}}}, "grads": []},
    "gradients of another model": {"step": 2, "parts": {"notes": {}}, "grads": [None, None]},
    "a step that is no number": {"step": "two", "parts": {"notes": {}}, "grads": []},
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_header_of_nonsense_with_fitting_digests_is_a_checkpoint_error(manager, kind):
    path = folder(manager, manager.save({"notes": {"step": 2}}, 2, wait=True))
    files = set(tree_of(path))
    rewrite(path, saved_header(NONSENSE[kind]))
    shard = path / "shard-00000.bin"
    shard.write_bytes(saved_header(NONSENSE[kind]))  # no tensors in front of it
    raw = shard.read_bytes()
    [row] = json.loads((path / MANIFEST).read_text())["shards"]
    rewrite(path, shards=[{**row, "bytes": len(raw), "header_bytes": len(raw), "digest": digest(raw)}])
    notes: dict[str, Any] = {"mine": 1}
    with pytest.raises(CheckpointError):
        manager.load({"notes": notes}, 2)
    assert notes == {"mine": 1} and files <= set(tree_of(path))


@pytest.mark.parametrize("change", [
    {"header_bytes": "many"}, {"header_bytes": -1}, {"header_bytes": 1 << 40}, {"header_bytes": None}, {"digest": 3},
    {"rank": None, "surprise": 1},
])
def test_a_manifest_of_nonsense_with_a_fitting_marker_is_a_checkpoint_error(manager, change):
    path = folder(manager, manager.save({"notes": {"step": 2}}, 2, wait=True))
    entry = manager.entries()[0]
    rewrite(path, shards=[{**asdict(entry.manifest.shards[0]), **change}])
    with pytest.raises(CheckpointError):
        manager.load({"notes": {}}, 2)
    assert manager.load_latest({"notes": {}}) is None
    assert (path / "shard-00000.bin").exists()
