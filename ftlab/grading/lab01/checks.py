"""The judges of lab 01. Each runs scenes with the student's manager in children, and judges what they tell.

A task is judged on what it is about: a manager without fsync loses marks in task 2, not in all that follow, as far as
the two can be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ftlab.grading.lab01 import groups, scenes
from ftlab.grading.lab01.crashes import judge_cleaning, judge_crashes, judge_full_disk
from ftlab.grading.lab01.trial import EMPTY, Trial
from ftlab.grading.stage import Outcome

# ---- task 1: save and load ---------------------------------------------------------------------------------


def task1(part: Any, *, points: float = 3.0, seed: int = 11, numbers: Sequence[int] = (8, 9, 10),
          only: str = "") -> float:
    """`part(folder)` saves and loads: weights, optimizer, epoch and metrics; the newest, or the one at a path."""
    trial = Trial("lab01_task1", points, part, only=only)
    if trial.wants("empty"):
        _empty_folder(trial, seed)
    if any(trial.wants(key) for key in ("weights", "optimizer", "metrics", "newest", "path")):
        _save_and_load(trial, seed, list(numbers))
    return trial.finish()


def _empty_folder(trial: Trial, seed: int) -> None:
    trial.judge("empty", "an empty folder: there is nothing to load",
                [trial.play(scenes.load, folder=trial.folder(), seed=seed)],
                lambda found: "" if found["none"] and found["untouched"] else f"epoch {found['epoch']}",
                expected="load_checkpoint returns None and leaves the model as it is",
                look="what does load_checkpoint do when checkpoints() is empty?")


def _save_and_load(trial: Trial, seed: int, numbers: list[int]) -> None:
    folder, newest, oldest = trial.folder(), numbers[-1], numbers[0]
    saved = trial.play(scenes.save_epochs, folder=folder, seed=seed, numbers=numbers)
    loaded = trial.play(scenes.load, folder=folder, seed=seed, path=f"{folder}/{scenes.NAME.format(newest)}")
    latest = trial.play(scenes.load, folder=folder, seed=seed)
    earlier = trial.play(scenes.load, folder=folder, seed=seed, path=f"{folder}/{scenes.NAME.format(oldest)}")
    trial.cost["files"] = len(saved.value["files"]) if _has(saved, "files", list) else 0
    if trial.wants("weights"):
        trial.judge("weights", "another process loads the weights, bit by bit", [saved, loaded],
                    lambda was, now: "" if now["weights"] == was["weights"][str(newest)] else "other weights",
                    expected="the weights that were saved", look="state_of and put_back: model.state_dict()")
    if trial.wants("optimizer"):
        trial.judge("optimizer", "two more epochs after loading end where they would have ended", [saved, loaded],
                    lambda was, now: "" if now["later"] == was["later"] else "the training goes another way",
                    expected="the same weights as without the stop",
                    look="does the optimizer's state_dict (the moments of AdamW) travel too?")
    if trial.wants("metrics"):
        trial.judge("metrics", "epoch and metrics come back", [saved, loaded],
                    lambda was, now: "" if _told(now) == (newest, {"loss": newest / 8}) else f"{_told(now)}",
                    expected=f"{{'epoch': {newest}, 'metrics': {{'loss': {newest / 8}}}}}",
                    look="what does load_checkpoint return?")
    if trial.wants("newest"):
        trial.judge("newest", f"without a path the newest is loaded: epoch {newest}, not {numbers[-2]}",
                    [saved, latest],
                    lambda was, now: "" if now["weights"] == was["weights"][str(newest)] else f"epoch {now['epoch']}",
                    expected=f"epoch {newest}", look="checkpoints(): as text '10' comes before '9'; sort by number")
    if trial.wants("path"):
        trial.judge("path", "with a path that one is loaded", [saved, earlier],
                    lambda was, now: "" if now["weights"] == was["weights"][str(oldest)] else f"epoch {now['epoch']}",
                    expected=f"epoch {oldest}", look="checkpoint_path in load_checkpoint")


def _told(found: dict[str, Any]) -> tuple[Any, Any]:
    return found["epoch"], found["metrics"]


# ---- task 2: a machine that dies ---------------------------------------------------------------------------


def task2(part: Any, *, points: float = 4.0, seed: int = 21, epochs: Sequence[int] = (3, 4), images: int = 150,
          only: str = "") -> float:
    """A save survives the death of the machine at any moment; `epochs` are the one before and the one that is saved."""
    trial = Trial("lab01_task2", points, part, only=only)
    before, after = epochs
    if trial.wants("plain"):
        _judge_plain(trial, "plain", "nothing breaks: what was saved is loaded", seed, before,
                     look="write: is the file under its final name at the end?")
    if trial.wants("during") or trial.wants("after"):
        judge_crashes(trial, seed, before, after, images)
    if trial.wants("full"):
        judge_full_disk(trial, seed, before, after, keep=100)
    return trial.finish()


def _judge_plain(trial: Trial, key: str, scenario: str, seed: int, epoch: int, look: str) -> None:
    folder = trial.folder()
    saved = trial.play(scenes.save_epochs, folder=folder, seed=seed, numbers=[epoch])
    trial.judge(key, scenario, [saved, trial.play(scenes.load, folder=folder, seed=seed)],
                lambda was, now: "" if now["weights"] == was["weights"][str(epoch)] else "other weights",
                expected="the weights that were saved", look=look)


# ---- task 3: damage and retention --------------------------------------------------------------------------


def task3(part: Any, *, points: float = 3.5, seed: int = 31, numbers: Sequence[int] = (3, 4, 5, 6, 7), keep: int = 3,
          images: int = 100, only: str = "") -> float:
    """Damage is noticed and the one before is used; the newest good ones are kept, and never the last one deleted."""
    trial = Trial("lab01_task3", points, part, only=only)
    for how, words in (("flip", "one bit of the newest file is flipped"), ("cut", "the newest file is cut in half")):
        if trial.wants(how):
            _damaged(trial, seed, list(numbers[:3]), how, words)
    if trial.wants("all"):
        _all_damaged(trial, seed, list(numbers[:2]))
    if trial.wants("count"):
        _count(trial, seed, list(numbers), keep)
    if trial.wants("good"):
        _last_good(trial, seed, list(numbers[:4]))
    if trial.wants("full"):
        judge_full_disk(trial, seed, numbers[0], numbers[1], keep=1)
    if trial.wants("crash"):
        judge_cleaning(trial, seed, numbers[0], numbers[1], images)
    return trial.finish()


def _damaged(trial: Trial, seed: int, numbers: list[int], how: str, words: str) -> None:
    folder, wanted = trial.folder(), numbers[-2]
    saved = trial.play(scenes.save_epochs, folder=folder, seed=seed, numbers=numbers)
    hurt = trial.play(scenes.damage, own=False, folder=folder, seed=seed, numbers=numbers[-1:], how=how)
    trial.judge(how, f"{words}: the one before is loaded",
                [saved, hurt, trial.play(scenes.load, folder=folder, seed=seed)],
                lambda was, _, now: "" if now["weights"] == was["weights"][str(wanted)] else
                f"epoch {now['epoch']}, {'as if nothing were wrong' if not now['none'] else 'and nothing is loaded'}",
                expected=f"epoch {wanted}, whole",
                look="decode: compare the digest; load_checkpoint: try the next older one")


def _all_damaged(trial: Trial, seed: int, numbers: list[int]) -> None:
    folder = trial.folder()
    saved = trial.play(scenes.save_epochs, folder=folder, seed=seed, numbers=numbers)
    hurt = trial.play(scenes.damage, own=False, folder=folder, seed=seed, numbers=numbers, how="flip")
    found = trial.play(scenes.load, folder=folder, seed=seed)
    silent = Outcome(value="") if found.raised and not found.raised.startswith(("NotImpl", "not tried")) else found
    trial.judge("all", "all files are damaged: load_checkpoint raises, and nobody begins again unsaid",
                [saved, hurt, silent],
                lambda *seen: "" if seen[-1] == "" else "it returned " + ("None" if seen[-1]["none"] else
                                                                          f"epoch {seen[-1]['epoch']}"),
                expected="an error that says so", look="load_checkpoint: None means an empty folder, not a lost one")


def _count(trial: Trial, seed: int, numbers: list[int], keep: int) -> None:
    saved = trial.play(scenes.save_epochs, folder=trial.folder(), seed=seed, numbers=numbers, keep=keep)
    wanted = sorted(scenes.NAME.format(number) for number in numbers[-keep:])
    trial.judge("count", f"after {len(numbers)} saves with keep_last_n={keep} exactly the newest {keep} are left",
                [saved],
                lambda was: "" if _checkpoints(was["files"]) == wanted else ", ".join(was["files"]) or "nothing",
                expected=", ".join(wanted), look="cleanup_old_checkpoints: which ones does your slice remove?")


def _last_good(trial: Trial, seed: int, numbers: list[int]) -> None:
    folder, wanted = trial.folder(), numbers[1]
    saved = trial.play(scenes.save_epochs, folder=folder, seed=seed, numbers=numbers)
    hurt = trial.play(scenes.damage, own=False, folder=folder, seed=seed, numbers=numbers[2:], how="flip")
    left = trial.play(scenes.clean, folder=folder, keep=2)
    found = trial.play(scenes.load, folder=folder, seed=seed)
    if left.ok and not found.ok and isinstance(left.value, list):
        names = ", ".join(map(str, left.value)) or "no file"
        found = Outcome(value={"weights": "", "epoch": f"nothing; left: {names}"})
    trial.judge("good", "the newest two of four are damaged, keep_last_n=2: the good ones are kept",
                [saved, hurt, left, found],
                lambda was, _, __, now: "" if now["weights"] == was["weights"][str(wanted)] else
                f"epoch {now['epoch']}",
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
    folder, saved = trial.folder(), stop // every * every
    settings: dict[str, Any] = {"seed": seed, "total": total}
    whole = trial.play(scenes.train, folder=trial.folder(), **settings)
    stopped = trial.play(scenes.train, folder=folder, every=every, stop=stop, **settings)
    resumed = trial.play(scenes.train, folder=folder, resume=True, **settings)
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

_DEADLINE_S = 2.0  # what a manager in trouble is told to wait
_PATIENCE_S, _LESS_S = 25.0, 10.0  # for a rank that waits; the same after one has waited in vain


def task5(part: Any, *, points: float = 3.5, seed: int = 51, world: int = 3, epoch: int = 6, only: str = "") -> float:
    """One rank writes, the others wait for it, and not for ever."""
    trial = Trial("lab01_task5", points, part, only=only)
    settings: dict[str, Any] = {"seed": seed, "world": world, "epoch": epoch}
    if trial.wants("alone"):
        _judge_plain(trial, "alone", "one process without a group saves and loads as before", seed, epoch,
                     look="dist.is_initialized()")
    if trial.wants("writer") or trial.wants("wait"):
        _save_together(trial, settings)
    if trial.wants("load"):
        _load_together(trial, settings)
    patience = _PATIENCE_S
    for key, scenario, expected, look in _MISHAPS:
        if trial.wants(key):
            said = trial.play(groups.save_together, folder=trial.folder(), timeout_s=_DEADLINE_S, mishap=key,
                              patience_s=patience, **settings)
            trial.judge(key, scenario, [said], partial(_all_raise, mishap=key), expected=expected, look=look)
            patience = _LESS_S if "hangs" in str(said.value) else patience
    return trial.finish()


_MISHAPS = [
    ("dies", "rank 0 dies in the middle of its save: the others raise", "an error on every other rank",
     "wait with a collective, which notices a dead peer; a loop that looks for the file does not"),
    ("freezes", "rank 0 hangs in the middle of its save: the others raise after timeout_s",
     "an error on every other rank, soon after timeout_s", "dist.barrier(async_op=True).wait(timedelta(...))"),
    ("full", "rank 0's disk is full: no rank believes that the epoch is saved", "an error on every rank",
     "rank 0 must not go on as if it had saved: how do the others learn of it?"),
]


def _save_together(trial: Trial, settings: dict[str, Any]) -> None:
    said = trial.play(groups.save_together, folder=trial.folder(), timeout_s=_PATIENCE_S, patience_s=_PATIENCE_S,
                      **settings)
    if trial.wants("writer"):
        trial.judge("writer", f"{settings['world']} ranks save, of which only rank 0 can write: all return", [said],
                    _first_trouble, expected="one file, written by rank 0",
                    look="save_checkpoint: only rank 0 writes and cleans up")
    if trial.wants("wait"):
        trial.judge("wait", "no rank returns before the checkpoint is there (rank 0's storage is slow)", [said],
                    _first_early, expected="the file is there when save_checkpoint returns",
                    look="the others wait for rank 0 after it has written")


def _load_together(trial: Trial, settings: dict[str, Any]) -> None:
    folder, epoch, seed = trial.folder(), settings["epoch"], settings["seed"]
    saved = trial.play(scenes.save_epochs, folder=folder, seed=seed, numbers=[epoch])
    found = trial.play(groups.load_together, folder=folder, seed=seed, world=settings["world"], timeout_s=_PATIENCE_S,
                       patience_s=_PATIENCE_S)
    trial.judge("load", "all ranks load the same epoch and the same weights", [saved, found],
                lambda was, rows: _different(rows, epoch, was["weights"][str(epoch)]),
                expected=f"epoch {epoch} on all ranks", look="load_checkpoint: every rank loads")


def _first_trouble(rows: list[dict[str, Any]]) -> str:
    for rank, row in enumerate(rows):
        if row.get("hangs"):
            return f"rank {rank} does not return"
        if not row.get("saved"):
            return f"rank {rank} raised {row.get('raised')}"
    return ""


def _first_early(rows: list[dict[str, Any]]) -> str:
    early = [str(rank) for rank, row in enumerate(rows) if not row.get("there")]
    return f"on rank {', '.join(early)} it was not" if early else ""


def _all_raise(rows: list[dict[str, Any]], mishap: str) -> str:
    concerned = rows if mishap == "full" else rows[1:]
    for rank, row in enumerate(concerned, len(rows) - len(concerned)):
        if row.get("hangs"):
            return f"rank {rank} waits for ever (timeout_s was {_DEADLINE_S:g})"
        if row.get("saved") is not False:
            return f"rank {rank} returned as if the epoch were saved" if row.get("saved") else f"rank {rank}: {row}"
        if str(row.get("raised", "")).startswith("NotImplementedError"):
            return EMPTY
    return ""


def _different(rows: list[dict[str, Any]], epoch: int, weights: str) -> str:
    for rank, row in enumerate(rows):
        if row.get("hangs"):
            return f"rank {rank} does not return"
        if row.get("epoch") != epoch or row.get("weights") != weights:
            return f"rank {rank}: epoch {row.get('epoch')}, {row.get('raised', 'other weights')}"
    return ""


def _has(outcome: Outcome, name: str, kind: type) -> bool:
    return outcome.ok and isinstance(outcome.value, dict) and isinstance(outcome.value.get(name), kind)
