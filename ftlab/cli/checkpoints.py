"""`ftlab checkpoints`: look at what a run has saved, check it, take it elsewhere, remove it by hand.

Only `rm` changes the storage, and only what it was told; a folder that is not there is not made. Nothing that a
checkpoint's files say is executed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from ftlab.checkpoint import tree
from ftlab.checkpoint.manifest import Manifest
from ftlab.checkpoint.oldform import write_old
from ftlab.checkpoint.resharding import assemble
from ftlab.checkpoint.state import TrainingState
from ftlab.checkpoint.storage import open_storage
from ftlab.checkpoint.vault import Entry, Vault
from ftlab.config import checkpoint_dir
from ftlab.errors import CheckpointDamaged, CheckpointError, ConfigError, NoCheckpoint, StorageError

_PATIENCE_S = 2.0  # after that, somebody who waits is told how far it is


def ls(arguments: argparse.Namespace) -> int:
    """List the checkpoints: what a run would resume from first, those without a manifest last."""
    vault, entries = _open(arguments)
    rows = [_row(vault, entry) for entry in entries]
    _answer(arguments, {"directory": vault.storage.url, "checkpoints": rows}, _listing(rows))
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Read checkpoints and compare their digests; 0 if all are good."""
    vault, entries = _open(arguments)
    chosen = [entry for which in arguments.which for entry in _matching(vault, entries, which)] or entries
    sizes = {entry.name: _size(vault, entry) for entry in chosen}
    with _Clock(sum(sizes.values())) as clock:
        checked = [_check(vault, clock.during(name, size)) for name, size in sizes.items()]
    rows = [_row(vault, entry) for entry in checked if entry is not None]
    bad = [row for row in rows if row["status"] not in (("good",) if arguments.which else ("good", "incomplete"))]
    good = sum(row["status"] == "good" for row in rows)
    text = f"{_listing(rows)}\n{good} of {len(rows)} read and good"
    _answer(arguments, {"directory": vault.storage.url, "ok": not bad, "checkpoints": rows}, text)
    return 1 if bad else 0


def show(arguments: argparse.Namespace) -> int:
    """Print what one checkpoint holds: its manifest, its digests and its tensors."""
    vault, _ = _open(arguments)
    entry = vault.find(arguments.which)
    manifest = _require_good(entry)
    tensors = _tensors(vault.read_shard(entry.name, manifest.shards[0]))
    facts = {"directory": vault.storage.url, "name": entry.name, "manifest": _plain(json.loads(manifest.to_json())),
             "tensors": tensors}
    _answer(arguments, facts, _description(entry.name, manifest, tensors))
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Write one checkpoint as a single torch.save file with the usual four keys."""
    path = Path(arguments.file).expanduser()
    if path.exists() and not arguments.force:
        raise ConfigError(f"{path} is there already", hint="choose another name, or --force to replace it")
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"cannot write {path}: {'it' if path.is_dir() else path.parent} is "
                          f"{'a folder' if path.is_dir() else 'no folder'}")
    vault, _ = _open(arguments)
    entry = vault.find(arguments.which)
    manifest = _require_good(entry)
    parts = _whole_parts(vault, entry.name, manifest)
    try:
        write_old(path, epoch=manifest.epoch, model=parts["model"], optimizer=parts.get("optimizer"),
                  loss=manifest.metrics.get("loss"))
    except OSError as error:
        raise StorageError(f"cannot write {path}", seen=str(error)) from None
    size, whole = path.stat().st_size, "optimizer" in parts
    facts = {"name": entry.name, "file": str(path), "bytes": size, "optimizer": whole}
    left_out = "" if whole else "; it has no part called optimizer, so that key is None"
    _answer(arguments, facts, f"{entry.name} is in {path} ({_human(size)}){left_out}")
    return 0


def rm(arguments: argparse.Namespace) -> int:
    """Remove checkpoints by hand."""
    vault, entries = _open(arguments)
    chosen = [_only_one(vault, entries, which) for which in arguments.which]
    chosen = list({entry.name: entry for entry in chosen}.values())
    good = {entry.name for entry in entries if entry.good}
    if good and good <= set(_names(chosen)) and not arguments.force:
        raise ConfigError("that would leave no good checkpoint: the run could not be resumed", seen=", ".join(good),
                          hint="--force if you mean it")
    if not arguments.yes and not _agreed(chosen):
        _answer(arguments, {"directory": vault.storage.url, "removed": []}, "nothing was removed")
        return 1
    for entry in chosen:
        vault.remove(entry.name)
    _answer(arguments, {"directory": vault.storage.url, "removed": _names(chosen)},
            "\n".join(f"removed {name}" for name in _names(chosen)))
    return 0


# ---- finding -----------------------------------------------------------------------------------------------


def _open(arguments: argparse.Namespace) -> tuple[Vault, list[Entry]]:
    """The vault and what is in it; raises NoCheckpoint for a folder that is missing or holds none."""
    url = checkpoint_dir(arguments.dir)
    if urlparse(url).scheme in ("", "file"):
        folder = Path(url.removeprefix("file://")).expanduser()
        if not folder.is_dir():  # opening the storage would make it
            raise NoCheckpoint(f"there is no folder {folder}", seen="a file has this name" if folder.exists() else "",
                               hint="name the run's folder with --dir, or set CHECKPOINT_DIR")
    vault = Vault(open_storage(url))
    entries = vault.entries()
    if not entries:
        raise NoCheckpoint(f"there are no checkpoints in {vault.storage.url}",
                           hint="--dir names the folder that holds the step-... folders")
    return vault, entries


def _matching(vault: Vault, entries: Sequence[Entry], which: str) -> list[Entry]:
    """All checkpoints of a step, or the one with a name; raises NoCheckpoint."""
    found = [entry for entry in entries if which.isdecimal() and entry.step == int(which)]
    return found or [vault.find(which)]


def _only_one(vault: Vault, entries: Sequence[Entry], which: str) -> Entry:
    found = _matching(vault, entries, which)
    if len(found) > 1:
        raise ConfigError(f"step {which} was saved {len(found)} times", seen=", ".join(_names(found)),
                          hint="say which one by its name")
    return found[0]


def _require_good(entry: Entry) -> Manifest:
    if entry.manifest is None:
        raise CheckpointDamaged(f"{entry.name} cannot be used: it is {entry.status}", seen=entry.reason)
    return entry.manifest


def _names(entries: Sequence[Entry]) -> list[str]:
    return [entry.name for entry in entries]


# ---- reading -----------------------------------------------------------------------------------------------


def _check(vault: Vault, name: str) -> Entry | None:
    """A checkpoint after all of it was read; None if the run removed it meanwhile."""
    checked = vault.verify(name)
    return checked if checked.good or vault.storage.files(name) else None


def _tensors(packed: tree.Packed) -> list[dict[str, Any]]:
    """Every tensor with its place in the tree; of a sharded one, the whole."""
    index = {id(tensor): number for number, tensor in enumerate(packed.tensors)}
    rows = []
    for path, tensor in _leaves(tree.unpack(packed), ()):
        piece = packed.pieces.get(index[id(tensor)])
        shape = list(piece.whole if piece else tensor.shape)
        rows.append({"name": ".".join(path), "shape": shape, "dtype": str(tensor.dtype).removeprefix("torch."),
                     "bytes": math.prod(shape) * tensor.element_size(), "sharded": list(piece.placements) if piece
                     else None})
    return rows


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, str(key)))


def _whole_parts(vault: Vault, name: str, manifest: Manifest) -> dict[str, Any]:
    """The model and the optimizer, whatever world they were saved in."""
    saved = assemble([vault.read_shard(name, shard) for shard in manifest.shards], TrainingState())
    parts = saved.get("parts", {}) if isinstance(saved, dict) else {}
    if "model" not in parts:
        raise CheckpointError(f"{name} has no part called model", seen=f"its parts: {', '.join(parts) or 'none'}",
                              hint="load it with CheckpointManager.load, under the names it was saved with")
    return {part: _own(parts[part]) for part in ("model", "optimizer") if part in parts}


def _own(value: Any) -> Any:
    """The same tree with tensors of their own: those that were read share one memory, which a file would repeat."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return type(value)((key, _own(item)) for key, item in value.items())
    return type(value)(_own(item) for item in value) if isinstance(value, list | tuple) else value


class _Clock:
    """Says on stderr what is being read, every two seconds, to somebody who has waited that long."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._name, self._size = total, 0, "", 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftlab-clock", daemon=True)

    def __enter__(self) -> _Clock:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def during(self, name: str, size: int) -> str:
        """A checkpoint is read next; its name."""
        self._done, self._name, self._size = self._done + self._size, name, size
        return name

    def _run(self) -> None:
        begin = time.monotonic()
        while not self._over.wait(_PATIENCE_S):
            sys.stderr.write(f"reading {self._name} ({_human(self._size)}); {_human(self._done)} of "
                             f"{_human(self._total)} read before it, {time.monotonic() - begin:.0f} s\n")
            sys.stderr.flush()


# ---- asking and answering ----------------------------------------------------------------------------------


def _agreed(chosen: Sequence[Entry]) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("nobody is here to be asked: stdin is no terminal", hint="--yes removes without asking")
    listed = "\n".join(f"  {entry.name}  {entry.status}" for entry in chosen)
    sys.stderr.write(f"{listed}\nremove {'it' if len(chosen) == 1 else f'these {len(chosen)}'} for good? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _row(vault: Vault, entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    return {"step": entry.step, "name": entry.name, "status": entry.status, "reason": entry.reason,
            "bytes": _size(vault, entry), "shards": manifest.world if manifest else None,
            "epoch": manifest.epoch if manifest else None, "metrics": _plain(manifest.metrics) if manifest else {},
            "created": manifest.created if manifest else None,
            "age_s": round(max(0.0, time.time() - manifest.created), 1) if manifest else None}


def _size(vault: Vault, entry: Entry) -> int:
    return entry.manifest.size if entry.manifest else sum(vault.storage.files(entry.name).values())


def _plain(value: Any) -> Any:
    """What JSON has a word for: no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("step", lambda row: str(row["step"])),
    ("name", lambda row: str(row["name"])),
    ("size", lambda row: _human(row["bytes"])),
    ("shards", lambda row: _or_dash(row["shards"])),
    ("epoch", lambda row: _or_dash(row["epoch"])),
    ("metrics", lambda row: _metrics(row["metrics"])),
    ("age", lambda row: _age(row["age_s"])),
    ("status", lambda row: f"{row['status']}: {row['reason']}" if row["reason"] else str(row["status"])),
)


def _listing(rows: Sequence[dict[str, Any]]) -> str:
    return _table([[title for title, _ in _COLUMNS], *([cell(row) for _, cell in _COLUMNS] for row in rows)])


def _description(name: str, manifest: Manifest, tensors: Sequence[dict[str, Any]]) -> str:
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created))
    head = [f"{name}: step {manifest.step}, epoch {_or_dash(manifest.epoch)}, {_human(manifest.size)}, saved {made} by "
            f"{manifest.writer} (format {manifest.format})", f"metrics: {_metrics(manifest.metrics)}", ""]
    shards = [["shard", "rank", "bytes", "xxh3-128"],
              *([shard.file, str(shard.rank), str(shard.bytes), shard.digest] for shard in manifest.shards)]
    rows = [["tensor", "shape", "dtype", "bytes"],
            *([row["name"], _shape(row), row["dtype"], str(row["bytes"])] for row in tensors)]
    return "\n".join([*head, _table(shards), "", _table(rows)])


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)


def _shape(row: dict[str, Any]) -> str:
    return "x".join(map(str, row["shape"])) + (f" ({','.join(row['sharded'])})" if row["sharded"] else "") or "-"


def _metrics(metrics: Mapping[str, float | None]) -> str:
    return " ".join(f"{name}={'nan' if value is None else f'{value:.4g}'}" for name, value in metrics.items()) or "-"


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def _human(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.0f} {unit}"
    return f"{seconds:.0f} s"


def _answer(arguments: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    sys.stdout.write((json.dumps(data) if arguments.json else text) + "\n")
