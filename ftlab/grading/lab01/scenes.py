"""What children of the stage do with a student's checkpoint manager: save, load, break, resume. All of it returns JSON.

The state that is saved is drawn by the judge, and given as it is to the child that saves. The child that loads gets
nothing from which it follows, but a salt: its answer is a digest of salt and weights, which nobody can say who has not
got the weights out of the folder. `states`, `trained_on` and `whole_run` say what is right; they run in children
without any of the student's code.

The training here is small and has all that a checkpoint must carry: an optimizer with memory (AdamW), dropout that
draws from torch's random numbers, noise from Python's, a learning rate that falls, and shuffled data.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
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
_OTHER = 77  # the model into which a state is loaded begins with this seed


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


# ---- what is right: played without any of the student's code ------------------------------------------------


def states(secret: int, count: int) -> list[list[str]]:
    """States of model and optimizer, no two alike, each as [text, the bytes of its weights]; first that of a model into
    which nothing was loaded."""
    model, optimizer = make(_OTHER)
    found = [["", weights(model).hex()]]
    model, optimizer = make(secret)
    for _ in range(count):
        x = torch.randn(_SAMPLES, _WIDTH)
        step(model, optimizer, x, x.sum(1, keepdim=True))
        found.append([_as_text(model, optimizer), weights(model).hex()])
    return found


def trained_on(state: str, salt: int) -> str:
    """What one answers who has loaded this state, and trained on."""
    model, optimizer = make(_OTHER)
    put_state(state, model, optimizer)
    return _answer(model, optimizer, salt)["later"]


def weights(model: nn.Module) -> bytes:
    """The weights, bit by bit."""
    return b"".join(f"{name} {each.dtype} {tuple(each.shape)} ".encode() + each.detach().contiguous().numpy().tobytes()
                    for name, each in sorted(model.state_dict().items()))


def _as_text(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def put_state(text: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load what `states` gave."""
    found = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])


def _answer(model: nn.Module, optimizer: torch.optim.Optimizer, salt: int) -> dict[str, str]:
    """A digest of the weights, and one of the weights after two more epochs on data that only now can be known."""
    now = salted(model, salt)
    epochs(model, optimizer, 2, salt)
    return {"weights": now, "later": salted(model, salt)}


def salted(model: nn.Module, salt: int) -> str:
    """A digest of weights that cannot be known before the salt."""
    return salted_bytes(weights(model), salt)


def salted_bytes(raw: bytes, salt: int) -> str:
    """A digest of salt and bytes."""
    return hashlib.sha256(f"{salt} ".encode() + raw).hexdigest()


# ---- task 1: save and load ---------------------------------------------------------------------------------


def save_states(part: Any, folder: str, states: dict[str, str], losses: dict[str, float], keep: int = 100) -> None:
    """Save these epochs in their order."""
    model, optimizer = make(_OTHER)
    manager = part(folder, keep_last_n=keep)
    for number, text in states.items():
        put_state(text, model, optimizer)
        manager.save_checkpoint(model, optimizer, int(number), {"loss": losses[number]})


def load(part: Any, folder: str, salt: int, path: str = "") -> dict[str, Any]:
    """Load into another model, as a new process would, and answer."""
    model, optimizer = make(_OTHER)
    found = part(folder).load_checkpoint(model, optimizer, *([Path(path)] if path else []))
    told = dict(found) if isinstance(found, dict) else {"epoch": repr(found)}
    return {"none": found is None, "epoch": told.get("epoch"), "metrics": told.get("metrics"),
            **_answer(model, optimizer, salt)}


def files(folder: str) -> list[str]:
    """The names of all files in a folder."""
    return sorted(each.name for each in Path(folder).iterdir())


# ---- task 2: a machine that dies ---------------------------------------------------------------------------


def save_one(part: Any, folder: Path, state: str, epoch: int, keep: int = 100) -> None:
    """Save one epoch: what the crash harness runs as `prepare` and `save`."""
    model, optimizer = make(_OTHER)
    put_state(state, model, optimizer)
    part(folder, keep_last_n=keep).save_checkpoint(model, optimizer, epoch, {"loss": 0.5})


def load_one(part: Any, folder: Path, salt: int) -> list[Any]:
    """Load the newest: what the crash harness runs as `load`."""
    model, optimizer = make(_OTHER)
    found = part(folder).load_checkpoint(model, optimizer)
    return [found["epoch"] if isinstance(found, dict) else found, salted(model, salt)]


def save_on_full_disk(part: Any, folder: str, epoch: int, keep: int = 100) -> dict[str, Any]:
    """Save where no file may grow past one kilobyte; what it raised, and what was seen of its progress."""
    model, optimizer = make(epoch, 512)
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


def watch_calls(part: Any, folder: str, state: str, epoch: int) -> list[list[str]]:
    """Save while calls that sync and rename are watched: [call, path] in order. Where saves cannot be traced
    (macOS) this is all there is: it sees calls of this process through the module `os`, not what the disk does."""
    seen: list[list[str]] = []
    names = ("fsync", "fdatasync", "replace", "rename", "open")
    real = {name: getattr(os, name) for name in names if hasattr(os, name)}

    def sync(name: str) -> Any:
        def synced(file: Any) -> None:
            number = file if isinstance(file, int) else file.fileno()
            kind = "folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file"
            seen.append(["fsync", kind])
            real[name](number)
        return synced

    def move(name: str) -> Any:
        def moved(source: Any, target: Any, **more: Any) -> None:
            seen.append(["move", str(target)])
            real[name](source, target, **more)
        return moved

    def opened(path: Any, flags: int, *more: Any, **others: Any) -> int:
        if flags & (getattr(os, "O_DSYNC", 0) | getattr(os, "O_SYNC", 0)):
            seen.append(["fsync", "file"])  # each write to it is on disk when it returns
        return int(real["open"](path, flags, *more, **others))

    watched = {"fsync": sync("fsync"), "fdatasync": sync("fdatasync"), "replace": move("replace"),
               "rename": move("rename"), "open": opened}
    for name in real:
        setattr(os, name, watched[name])
    try:
        save_one(part, Path(folder), state, epoch)
    finally:
        for name, function in real.items():
            setattr(os, name, function)
    return seen


# ---- task 3: damage and retention --------------------------------------------------------------------------


def damage(folder: str, numbers: list[int], how: str) -> None:
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


def begin(secret: int) -> str:
    """A model, its optimizer and both kinds of random numbers, as text."""
    model, optimizer = make(secret)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "torch": torch.get_rng_state(),
                "python": random.getstate()}, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def train(part: Any, batches: Any, folder: str, seed: int, total: int, salt: int = 0, start: str = "", every: int = 0,
          after: int = 0, shift: float = 0.0) -> dict[str, Any]:
    """Train up to step `total` (over epochs) from `start`, saving every few steps; without it, resume from a save.

    Data is shifted in steps after `after`, by what is known only to one that resumes. Returns, for each step that was
    done here, the samples, the rate and the random numbers it used, and at the end a digest of salt and weights.
    """
    model, optimizer = make(_OTHER)
    if start:
        _put(start, model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    source = batches(_SAMPLES, 4, seed)
    manager = part(folder, keep_last_n=2)
    manager.protect(scheduler=scheduler, data=source)
    x, y = data(seed)
    done = 0 if start else int(manager.load_checkpoint(model, optimizer)["metrics"]["steps"])
    rows = []
    while done < total:
        row = _train_step(model, optimizer, next(source), x + (shift if done >= after else 0.0), y, salt)
        scheduler.step()
        done += 1
        rows.append({"step": done, **row})
        if every and done % every == 0:
            manager.save_checkpoint(model, optimizer, (done - 1) * 4 // _SAMPLES, {"steps": done})
    return {"rows": rows, "weights": salted(model, salt)}


def whole_run(start: str, seed: int, total: int, salt: int, after: int, shift: float) -> dict[str, Any]:
    """The same training, never stopped, with nobody's code but ours."""
    model, optimizer = make(_OTHER)
    _put(start, model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    x, y = data(seed)
    rows = []
    for done in range(total):
        epoch, position = divmod(done * 4, _SAMPLES)
        order = torch.randperm(_SAMPLES, generator=torch.Generator().manual_seed(seed * 1000 + epoch)).tolist()
        ids = order[position:position + 4]
        row = _train_step(model, optimizer, ids, x + (shift if done >= after else 0.0), y, salt)
        scheduler.step()
        rows.append({"step": done + 1, **row})
    return {"rows": rows, "weights": salted(model, salt)}


def _put(start: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    found = torch.load(io.BytesIO(base64.b64decode(start)), weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    torch.set_rng_state(found["torch"])
    random.setstate(found["python"])


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: list[int], x: torch.Tensor, y: torch.Tensor,
                salt: int) -> dict[str, Any]:
    noise, rate = random.random(), optimizer.param_groups[0]["lr"]
    step(model, optimizer, x[ids] + 0.01 * noise, y[ids])
    return {"ids": [int(each) for each in ids], "rate": rate, "python": noise,
            "torch": digest([salt, torch.get_rng_state()])}
