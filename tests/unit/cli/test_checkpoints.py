"""`ftlab checkpoints`: shows what is there, changes only what it was told to, and says clearly what it cannot do."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from ftlab.checkpoint import tree
from ftlab.checkpoint.arena import Slot
from ftlab.checkpoint.manager import CheckpointManager
from ftlab.checkpoint.manifest import Manifest
from ftlab.checkpoint.storage import open_storage
from ftlab.checkpoint.tree import Piece
from ftlab.checkpoint.vault import Vault
from ftlab.cli import checkpoints
from ftlab.cli.main import main
from tests.limits import SOON_S


def _parts() -> dict:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def saved(tmp_path) -> Path:
    """Three good checkpoints, of the steps 10, 20 and 30."""
    with CheckpointManager(str(tmp_path / "run"), every=10) as manager:
        for step in (10, 20, 30):
            manager.save(_parts(), step, epoch=step // 10, metrics={"loss": 1 / step}, wait=True)
    return tmp_path / "run"


def _folder(run: Path, step: int) -> Path:
    [found] = run.glob(f"step-{step:010d}-*")
    return found


def _damage(run: Path, step: int) -> None:
    file = _folder(run, step) / "shard-00000.bin"
    raw = bytearray(file.read_bytes())
    raw[0] ^= 1
    file.write_bytes(raw)


def _unfinish(run: Path, step: int) -> None:
    (_folder(run, step) / "COMMIT").unlink()


def _run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["checkpoints", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def _json(capsys, *arguments: object) -> tuple[int, dict]:
    code, out, _ = _run(capsys, *arguments, "--json")
    assert out.count("\n") == 1
    return code, json.loads(out)


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
            for path in folder.rglob("*")}


# ---- ls ----------------------------------------------------------------------------------------------------


def test_ls_tells_everything_with_the_newest_first_and_unfinished_ones_last(capsys, saved):
    _unfinish(saved, 30)
    code, found = _json(capsys, "ls", "--dir", saved)
    rows = found["checkpoints"]
    assert code == 0 and found["directory"] == str(saved)
    assert [(row["step"], row["status"]) for row in rows] == [(20, "good"), (10, "good"), (30, "incomplete")]
    assert rows[2]["reason"] and rows[2]["shards"] is None and rows[2]["bytes"] > 0
    assert (rows[0]["epoch"], rows[0]["metrics"], rows[0]["shards"]) == (2, {"loss": 0.05}, 1)
    assert rows[0]["bytes"] == (_folder(saved, 20) / "shard-00000.bin").stat().st_size and rows[0]["age_s"] < 600


def test_ls_prints_a_table(capsys, saved):
    (_folder(saved, 10) / "DAMAGED").write_text("somebody sat on it")
    code, out, _ = _run(capsys, "ls", "--dir", saved)
    lines = out.splitlines()
    assert code == 0 and lines[0].split() == ["step", "name", "size", "shards", "epoch", "metrics", "age", "status"]
    assert len(lines) == 4 and "loss=0.03333" in lines[1] and lines[1].endswith("good")
    assert lines[3].endswith(": somebody sat on it")


def test_ls_finds_the_folder_in_the_environment(capsys, saved, monkeypatch):
    monkeypatch.setenv("CHECKPOINT_DIR", f"file://{saved}")
    assert len(_json(capsys, "ls")[1]["checkpoints"]) == 3


def test_ls_reads_a_url(capsys):
    with CheckpointManager("memory://cli-test/run") as manager:
        manager.save(_parts(), 7, wait=True)
    code, found = _json(capsys, "ls", "--dir", "memory://cli-test/run")
    assert code == 0 and [row["step"] for row in found["checkpoints"]] == [7]


def test_a_loss_that_is_no_number_is_still_json(capsys, tmp_path):
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(_parts(), 1, metrics={"loss": float("nan")}, wait=True)
    assert _json(capsys, "ls", "--dir", tmp_path)[1]["checkpoints"][0]["metrics"] == {"loss": None}
    assert _json(capsys, "show", 1, "--dir", tmp_path)[1]["manifest"]["metrics"] == {"loss": None}
    assert "loss=nan" in _run(capsys, "ls", "--dir", tmp_path)[1]


# ---- verify ------------------------------------------------------------------------------------------------


def test_verify_reads_everything_and_changes_nothing(capsys, saved):
    before = _tree(saved)
    code, found = _json(capsys, "verify", "--dir", saved)
    assert code == 0 and found["ok"] and len(found["checkpoints"]) == 3
    _damage(saved, 20)
    code, found = _json(capsys, "verify", "--dir", saved)
    assert code == 1 and not found["ok"]
    assert [row["status"] for row in found["checkpoints"]] == ["good", "damaged", "good"]
    assert "digest" in found["checkpoints"][1]["reason"]
    assert set(_tree(saved)) == set(before)


def test_verify_reads_only_what_was_named(capsys, saved):
    _damage(saved, 20)
    code, found = _json(capsys, "verify", 10, _folder(saved, 30).name, "--dir", saved)
    assert code == 0 and [row["step"] for row in found["checkpoints"]] == [10, 30]
    assert _json(capsys, "verify", 20, "--dir", saved)[0] == 1


def test_an_unfinished_save_fails_only_when_it_was_named(capsys, saved):
    _unfinish(saved, 30)
    code, out, _ = _run(capsys, "verify", "--dir", saved)
    assert code == 0 and "incomplete" in out and out.splitlines()[-1] == "2 of 3 read and good"
    assert _run(capsys, "verify", 30, "--dir", saved)[0] == 1


def test_a_checkpoint_that_is_removed_meanwhile_is_not_called_damaged(capsys, saved, monkeypatch):
    plain = Vault.verify

    def verify(vault: Vault, name: str) -> object:
        if name.startswith("step-0000000010"):
            vault.remove(name)
        return plain(vault, name)

    monkeypatch.setattr(Vault, "verify", verify)
    code, found = _json(capsys, "verify", "--dir", saved)
    assert code == 0 and [row["step"] for row in found["checkpoints"]] == [30, 20]


def test_who_waits_for_long_is_told_how_far_it_is(capsys, saved, monkeypatch):
    plain = Vault.verify

    def slow(vault: Vault, name: str) -> object:
        deadline = time.monotonic() + SOON_S
        while "reading" not in (said := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.001)
        told.append(said)
        return plain(vault, name)

    told: list[str] = []
    monkeypatch.setattr(checkpoints, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(Vault, "verify", slow)
    assert _run(capsys, "verify", 20, "--dir", saved)[0] == 0
    assert "step-0000000020" in told[0]


# ---- show --------------------------------------------------------------------------------------------------


def test_show_lists_manifest_digests_and_tensors(capsys, saved):
    code, found = _json(capsys, "show", 20, "--dir", saved)
    tensors = {row["name"]: (row["shape"], row["dtype"], row["bytes"]) for row in found["tensors"]}
    assert code == 0 and found["manifest"]["step"] == 20 and len(found["manifest"]["shards"][0]["digest"]) == 32
    assert tensors["parts.model.weight"] == ([3, 4], "float32", 48)
    assert tensors["parts.optimizer.state.0.exp_avg"] == ([3, 4], "float32", 48)
    _, out, _ = _run(capsys, "show", _folder(saved, 20).name, "--dir", saved)
    assert "step 20, epoch 2" in out and found["manifest"]["shards"][0]["digest"] in out
    assert "parts.model.weight" in out and "3x4" in out


def test_show_of_a_damaged_one_says_why(capsys, saved):
    _damage(saved, 20)
    code, _, err = _run(capsys, "show", 20, "--dir", saved)
    assert code == 1 and "digest" in err
    _unfinish(saved, 30)
    code, _, err = _run(capsys, "show", 30, "--dir", saved)
    assert code == 1 and "incomplete" in err


# ---- export ------------------------------------------------------------------------------------------------


def test_export_writes_the_old_form(capsys, saved, tmp_path):
    file, parts = tmp_path / "out.pt", _parts()
    code, found = _json(capsys, "export", 20, file, "--dir", saved)
    old = torch.load(file, weights_only=True)
    assert code == 0 and found["file"] == str(file) and list(tmp_path.glob(".*")) == []
    assert list(old) == ["epoch", "model_state_dict", "optimizer_state_dict", "loss"]
    assert (old["epoch"], old["loss"]) == (2, 0.05)
    assert torch.equal(old["model_state_dict"]["weight"], parts["model"].weight)
    fresh = _parts()
    fresh["model"].load_state_dict(old["model_state_dict"])
    fresh["optimizer"].load_state_dict(old["optimizer_state_dict"])
    assert file.stat().st_size < 20_000  # every tensor once, and not all memory behind it


def test_export_refuses_to_overwrite(capsys, saved, tmp_path):
    file = tmp_path / "out.pt"
    file.write_text("precious")
    code, _, err = _run(capsys, "export", 20, file, "--dir", saved)
    assert code == 2 and "--force" in err and file.read_text() == "precious"
    assert _run(capsys, "export", 20, file, "--dir", saved, "--force")[0] == 0
    assert torch.load(file, weights_only=True)["epoch"] == 2


def test_a_failed_export_leaves_nothing(capsys, saved, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    code, _, err = _run(capsys, "export", 20, tmp_path / "out.pt", "--dir", saved)
    assert code == 1 and "No space left" in err and [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("file", ["gone/out.pt", "run"])
def test_export_to_a_place_that_cannot_be_is_bad_usage(capsys, saved, tmp_path, file):
    assert _run(capsys, "export", 20, tmp_path / file, "--dir", saved, "--force")[0] == 2


def test_export_needs_a_model_and_can_do_without_an_optimizer(capsys, tmp_path):
    with CheckpointManager(str(tmp_path / "run")) as manager:
        manager.save({"net": _parts()["model"]}, 1, wait=True)
        manager.save({"model": _parts()["model"]}, 2, wait=True)
    code, _, err = _run(capsys, "export", 1, tmp_path / "out.pt", "--dir", tmp_path / "run")
    assert code == 1 and "net" in err
    code, out, _ = _run(capsys, "export", 2, tmp_path / "out.pt", "--dir", tmp_path / "run")
    assert code == 0 and "optimizer" in out
    assert torch.load(tmp_path / "out.pt", weights_only=True)["optimizer_state_dict"] is None


def _save_in_two_shards(run: Path, whole: torch.Tensor, monkeypatch) -> None:
    """As two ranks of an FSDP job would: each half of the rows of the weight."""
    vault, shards = Vault(open_storage(str(run))), []
    for rank in (0, 1):
        piece = Piece(tuple(whole.shape), (2 * rank, 0), ("S0",))
        monkeypatch.setattr(tree, "is_sharded", lambda value: True)
        monkeypatch.setattr(tree, "_local_piece", lambda value, piece=piece: (value, piece))
        packed = tree.pack({"step": 5, "parts": {"model": {"weight": whole[2 * rank:2 * rank + 2]}}, "grads": []})
        slot = Slot()
        filled = slot.fill(packed)
        shards.append(vault.write_shard("step-0000000005-ab", rank, slot.view(filled.bytes), filled.header_bytes))
        slot.close()
    vault.commit("step-0000000005-ab", Manifest(step=5, world=2, shards=tuple(shards), epoch=1))


def test_a_sharded_one_is_shown_and_exported_as_a_whole(capsys, tmp_path, monkeypatch):
    whole = torch.arange(16.0).reshape(4, 4)
    _save_in_two_shards(tmp_path / "run", whole, monkeypatch)
    [weight] = _json(capsys, "show", 5, "--dir", tmp_path / "run")[1]["tensors"]
    assert (weight["shape"], weight["bytes"], weight["sharded"]) == ([4, 4], 64, ["S0"])
    assert "4x4 (S0)" in _run(capsys, "show", 5, "--dir", tmp_path / "run")[1]
    assert _json(capsys, "ls", "--dir", tmp_path / "run")[1]["checkpoints"][0]["shards"] == 2
    assert _run(capsys, "export", 5, tmp_path / "out.pt", "--dir", tmp_path / "run")[0] == 0
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["model_state_dict"]["weight"], whole)


# ---- rm ----------------------------------------------------------------------------------------------------


def test_rm_removes_what_was_named(capsys, saved):
    code, found = _json(capsys, "rm", 10, _folder(saved, 20).name, "--dir", saved, "--yes")
    assert code == 0 and len(found["removed"]) == 2
    assert [path.name for path in saved.iterdir()] == [_folder(saved, 30).name]


def test_rm_keeps_the_last_good_one(capsys, saved):
    _unfinish(saved, 30)
    before = _tree(saved)
    code, _, err = _run(capsys, "rm", 10, 20, "--dir", saved, "--yes")
    assert code == 2 and "--force" in err and _tree(saved) == before
    assert _run(capsys, "rm", 30, "--dir", saved, "--yes")[0] == 0
    assert _run(capsys, "rm", 10, 20, "--dir", saved, "--yes", "--force")[0] == 0
    assert list(saved.iterdir()) == []


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rm_asks_on_a_terminal(capsys, saved, monkeypatch):
    monkeypatch.setattr(sys, "stdin", _Terminal("n\n"))
    code, out, err = _run(capsys, "rm", 10, "--dir", saved)
    assert code == 1 and "[y/N]" in err and "nothing was removed" in out and _folder(saved, 10)
    monkeypatch.setattr(sys, "stdin", _Terminal("y\n"))
    assert _run(capsys, "rm", 10, "--dir", saved)[0] == 0
    assert not list(saved.glob("step-0000000010-*"))


def test_rm_needs_yes_where_nobody_can_be_asked(capsys, saved, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    code, _, err = _run(capsys, "rm", 10, "--dir", saved)
    assert code == 2 and "--yes" in err and _folder(saved, 10)


def test_rm_wants_a_name_when_a_step_was_saved_twice(capsys, saved):
    with CheckpointManager(str(saved), keep_last_n=9) as manager:
        manager.save(_parts(), 30, wait=True)
    before = _tree(saved)
    code, _, err = _run(capsys, "rm", 30, "--dir", saved, "--yes")
    assert code == 2 and "2 times" in err and _tree(saved) == before


# ---- nothing there -----------------------------------------------------------------------------------------

COMMANDS = (["ls"], ["verify"], ["show", "5"], ["export", "5", "never.pt"], ["rm", "5", "--yes", "--force"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_missing_or_empty_folder_is_told_and_not_made(capsys, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = _run(capsys, *command, "--dir", tmp_path / "gone")
    assert code == 1 and "there is no folder" in err
    code, _, err = _run(capsys, *command, "--dir", tmp_path)
    assert code == 1 and "no checkpoints" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS[2:], ids=lambda command: command[0])
def test_an_unknown_step_is_told_with_those_that_are_there(capsys, saved, command, monkeypatch):
    monkeypatch.chdir(saved.parent)
    before = _tree(saved.parent)
    code, found = _json(capsys, *command, "--dir", saved)
    assert code == 1 and found["error"] == "NoCheckpoint" and "10" in found["seen"]
    assert _tree(saved.parent) == before


def test_no_folder_at_all_is_bad_usage(capsys, monkeypatch):
    monkeypatch.delenv("CHECKPOINT_DIR", raising=False)
    code, _, err = _run(capsys, "ls")
    assert code == 2 and "CHECKPOINT_DIR" in err


@pytest.mark.parametrize("command", ["ls", "verify", "show", "export", "rm"])
def test_help_has_an_example(capsys, command):
    with pytest.raises(SystemExit) as end:
        main(["checkpoints", command, "--help"])
    assert end.value.code == 0 and "example: ftlab checkpoints" in capsys.readouterr().out
