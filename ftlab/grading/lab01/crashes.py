"""What becomes of a save when the machine dies in it, or its disk is full: judged for tasks 2 and 3 of lab 01.

The crash harness traces a save in a child and tries every crash that the file system allows (`ftlab.grading.crash`).
Where that cannot be had, the order of the save's calls is looked at instead.
"""

from __future__ import annotations

from typing import Any

from ftlab.errors import FaultUnavailable, FtlabError, JobError
from ftlab.grading.crash.check import check_crashes
from ftlab.grading.crash.result import CrashResult
from ftlab.grading.lab01 import scenes
from ftlab.grading.lab01.trial import EMPTY, Trial
from ftlab.grading.lab01.truth import Truth
from ftlab.grading.stage import Play, current_stage

_DURING = "the machine dies during a save, also between write and rename: the old state or the new one is loaded"
_AFTER = "the machine dies when save_checkpoint has just returned: the new state is loaded"


def judge_crashes(trial: Trial, before: int, after: int, images: int) -> None:
    """The machine dies at any moment of a save, or right after it."""
    result = _crashes(trial, before, after, images, 100)
    if isinstance(result, str):
        _watch_calls(trial, before, result)
        return
    trial.cost |= _crash_cost(result)
    failure = result.first_failure
    words = str(failure) if failure else ""
    early = result.images - result.survived - result.failed_after_return
    if trial.wants("during"):
        trial.note("during", _DURING, words if early else "", expected="old or new, after a crash at any moment",
                   look="write: temporary name, write, flush what Python still holds, os.fsync, os.replace; in "
                        "this order")
    if trial.wants("after"):
        again = "as above: what was not synced may be lost afterwards too" if early else words
        trial.note("after", _AFTER, again if result.failed_after_return else "",
                   expected="what save_checkpoint has promised is on disk",
                   look="write: os.fsync of the file before os.replace, os.fsync of the directory after it")


def _crashes(trial: Trial, before: int, after: int, images: int, keep: int) -> CrashResult | str:
    """What the crash harness finds; a text where it cannot be had, or the save does not even work without a crash."""
    truth = Truth(0, 1)  # the old state and the new one, whatever epochs they are saved as
    prepare, save = (Play.of(scenes.save_one, *trial.parts, state=truth.states[str(number)], epoch=epoch, keep=keep)
                     for number, epoch in enumerate((before, after)))
    load = Play.of(scenes.load_one, *trial.parts, salt=truth.salt)
    try:
        return check_crashes(prepare, save, load, stage=current_stage(), limit=images,
                             right=(truth.loaded(0, before), truth.loaded(1, after)))
    except FaultUnavailable as error:
        return f"unavailable: {error.message}"
    except JobError as error:
        return EMPTY if "NotImplementedError" in error.message else str(error)
    except FtlabError as error:
        return str(error)


def _crash_cost(result: CrashResult) -> dict[str, Any]:
    written = sum(len(each.data) for each in result.operations if each.data)
    return {"crashes": result.images, "operations": len(result.operations), "bytes": written}


def _watch_calls(trial: Trial, epoch: int, why: str) -> None:
    """Where no save can be traced, the order of its calls is looked at instead: less, but something."""
    if not why.startswith("unavailable"):
        for key, scenario in (("during", _DURING), ("after", _AFTER)):
            if trial.wants(key):
                trial.note(key, scenario, why, expected="a save that works without a crash", look="save_checkpoint")
        return
    trial.card.remark(f"crashes cannot be tried on this machine ({why.removeprefix('unavailable: ')}): only the order "
                      "of your calls is looked at; grading happens on Linux, where every crash is tried")
    seen = trial.play(scenes.watch_calls, folder=trial.folder(), state=Truth(epoch).states[str(epoch)], epoch=epoch)
    if trial.wants("during"):
        trial.judge("during", "os.fsync of the file comes before os.replace", [seen], _fsync_first,
                    expected="fsync of the file, then replace", look="write")
    if trial.wants("after"):
        trial.judge("after", "os.fsync of the directory comes after os.replace", [seen], _folder_last,
                    expected="replace, then fsync of the directory", look="write")


def _fsync_first(calls: list[list[str]]) -> str:
    moves = [number for number, each in enumerate(calls) if each[0] == "move"]
    good = moves and ["fsync", "file"] in calls[:moves[0]]
    return "" if good else f"{[each[0] for each in calls] or 'no such call'}"


def _folder_last(calls: list[list[str]]) -> str:
    moves = [number for number, each in enumerate(calls) if each[0] == "move"]
    good = moves and ["fsync", "folder"] in calls[moves[-1]:]
    return "" if good else f"{[each[0] for each in calls] or 'no such call'}"


def judge_full_disk(trial: Trial, before: int, after: int, keep: int, needless: str = "") -> None:
    """The disk is full in the middle of a save; `needless` says why that proves nothing of this manager."""
    folder, truth = trial.folder(), Truth(before)
    first = trial.save(truth, folder, keep)
    failed = trial.play(scenes.save_on_full_disk, folder=folder, epoch=after, keep=keep)
    found = trial.play(scenes.load, folder=folder, salt=truth.salt)

    def problem(_: Any, tried: dict[str, Any], now: dict[str, Any]) -> str:
        if needless:
            return needless
        if not tried["raised"]:
            return "save_checkpoint returned as if nothing had happened"
        return "" if now["weights"] == truth.weights(before) else truth.name(now["weights"])

    trial.judge("full", "the disk is full in the middle of a save: it raises, and the old state is loaded",
                [first, failed, found], problem, expected="an error from save_checkpoint, and the old checkpoint whole",
                look="write: is anything changed under a final name, or deleted, before all bytes are there?")


def judge_cleaning(trial: Trial, before: int, after: int, images: int, needless: str = "") -> None:
    """The machine dies while old files are deleted; `needless` says why that proves nothing of this manager.

    Only what was deleted too early counts here: where something un-synced was lost, that was task 2's matter.
    """
    result = needless or _crashes(trial, before, after, images, keep=1)
    if isinstance(result, str) and result.startswith("unavailable"):
        trial.card.remark("that the machine dies while old files are deleted cannot be tried on this machine")
        return
    got = result if isinstance(result, str) else ""
    if isinstance(result, CrashResult):
        trial.cost |= _crash_cost(result)
        failure = result.first_failure
        got = str(failure) if failure and not failure.lost else ""
    trial.note("crash", "the machine dies while the old file is deleted, keep_last_n=1: one of the two is loaded", got,
               expected="the old state or the new one", look="save_checkpoint: first the new one, then the clean-up")
