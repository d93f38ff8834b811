"""What children of the stage do with a student's checkpoint manager: save, load, break, resume. All of it returns JSON.

The training here is small and has all that a checkpoint must carry: an optimizer with memory (AdamW), dropout that
draws from torch's random numbers, noise from Python's, a learning rate that falls, and shuffled data.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftlab.grading.stage.canonical import digest

NAME = "checkpoint_epoch_{}.pt"
_SAMPLES, _WIDTH = 24, 6


def make(seed: int, width: int = _WIDTH) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, the same for the same seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and targets."""
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(_SAMPLES, _WIDTH, generator=generator)
    return x, x.sum(1, keepdim=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    """One step of training; its loss."""
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def epochs(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int) -> None:
    """A few epochs, with random numbers that depend on the seed alone."""
    x, y = data(seed)
    torch.manual_seed(seed + 2)
    for _ in range(count):
        step(model, optimizer, x, y)


# ---- task 1: save and load ---------------------------------------------------------------------------------


def save_epochs(part: Any, folder: str, seed: int, numbers: list[int], keep: int = 100) -> dict[str, Any]:
    """Train and save at each of these epochs; what the weights were then, and where they would go from there."""
    model, optimizer = make(seed)
    manager = part(folder, keep_last_n=keep)
    seen: dict[str, Any] = {}
    for number in numbers:
        epochs(model, optimizer, 1, seed + number)
        manager.save_checkpoint(model, optimizer, number, {"loss": number / 8})
        seen[str(number)] = digest(model.state_dict())
    epochs(model, optimizer, 2, seed + 1000)
    return {"weights": seen, "later": digest(model.state_dict()), "files": files(folder)}


def load(part: Any, folder: str, seed: int, path: str = "") -> dict[str, Any]:
    """Load into another model, as a new process would, and train two more epochs."""
    model, optimizer = make(seed + 77)
    before = digest(model.state_dict())
    found = part(folder).load_checkpoint(model, optimizer, *([Path(path)] if path else []))
    told = dict(found) if isinstance(found, dict) else {"epoch": repr(found)}
    loaded = digest(model.state_dict())
    epochs(model, optimizer, 2, seed + 1000)
    return {"none": found is None, "epoch": told.get("epoch"), "metrics": told.get("metrics"), "weights": loaded,
            "untouched": loaded == before, "later": digest(model.state_dict())}


def files(folder: str) -> list[str]:
    """The names of all files in a folder."""
    return sorted(each.name for each in Path(folder).iterdir())


# ---- task 2: a machine that dies ---------------------------------------------------------------------------


def save_one(part: Any, folder: Path, seed: int, epoch: int, keep: int = 100, width: int = _WIDTH) -> None:
    """Save one epoch: what the crash harness runs as `prepare` and `save`."""
    model, optimizer = make(seed + epoch, width)
    part(folder, keep_last_n=keep).save_checkpoint(model, optimizer, epoch, {"loss": 0.5})


def save_again(part: Any, folder: Path, seed: int, epoch: int) -> None:
    """Save an epoch that has been saved before: its file is replaced."""
    save_one(part, folder, seed + 1, epoch)


def load_one(part: Any, folder: Path, seed: int, width: int = _WIDTH) -> list[Any]:
    """Load the newest: what the crash harness runs as `load`."""
    model, optimizer = make(seed + 77, width)
    found = part(folder).load_checkpoint(model, optimizer)
    return [found["epoch"] if isinstance(found, dict) else found, model.state_dict()]


def save_on_full_disk(part: Any, folder: str, seed: int, epoch: int, keep: int = 100) -> dict[str, Any]:
    """Save where no file may grow past one kilobyte; what it raised, and what was seen of its progress."""
    model, optimizer = make(seed + epoch, 512)
    manager = part(folder, keep_last_n=keep)
    with full_disk():
        try:
            manager.save_checkpoint(model, optimizer, epoch, {"loss": 0.5})
        except Exception as error:
            return {"raised": f"{type(error).__name__}: {error}"[:300]}
    return {"raised": ""}


@contextlib.contextmanager
def full_disk(limit: int = 1024) -> Iterator[None]:
    """No file may grow past `limit` bytes: writing fails half way, with an OSError, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def watch_calls(part: Any, folder: str, seed: int, epoch: int) -> list[list[str]]:
    """Save while os.fsync, os.replace and os.rename are watched: [call, path] in order. Where saves cannot be traced
    (macOS) this is all there is: it sees calls of this process through the module `os`, not what the disk does."""
    seen: list[list[str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "rename")}

    def fsync(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        kind = "folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file"
        seen.append(["fsync", kind])
        real["fsync"](number)

    def move(name: str) -> Any:
        def moved(source: Any, target: Any, **more: Any) -> None:
            seen.append(["move", str(target)])
            real[name](source, target, **more)
        return moved

    os.fsync, os.replace, os.rename = fsync, move("replace"), move("rename")  # type: ignore[assignment]
    try:
        save_one(part, Path(folder), seed, epoch)
    finally:
        os.fsync, os.replace, os.rename = real["fsync"], real["replace"], real["rename"]
    return seen


# ---- task 3: damage and retention --------------------------------------------------------------------------


def damage(folder: str, seed: int, numbers: list[int], how: str) -> None:
    """Damage the files of these epochs: "flip" one bit of a weight, or "cut" the file in half."""
    for number in numbers:
        path = Path(folder) / NAME.format(number)
        raw = bytearray(path.read_bytes())
        if how == "cut":
            del raw[len(raw) // 2:]
        else:
            raw[_where_weights_are(bytes(raw))] ^= 0x10
        path.write_bytes(raw)


def _where_weights_are(raw: bytes) -> int:
    """A place inside of a tensor's bytes: torch's archive says where a tensor begins; the middle if this is none."""
    for number in range(8):
        found = raw.find(f"data/{number}FB".encode())
        if found >= 0:
            return min(len(raw) - 1, (found + 64) // 64 * 64 + 70)
    return len(raw) // 2


def clean(part: Any, folder: str, keep: int) -> list[str]:
    """Have a new manager clean up; the names of what is left."""
    part(folder, keep_last_n=keep).cleanup_old_checkpoints()
    return files(folder)


# ---- task 4: resume in mid-epoch ---------------------------------------------------------------------------


def train(part: Any, batches: Any, folder: str, seed: int, total: int, every: int = 0,
          stop: int = 0, resume: bool = False) -> dict[str, Any]:
    """Train up to step `total` (over epochs), saving every few steps; die after step `stop`, or resume from a save.

    Returns, for each step that was done here, the samples, the rate and the random numbers it used, and the weights
    at the end.
    """
    model, optimizer = make(seed if not resume else seed + 77)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    source = batches(_SAMPLES, 4, seed)
    manager = part(folder, keep_last_n=2)
    manager.protect(scheduler=scheduler, data=source)
    x, y = data(seed)
    done, rows = 0, []
    if resume:
        found = manager.load_checkpoint(model, optimizer)
        done = int(found["metrics"]["steps"])
    while done < (stop or total):
        ids = next(source)
        noise, rate = random.random(), optimizer.param_groups[0]["lr"]
        step(model, optimizer, x[ids] + 0.01 * noise, y[ids])
        scheduler.step()
        done += 1
        rows.append({"step": done, "ids": [int(each) for each in ids], "rate": rate, "python": noise,
                     "torch": digest(torch.get_rng_state())})
        if every and done % every == 0:
            epoch = (done - 1) * 4 // _SAMPLES
            manager.save_checkpoint(model, optimizer, epoch, {"steps": done})
    return {"rows": rows, "weights": digest(model.state_dict())}
