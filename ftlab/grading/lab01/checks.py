"""The judges of lab 01. Each runs scenes with the student's manager in children, and judges what they tell.

A task is judged on what it is about: a manager without fsync loses marks in task 2, not in all that follow, as far as
the two can be told apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ftlab.grading.lab01 import groups, scenes
from ftlab.grading.lab01.crashes import judge_cleaning, judge_crashes, judge_full_disk
from ftlab.grading.lab01.trial import EMPTY, Trial
from ftlab.grading.lab01.truth import Truth, draw, ours
from ftlab.grading.stage import Outcome, Play, current_stage

_LITTLE = 0.2  # the weight of what a class inherits for nothing

# ---- task 1: save and load ---------------------------------------------------------------------------------


def task1(part: Any, *, points: float = 3.0, numbers: Sequence[int] = (8, 9, 10), only: str = "") -> float:
    """`part(folder)` saves and loads: weights, optimizer, epoch and metrics; the newest, or the one at a path."""
    trial = Trial("lab01_task1", points, part, only=only)
    if any(trial.wants(key) for key in ("empty", "weights", "optimizer", "metrics", "newest", "path")):
        _save_and_load(trial, list(numbers))
    return trial.finish()


def _save_and_load(trial: Trial, numbers: list[int]) -> None:
    folder, newest, oldest, truth = trial.folder(), numbers[-1], numbers[0], Truth(*numbers)
    saved = trial.save(truth, folder)
    loaded = trial.play(scenes.load, folder=folder, salt=truth.salt, path=f"{folder}/{scenes.NAME.format(newest)}")
    latest = trial.play(scenes.load, folder=folder, salt=truth.salt)
    earlier = trial.play(scenes.load, folder=folder, salt=truth.salt, path=f"{folder}/{scenes.NAME.format(oldest)}")
    nothing = trial.play(scenes.load, folder=trial.folder(), salt=truth.salt)
    trial.cost["files"] = len(names_in(folder))

    def is_state(epoch: int) -> Callable[..., str]:
        return lambda _, now: "" if now["weights"] == truth.weights(epoch) else truth.name(now["weights"])

    if trial.wants("weights"):
        trial.judge("weights", "another process loads the weights, bit by bit", [saved, loaded], is_state(newest),
                    expected="the weights that were saved", look="state_of and put_back: model.state_dict()")
    if trial.wants("optimizer"):
        trial.judge("optimizer", "two more epochs after loading end where they would have ended", [saved, loaded],
                    lambda _, now: "" if now["later"] == truth.later(newest) else "the training goes another way",
                    expected="the same weights as without the stop",
                    look="does the optimizer's state_dict (the moments of AdamW) travel too?")
    if trial.wants("metrics"):
        right = (newest, {"loss": truth.losses[str(newest)]})
        trial.judge("metrics", "epoch and metrics come back", [saved, loaded],
                    lambda _, now: "" if _told(now) == right else f"{_told(now)}",
                    expected=f"{{'epoch': {newest}, 'metrics': {right[1]}}}", look="what does load_checkpoint return?")
    if trial.wants("newest"):
        trial.judge("newest", "without a path the newest is loaded, by number and not by name", [saved, latest],
                    is_state(newest), expected=f"epoch {newest}",
                    look="checkpoints(): as text '10' comes before '9'; sort by number")
    if trial.wants("path"):
        trial.judge("path", "with a path that one is loaded", [saved, earlier], is_state(oldest),
                    expected=f"epoch {oldest}", look="checkpoint_path in load_checkpoint")
    if trial.wants("empty"):
        trial.judge("empty", "an empty folder: there is nothing to load, a full one gives its newest",
                    [saved, latest, nothing], lambda _, full, found:
                    (f"epoch {found['epoch']}" if not found["none"] or found["weights"] != truth.weights("") else
                     "nothing is loaded from a full one either" if full["none"] else ""),
                    expected="load_checkpoint returns None and leaves the model as it is",
                    look="what does load_checkpoint do when checkpoints() is empty?")


def names_in(folder: str) -> list[str]:
    """The names of all files in a folder, as the judge sees them."""
    return sorted(os.listdir(folder))


def _told(found: dict[str, Any]) -> tuple[Any, Any]:
    return found["epoch"], found["metrics"]


# ---- task 2: a machine that dies ---------------------------------------------------------------------------


def task2(part: Any, *, points: float = 4.0, epochs: Sequence[int] = (3, 4), images: int = 150,
          only: str = "") -> float:
    """A save survives the death of the machine at any moment; `epochs` are the one before and the one that is saved."""
    trial = Trial("lab01_task2", points, part, only=only)
    before, after = epochs
    if trial.wants("plain"):
        _judge_plain(trial, "plain", "nothing breaks: what was saved is loaded", before,
                     look="write: is the file under its final name at the end?", weight=_LITTLE)
    if trial.wants("during") or trial.wants("after"):
        judge_crashes(trial, before, after, images)
    if trial.wants("full"):
        judge_full_disk(trial, before, after, keep=100)
    return trial.finish()


def _judge_plain(trial: Trial, key: str, scenario: str, epoch: int, look: str, weight: float) -> None:
    folder, truth = trial.folder(), Truth(epoch)
    saved = trial.save(truth, folder)
    trial.judge(key, scenario, [saved, trial.play(scenes.load, folder=folder, salt=truth.salt)],
                lambda _, now: "" if now["weights"] == truth.weights(epoch) else truth.name(now["weights"]),
                expected="the weights that were saved", look=look, weight=weight)


# ---- task 3: damage and retention --------------------------------------------------------------------------


def task3(part: Any, *, points: float = 3.5, numbers: Sequence[int] = (3, 4, 5, 6, 7), keep: int = 3,
          images: int = 100, only: str = "") -> float:
    """Damage is noticed and the one before is used; the newest good ones are kept, and never the last one deleted."""
    trial = Trial("lab01_task3", points, part, only=only)
    for how, words in (("flip", "one bit of the newest file is flipped"), ("cut", "the newest file is cut in half")):
        if trial.wants(how):
            _damaged(trial, list(numbers[:3]), how, words)
    if trial.wants("all"):
        _all_damaged(trial, list(numbers[:2]))
    deletes = not trial.absent and any(trial.wants(key) for key in ("count", "full", "crash")) and \
        _count(trial, list(numbers), keep)
    if trial.wants("good"):
        _last_good(trial, list(numbers[:4]))
    if trial.wants("full"):
        judge_full_disk(trial, numbers[0], numbers[1], keep=1, needless="" if deletes else _KEEPS_ALL)
    if trial.wants("crash"):
        judge_cleaning(trial, numbers[0], numbers[1], images, needless="" if deletes else _KEEPS_ALL)
    return trial.finish()


_KEEPS_ALL = "nothing is ever deleted, so nothing could be deleted too early"


def _damaged(trial: Trial, numbers: list[int], how: str, words: str) -> None:
    folder, wanted, truth = trial.folder(), numbers[-2], Truth(*numbers)
    saved = trial.save(truth, folder)
    hurt = trial.play(scenes.damage, own=False, folder=folder, numbers=numbers[-1:], how=how)
    trial.judge(how, f"{words}: the one before is loaded",
                [saved, hurt, trial.play(scenes.load, folder=folder, salt=truth.salt)],
                lambda _, __, now: "" if now["weights"] == truth.weights(wanted) else
                f"epoch {now['epoch']}, {'as if nothing were wrong' if not now['none'] else 'and nothing is loaded'}",
                expected=f"epoch {wanted}, whole",
                look="decode: compare the digest; load_checkpoint: try the next older one")


def _all_damaged(trial: Trial, numbers: list[int]) -> None:
    folder, truth = trial.folder(), Truth(*numbers)
    saved = trial.save(truth, folder)
    whole = trial.play(scenes.load, folder=folder, salt=truth.salt)
    hurt = trial.play(scenes.damage, own=False, folder=folder, numbers=numbers, how="flip")
    found = trial.play(scenes.load, folder=folder, salt=truth.salt)
    silent = Outcome(value="") if found.raised and not found.raised.startswith(("NotImpl", "not tried")) else found
    trial.judge("all", "all files are damaged: load_checkpoint raises, and nobody begins again unsaid",
                [saved, whole, hurt, silent],
                lambda _, before, __, now: "it does not load before they are damaged" if
                before["weights"] != truth.weights(numbers[-1]) else "" if now == "" else
                "it returned " + ("None" if now["none"] else f"epoch {now['epoch']}"),
                expected="an error that says so", look="load_checkpoint: None means an empty folder, not a lost one")


def _count(trial: Trial, numbers: list[int], keep: int) -> bool:
    """Whether old ones are deleted at all; how well counts by itself."""
    folder, truth = trial.folder(), Truth(*numbers)
    saved = trial.save(truth, folder, keep)
    wanted = sorted(scenes.NAME.format(number) for number in numbers[-keep:])
    found = trial.play(scenes.load, folder=folder, salt=truth.salt)
    left = names_in(folder)
    deletes = saved.ok and 0 < len(_checkpoints(left)) < len(numbers)
    if not trial.wants("count"):
        return deletes
    trial.judge("count", "after several saves exactly the newest keep_last_n are left, and load",
                [saved, found],
                lambda _, now: ", ".join(left) or "nothing" if _checkpoints(left) != wanted else
                "" if now["weights"] == truth.weights(numbers[-1]) else truth.name(now["weights"]),
                expected=", ".join(wanted), look="cleanup_old_checkpoints: which ones does your slice remove?")
    return deletes


def _last_good(trial: Trial, numbers: list[int]) -> None:
    folder, wanted, truth = trial.folder(), numbers[1], Truth(*numbers)
    saved = trial.save(truth, folder)
    hurt = trial.play(scenes.damage, own=False, folder=folder, numbers=numbers[2:], how="flip")
    left = trial.play(scenes.clean, folder=folder, keep=2)
    found = trial.play(scenes.load, folder=folder, salt=truth.salt)
    if left.ok and not found.ok:
        names = ", ".join(names_in(folder)) or "no file"
        found = Outcome(value={"weights": "", "epoch": f"nothing; left: {names}"})
    trial.judge("good", "the newest two of four are damaged, keep_last_n=2: the good ones are kept",
                [saved, hurt, left, found],
                lambda _, __, ___, now: "" if now["weights"] == truth.weights(wanted) else f"epoch {now['epoch']}",
                expected=f"epoch {wanted} can still be loaded", look="cleanup_old_checkpoints: count good ones only")


def _checkpoints(files: list[str]) -> list[str]:
    return [each for each in files if each.startswith("checkpoint_epoch_") and each.endswith(".pt")]


# ---- task 4: resume in mid-epoch ---------------------------------------------------------------------------


def task4(part: Any, batches: Any, *, points: float = 5.0, seed: int = 41, total: int = 14, every: int = 4,
          stop: int = 10, only: str = "") -> float:
    """Training that stops in mid-epoch and resumes in another process goes on as if it had never stopped."""
    trial = Trial("lab01_task4", points, part, batches, only=only)
    if trial.absent:
        return trial.finish()
    folder, saved, start = trial.folder(), stop // every * every, ours(scenes.begin, secret=draw())
    stopped = trial.play(scenes.train, folder=folder, seed=seed, total=stop, every=every, start=start)
    later: dict[str, Any] = {"seed": seed, "total": total, "salt": draw(), "after": saved, "shift": draw() / 2**32}
    resumed = trial.play(scenes.train, folder=folder, **later)
    whole = Outcome(value=ours(scenes.whole_run, start=start, **later))
    trial.cost |= {"steps_redone": stop - saved, "restarts": 1}
    for key, scenario, look in _ASPECTS:
        if trial.wants(key):
            trial.judge(key, scenario, [whole, stopped, resumed], _compare(key, saved),
                        expected="the same as without the stop", look=look)
    if trial.wants("bits"):
        trial.judge("bits", "the run that was stopped ends in the same bits", [whole, stopped, resumed],
                    lambda one, _, two: "" if one["weights"] == two["weights"] else "other weights",
                    expected="the same weights", look="what else does a step depend on? first mend what fails above")
    return trial.finish()


_ASPECTS = [
    ("ids", "the data goes on where it stopped: no sample twice, none left out",
     "Batches.state_dict: where in the epoch is it? and is it saved with the rest (self.parts)?"),
    ("rate", "the learning rate goes on where it stopped",
     "the scheduler is one of self.parts: save and load them all"),
    ("torch", "torch's random numbers go on (dropout)", "torch.get_rng_state, torch.set_rng_state"),
    ("python", "Python's random numbers go on (noise on the data)", "random.getstate, random.setstate"),
]


def _compare(aspect: str, saved: int) -> Callable[..., str]:
    def problem(whole: dict[str, Any], _: Any, resumed: dict[str, Any]) -> str:
        wanted = {row["step"]: row[aspect] for row in whole["rows"] if row["step"] > saved}
        got = {row["step"]: row[aspect] for row in resumed["rows"]}
        if sorted(got) != sorted(wanted):
            return f"it resumed at step {min(got, default=0) - 1}, not at {saved}"
        first = next((number for number in sorted(wanted) if got[number] != wanted[number]), None)
        if first is None:
            return ""
        values = f": {got[first]} in place of {wanted[first]}" if aspect != "torch" else ""
        return f"step {first}, the {first - saved}. after the stop, differs{values}"
    return problem


# ---- task 5: a group ---------------------------------------------------------------------------------------

_DEADLINE_S = 2.0  # what a manager whose rank 0 hangs is told to wait
_LONG_S = 600.0  # the same where nobody should have to wait
_PATIENCE_S, _LESS_S = 25.0, 10.0  # for a rank that waits; the same after one has waited in vain


def task5(part: Any, *, points: float = 3.5, world: int = 3, epoch: int = 6, only: str = "") -> float:
    """One rank writes, the others wait for it, and not for ever.

    What a rank is not told, it has to find out: whether rank 0 lives is known to rank 0's process alone. A mishap
    counts only if all is well without one.
    """
    trial = Trial("lab01_task5", points, part, only=only)
    if trial.wants("alone"):
        _judge_plain(trial, "alone", "one process without a group saves and loads as before", epoch,
                     look="dist.is_initialized()", weight=_LITTLE)
    if trial.wants("load"):
        _load_together(trial, world, epoch)
    if trial.absent or only in ("alone", "load"):
        return trial.finish()
    well = _save_together(trial, world, epoch)
    patience = _PATIENCE_S
    for key, scenario, expected, look in _MISHAPS:
        if trial.wants(key):
            said = [] if well else group_saves(trial, world, epoch, mishap=key, patience_s=patience,
                                               timeout_s=_DEADLINE_S if key == "freezes" else _LONG_S)
            got = well and f"without any mishap it fails as well: {well}"
            trial.note(key, scenario, got or _all_raise(said, key), expected=expected, look=look)
            patience = _LESS_S if any(each.late for each in said) else patience
    return trial.finish()


_MISHAPS = [
    ("dies", "rank 0 dies in the middle of its save: the others raise at once", "an error on every other rank, long "
     f"before timeout_s ({_LONG_S:g} s)",
     "hear_rank_0, or another collective, notices a dead peer; a loop that looks for the file does not"),
    ("freezes", "rank 0 hangs in the middle of its save: the others raise after timeout_s",
     "an error on every other rank, soon after timeout_s", "hear_rank_0(value, self.timeout_s)"),
    ("full", "rank 0's disk is full: no rank believes that the epoch is saved", "an error on every rank",
     "rank 0 must not go on as if it had saved: how do the others learn of it?"),
]


def group_saves(trial: Trial, world: int, epoch: int, *, mishap: str = "", timeout_s: float, patience_s: float,
                folder: str = "", state: str = "", salt: int = 0) -> list[Outcome]:
    """All ranks save one epoch, each in a child of its own; only rank 0's is told of the mishap."""
    store, place = trial.folder(), folder or trial.folder()
    state = state or Truth(epoch).states[str(epoch)]
    plays = [Play.of(groups.save_as_rank, *trial.parts, folder=place, store=store, rank=rank, world=world, epoch=epoch,
                     state=state if rank == 0 else "", timeout_s=timeout_s, salt=salt if rank else 0,
                     **({"mishap": mishap} if rank == 0 else {"alone": not mishap})) for rank in range(world)]
    return current_stage().run_group(plays, patience_s, lost=0 if mishap in ("dies", "freezes") else -1)


def _save_together(trial: Trial, world: int, epoch: int) -> str:
    """A save without mishap; the epoch was saved before, so that its file alone tells nothing."""
    folder, truth, salt = trial.folder(), Truth(epoch), draw()
    first = trial.save(Truth(epoch), folder)
    said = group_saves(trial, world, epoch, folder=folder, state=truth.states[str(epoch)], salt=salt,
                       timeout_s=_PATIENCE_S, patience_s=_PATIENCE_S)
    found = trial.play(scenes.load, folder=folder, salt=truth.salt)
    writer = first.trouble() or _first_trouble(said) or found.trouble()
    if not writer:
        loaded = _said(found).get("weights")
        writer = "" if loaded == truth.weights(epoch) else "the file does not hold what rank 0 was to save"
    if trial.wants("writer"):
        trial.note("writer", "all ranks save, of which only rank 0 can write: all return", writer,
                   expected="one file, written by rank 0", look="save_checkpoint: only rank 0 writes and cleans up")
    if trial.wants("wait"):
        trial.note("wait", "no rank returns before the new checkpoint is there (rank 0's storage is slow)",
                   writer or _first_early(said, f"{folder}/{scenes.NAME.format(epoch)}", salt),
                   expected="the new file is there when save_checkpoint returns",
                   look="the others wait for rank 0 after it has written")
    return writer


def _load_together(trial: Trial, world: int, epoch: int) -> None:
    folder, store, truth = trial.folder(), trial.folder(), Truth(epoch)
    saved = trial.save(truth, folder)
    plays = [Play.of(groups.load_as_rank, *trial.parts, folder=folder, store=store, rank=rank, world=world,
                     salt=truth.salt, timeout_s=_PATIENCE_S) for rank in range(world)]
    rows = current_stage().run_group(plays, _PATIENCE_S) if saved.ok else [saved]
    trial.note("load", "all ranks load the same epoch and the same weights", _different(rows, epoch, truth),
               expected=f"epoch {epoch} on all ranks", look="load_checkpoint: every rank loads", weight=_LITTLE)


def _first_trouble(rows: list[Outcome]) -> str:
    """What kept a rank from saving, and returning."""
    for rank, row in enumerate(rows):
        if row.late:
            return f"rank {rank} does not return"
        said = _said(row)
        if said.get("saved") is not True:
            return f"rank {rank}: {row.trouble() or said.get('raised') or 'no answer'}"
    return ""


def _first_early(rows: list[Outcome], file: str, salt: int) -> str:
    """Ranks that did not see the file that is there in the end."""
    there = groups.salted_file(file, salt)
    early = [str(rank) for rank, row in enumerate(rows) if rank and _said(row).get("file") != there]
    return f"on rank {', '.join(early)} it was not" if early else ""


def _all_raise(rows: list[Outcome], mishap: str) -> str:
    concerned = rows if mishap == "full" else rows[1:]
    for rank, row in enumerate(concerned, len(rows) - len(concerned)):
        if row.late:
            return f"rank {rank} waits for ever" + (f" (timeout_s was {_DEADLINE_S:g})" if mishap == "freezes" else "")
        said = _said(row)
        raised = row.raised or str(said.get("raised", ""))
        if raised.startswith("NotImplementedError"):
            return EMPTY
        if said.get("saved") is not False and not raised:
            return f"rank {rank} " + ("returned as if the epoch were saved" if said.get("saved") else row.ended)
    return ""


def _different(rows: list[Outcome], epoch: int, truth: Truth) -> str:
    for rank, row in enumerate(rows):
        if row.late:
            return f"rank {rank} does not return"
        said = _said(row)
        if said.get("epoch") != epoch or said.get("weights") != truth.weights(epoch):
            other = f"epoch {said.get('epoch')}, other weights"
            return f"rank {rank}: {row.trouble() or said.get('raised') or other}"
    return ""


def _said(row: Outcome) -> dict[str, Any]:
    return row.value if row.ok and isinstance(row.value, dict) else {}
