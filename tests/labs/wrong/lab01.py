"""Wrong solutions of lab 01. Each is the reference with one thing changed, and says which scenarios it must fail by the
marks that are left; a comment names them."""

from __future__ import annotations

from pathlib import Path

import nbformat

from tests.labs.wrong import Wrong

_NOTEBOOK = Path(__file__).parents[3] / "solutions" / "lab01" / "checkpointing.ipynb"
_SOURCES = {cell.id: cell.source for cell in nbformat.read(_NOTEBOOK, 4).cells}


def change(cell: str, *swaps: tuple[str, str]) -> dict[str, str]:
    """The reference's cell with some text exchanged; every text must be there."""
    source = _SOURCES[cell]
    for old, new in swaps:
        assert old in source, f"{cell} has no {old!r}: bring tests/labs/wrong/lab01.py up to date"
        source = source.replace(old, new)
    return {cell: source}


_FSYNC = "            file.flush()\n            os.fsync(file.fileno())\n"
_FOLDER_SYNC = """        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
"""
_KEPT = "good[:self.keep_last_n]"
_SAVE_THEN_CLEAN = """        path = super().save_checkpoint(model, optimizer, epoch, metrics)
        self.cleanup_old_checkpoints()
"""
_HEAR = "        hear_rank_0(saved, self.timeout_s)\n"
_POLL = """        import time
        while not self.path_of(epoch).exists():
            time.sleep(0.05)
        saved += 1
"""

WRONG = {
    # ---- task 1
    "forgotten optimizer": Wrong(  # "two more epochs"; and task 4's "same bits"
        cells=change("task1-stub", ('        optimizer.load_state_dict(state["optimizer"])\n', "")),
        points={"task1-check": 2.5, "task1-hidden": 1.25, "task4-check": 3.0, "task4-hidden": 1.5}),
    "epochs sorted as text": Wrong(  # "the newest is loaded"
        cells=change("task1-stub", ("key=lambda path: int(path.stem.rsplit(\"_\", 1)[1])", "key=str")),
        points={"task1-check": 2.5, "task1-hidden": 1.25}),
    "the path is ignored": Wrong(  # "with a path that one is loaded"; and task 3's first two, which build on it
        cells=change("task1-stub", ("        if checkpoint_path is None:\n", "        if True:\n")),
        points={"task1-check": 2.5, "task1-hidden": 1.25, "task3-check": 2.5, "task3-hidden": 1.25}),
    # ---- task 2
    "no fsync": Wrong(  # both crashes
        cells=change("task2-stub", (_FSYNC, "")),
        points={"task2-check": 1.5, "task2-hidden": 0.75}),
    "fsync after the rename": Wrong(  # "during a save"
        cells=change("task2-stub", (_FSYNC, ""), (_FOLDER_SYNC, "        with open(path, 'rb') as file:\n"
                                                  "            os.fsync(file.fileno())\n" + _FOLDER_SYNC)),
        points={"task2-check": 2.75, "task2-hidden": 1.38}),
    "no directory fsync": Wrong(  # "has just returned"
        cells=change("task2-stub", (_FOLDER_SYNC, "")),
        points={"task2-check": 2.75, "task2-hidden": 1.38}),
    "writes in place": Wrong(  # "during a save" and "the disk is full"
        cells=change("task2-stub", ('path.with_name(f".{path.name}.tmp")', "path")),
        points={"task2-check": 1.5, "task2-hidden": 0.75}),
    "load finds the temporary file": Wrong(  # all but the plain save
        cells=change("task2-stub", ('f".{path.name}.tmp"', '"checkpoint_epoch_999.pt"')),
        points={"task2-check": 1.5, "task2-hidden": 0.75}),
    # ---- task 3
    "off-by-one retention": Wrong(  # "exactly the newest 3 are left"
        cells=change("task3-stub", (_KEPT, "good[:self.keep_last_n + 1]")),
        points={"task3-check": 3.0, "task3-hidden": 1.5}),
    "retention before the commit": Wrong(  # "the disk is full" and "while the old file is deleted"
        cells=change("task3-stub", (_SAVE_THEN_CLEAN, """        self.keep_last_n -= 1
        self.cleanup_old_checkpoints()
        self.keep_last_n += 1
        path = super().save_checkpoint(model, optimizer, epoch, metrics)
""")),
        points={"task3-check": 2.5, "task3-hidden": 1.25}),
    "retention counts damaged ones": Wrong(  # "the good ones are kept"
        cells=change("task3-stub", ("        good = [path for path in self.checkpoints() if self.is_good(path)]\n",
                                    "        good = self.checkpoints()\n")),
        points={"task3-check": 3.0, "task3-hidden": 1.5}),
    "swallows a damaged file": Wrong(  # "all files are damaged"
        cells=change("task3-stub", ('            raise ValueError(f"all {len(files)} checkpoints in {self.folder} are '
                                    'damaged")', "            return None")),
        points={"task3-check": 3.0, "task3-hidden": 1.5}),
    "no digest": Wrong(  # "one bit is flipped", "cut in half" (raises another error), "all", "the good ones"
        cells=change("task3-stub", ("if hashlib.sha256(raw[32:]).digest() != raw[:32]:", "if False:")),
        points={"task3-check": 1.5, "task3-hidden": 0.75}),
    # ---- task 4
    "forgotten RNG": Wrong(  # torch's, Python's, "same bits"
        cells=change("task4-stub", ('        torch.set_rng_state(state["random"]["torch"])\n', ""),
                     ('        random.setstate(state["random"]["python"])\n', "")),
        points={"task4-check": 2.0, "task4-hidden": 1.0}),
    "forgotten Python's random numbers": Wrong(  # Python's, "same bits"
        cells=change("task4-stub", ('        random.setstate(state["random"]["python"])\n', "")),
        points={"task4-check": 3.0, "task4-hidden": 1.5}),
    "forgotten sampler state": Wrong(  # the data, "same bits"
        cells=change("task4-stub", ('self.epoch, self.position = state["epoch"], state["position"]',
                                    'self.epoch = state["epoch"]')),
        points={"task4-check": 3.0, "task4-hidden": 1.5}),
    "forgotten scheduler": Wrong(  # the rate, "same bits"
        cells=change("task4-stub", ("            part.load_state_dict(state[\"parts\"][name])\n",
                                    "            if name == 'data':\n"
                                    "                part.load_state_dict(state[\"parts\"][name])\n")),
        points={"task4-check": 3.0, "task4-hidden": 1.5}),
    # ---- task 5
    "all ranks write": Wrong(  # "only rank 0 can write", "no rank returns before"
        cells=change("task5-stub", ("if self.rank == 0:\n            try:", "if True:\n            try:")),
        points={"task5-check": 0.26, "task5-hidden": 0.13}),
    "the others do not wait": Wrong(  # "no rank returns before", and all three mishaps
        cells=change("task5-stub", (_HEAR, "        saved += 1 if self.rank else 0\n")),
        points={"task5-check": 0.91, "task5-hidden": 0.45}),
    "the others wait for ever": Wrong(  # the group's timeout: "hangs"
        cells=change("task5-stub", (_HEAR, "        hear_rank_0(saved, 3600)\n")),
        points={"task5-check": 2.85, "task5-hidden": 1.43}),
    "the others look for the file for ever": Wrong(  # "dies", "hangs", "disk is full"
        cells=change("task5-stub", (_HEAR, _POLL)),
        points={"task5-check": 0.91, "task5-hidden": 0.45}),
    "rank 0 hides its error": Wrong(  # "disk is full"
        cells=change("task5-stub", ("                problem = error\n", "                saved += 1\n")),
        points={"task5-check": 2.85, "task5-hidden": 1.43}),
    "only rank 0 loads": Wrong(  # "all ranks load the same epoch"
        cells=change("task5-stub", ("        if self.rank > 0 and epoch >= 0:\n", "        if False:\n")),
        points={"task5-check": 3.37, "task5-hidden": 1.69}),
}
