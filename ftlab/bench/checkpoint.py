"""How fast is a save, and how fast a load? Ours beside torch's own ways, and beside what the machine can do at best.

All methods save the same state to the same disk in one run, in an order drawn by lot for each repeat, so that noise and
what the one before left behind hit all alike. Before each figure `os.sync` clears away what earlier ones left in the
page cache. A figure is the median of the repeats after two that warm up. Loads read from a warm page cache, each way of
loading in a process of its own.
"""

from __future__ import annotations

import gc
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from os import sync
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from ftlab.bench.checkpoint_loads import time_loads
from ftlab.bench.checkpoint_methods import (
    DcpAsyncSave,
    DcpSave,
    Limits,
    Method,
    Ours,
    TorchSave,
    Workload,
    dcp_process_ended,
    one_process_group,
    remove,
)
from ftlab.bench.checkpoint_training import bench_training
from ftlab.errors import ConfigError
from ftlab.validation import check_least

Say = Callable[[str], None]
Figures = dict[str, dict[str, list[float]]]  # method -> figure -> one value per repeat
_WARM = 2  # rounds that do not count: whoever copies into two buffers in turn has then touched both
_SETTLE = 600e6  # bytes a second: the disk is still busy with the blocks of the file that was just removed
_REPEATS = 5


def bench_checkpoint(sizes_mb: Sequence[float] = (12, 120, 1200), repeats: int = 0, pairs: int = 20,
                     directory: str = "", say: Say = lambda text: None) -> dict[str, Any]:
    """Figures per size and method, and what saving costs a training loop; all files are gone afterwards."""
    check_least("repeats", repeats, 0)
    check_least("blocks", pairs, 0)
    _check_room(max(sizes_mb), Path(directory or "."))
    with tempfile.TemporaryDirectory(prefix=".ftlab-bench-", dir=directory or ".", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with one_process_group(folder), dcp_process_ended():
            rows = [_bench_size(size, repeats or _REPEATS, folder, say) for size in sizes_mb]
        training = bench_training(folder / "training", 120, pairs, say) if pairs else None
        file_system = _file_system(folder)
    return {"bench": "checkpoint", "file_system": file_system, "sizes": rows, "training": training}


def checkpoint_table(result: dict[str, Any]) -> str:
    """The bench for a terminal."""
    lines = [line for row in result["sizes"] for line in [*_size_lines(row), ""]]
    training = result["training"]
    if training:
        lines += [f"training, {training['size_mb']:g} MB saved every {training['every_steps']} steps of "
                  f"{training['step_s'] * 1000:g} ms: {training['overall_share']:+.1%} in all; steps during a save "
                  f"{training['during_save_share']:+.1%} (a save takes {training['save_s']:.2f} s); "
                  f"meanwhile other processes took {training['others_cores']:.1f} cores"]
    if result["file_system"] == "tmpfs":
        lines.append("the files were on tmpfs, so nothing here says anything about a disk: choose another --dir")
    return "\n".join(lines).rstrip()


# ---- measuring ---------------------------------------------------------------------------------------------


def _bench_size(size_mb: float, repeats: int, folder: Path, say: Say) -> dict[str, Any]:
    load = Workload.of(size_mb)
    found: Figures = {}
    with ExitStack() as stack:
        methods: list[Method] = [
            TorchSave(load, fsync=False), TorchSave(load, fsync=True), DcpSave(load), DcpAsyncSave(load, process=False),
            DcpAsyncSave(load, process=True), Ours(load, folder / f"ours-{size_mb:g}")]
        for method in methods:
            stack.callback(method.close)
            found[method.name] = {}  # in this order
        limits, lots = Limits(load), random.Random(1)
        for repeat in range(1 - _WARM, repeats + 1):
            say(f"{size_mb:g} MB: {repeat}/{repeats}" if repeat > 0 else f"{size_mb:g} MB: warming up")
            figures: Figures = {}
            turns: list[Method | None] = [None, *methods]
            lots.shuffle(turns)
            for turn in turns:
                path = folder / f"{repeat}-{'limits' if turn is None else methods.index(turn)}"
                _measure(turn, limits, path, figures)
            if repeat > 0:
                _collect(found, figures)
        _measure_loads(methods, size_mb, folder, found, say)
        durable = {method.name: method.durable for method in methods}
    gc.collect()  # the memory of one size is not needed for the next
    return _summary(size_mb, load.bytes, repeats, durable, found)


def _measure(method: Method | None, limits: Limits, path: Path, figures: Figures) -> None:
    """One turn of one method, or of the limits."""
    sync()
    time.sleep(limits.bytes / _SETTLE)
    if method is None:
        begin = time.perf_counter()
        limits.memcpy()
        copied = time.perf_counter()
        limits.write(path)
        figures["limits"] = {"memcpy_s": [copied - begin], "raw_write_s": [time.perf_counter() - copied]}
    else:
        figures[method.name] = _measure_save(method, path)
    remove(method, path)


def _measure_save(method: Method, path: Path) -> dict[str, list[float]]:
    cpu, begin = time.process_time(), time.perf_counter()
    finish = method.save(path)
    blocking = time.perf_counter() - begin
    finish()
    durable = time.perf_counter() - begin
    return {"blocking_s": [blocking], "durable_s": [durable], "loop_cpu_s": [time.process_time() - cpu]}


def _measure_loads(methods: Sequence[Method], size_mb: float, folder: Path, found: Figures, say: Say) -> None:
    """Each kind of file once: those that write the same are read the same."""
    read: dict[type, dict[str, list[float]]] = {}
    for method in methods:
        kind = next((known for known in read if isinstance(method, known)), type(method))
        if kind not in read:
            say(f"{size_mb:g} MB: loading what {method.name} saved")
            path = folder / "kept"
            method.save(path)()
            sync()
            read[kind] = time_loads(method, size_mb, path, folder / f"ours-{size_mb:g}")
            remove(method, path)
        found[method.name].update(read[kind])


def _collect(found: Figures, figures: Figures) -> None:
    for name, values in figures.items():
        for figure, value in values.items():
            found.setdefault(name, {}).setdefault(figure, []).extend(value)


def _summary(size_mb: float, size: int, repeats: int, durable: dict[str, bool], found: Figures) -> dict[str, Any]:
    medians = {name: {figure: round(median(values), 5) for figure, values in figures.items()}
               for name, figures in found.items()}
    limits = medians.pop("limits")
    for name, figures in medians.items():
        if not durable[name]:
            figures["durable_s"] = None  # type: ignore[assignment]  # nobody knows when it will be
    ours, torchs = medians[Ours.name], medians["torch.save + fsync"]
    ratios = {"blocking_to_memcpy": ours["blocking_s"] / limits["memcpy_s"],
              "durable_to_raw_write": ours["durable_s"] / limits["raw_write_s"],
              "load_to_torch_load": ours["load_s"] / torchs["load_s"],
              "load_to_torch_load_live": ours["load_s"] / torchs["load_live_s"]}
    samples = {name: {figure: [round(value, 5) for value in values] for figure, values in figures.items()}
               for name, figures in found.items()}
    return {"size_mb": size_mb, "bytes": size, "repeats": repeats, "limits": limits, "methods": medians,
            "ratios": {name: round(value, 3) for name, value in ratios.items()}, "samples": samples}


# ---- the surroundings --------------------------------------------------------------------------------------


def _check_room(size_mb: float, folder: Path) -> None:
    """Raise ConfigError if the largest state does not fit, rather than fill the machine."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", hint="--dir names a folder on the disk to be measured")
    disk, memory = shutil.disk_usage(folder).free, psutil.virtual_memory().available
    if disk < 4 * size_mb * 1e6:
        raise ConfigError(f"{size_mb:g} MB need {4 * size_mb:g} MB of {folder}", seen=f"{disk / 1e6:.0f} MB are free")
    if memory < 9 * size_mb * 1e6:  # the state, and up to two copies of it for each method that keeps some
        raise ConfigError(f"{size_mb:g} MB need {9 * size_mb:g} MB of memory", seen=f"{memory / 1e6:.0f} MB are free",
                          hint="smaller --size-mb")


def _file_system(folder: Path) -> str:
    inside = [mount for mount in psutil.disk_partitions(all=True) if folder.absolute().is_relative_to(mount.mountpoint)]
    return max(inside, key=lambda mount: len(mount.mountpoint)).fstype if inside else "unknown"


# ---- the table ---------------------------------------------------------------------------------------------


def _size_lines(row: dict[str, Any]) -> list[str]:
    limits, ratios = row["limits"], row["ratios"]
    head = f"{row['size_mb']:g} MB, medians of {row['repeats']}"
    return [
        f"{head:<28}{'blocking s':>12}{'durable s':>12}{'load s':>12}{'cpu s':>12}",
        *(f"{name:<28}{_cell(each['blocking_s'])}{_cell(each['durable_s'])}{_cell(each['load_s'])}"
          f"{_cell(each['loop_cpu_s'])}" for name, each in row["methods"].items()),
        f"{'limit: memcpy, raw write':<28}{_cell(limits['memcpy_s'])}{_cell(limits['raw_write_s'])}",
        f"ftlab: blocking {ratios['blocking_to_memcpy']:.2f} × memcpy, durable {ratios['durable_to_raw_write']:.2f} × "
        f"raw write, load {ratios['load_to_torch_load']:.2f} × torch.load "
        f"({ratios['load_to_torch_load_live']:.2f} × with load_state_dict)"]


def _cell(seconds: float | None) -> str:
    return f"{'not synced':>12}" if seconds is None else f"{seconds:>12.4f}"
