"""The check itself: record a save once, build every crash image of it, load each, and judge what came out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ftlab.errors import ConfigError, JobError, WaitTimeout
from ftlab.grading.crash.disk import Choice
from ftlab.grading.crash.explain import MISTAKES, explain, what_was_lost
from ftlab.grading.crash.images import Image, Images, select
from ftlab.grading.crash.operations import Recording
from ftlab.grading.crash.result import CrashResult, Explanation, Failure
from ftlab.grading.stage.current import given_stage
from ftlab.grading.stage.interrupts import Stopped
from ftlab.grading.stage.play import Play
from ftlab.grading.stage.stage import Function, Stage

MAX_HANGS = 10  # loads that may hang before the rest is not tried any more
CHECK_S = 300.0  # for all loads of one check


def check_crashes(prepare: Function | Play, save: Function | Play, load: Function | Play, *,
                  folder: Path | None = None, limit: int = 400, save_s: float = 60.0, load_s: float = 10.0,
                  stage: Stage | None = None, right: tuple[str, str] | None = None) -> CrashResult:
    """Let the machine die at every operation of a save, and see whether load gives the old or the new state each time.

    `prepare(folder)` leaves the old state, `save(folder)` writes the new one, `load(folder)` returns it. All three run
    in child processes. Raises JobError when one of them fails without any crash, WaitTimeout when prepare or save takes
    longer than `save_s`, or all loads together longer than CHECK_S, FaultUnavailable where system calls cannot be
    traced, and FaultError for a save whose writes cannot be followed, or that does too much. `right` are the digests of
    the old state and of the new one, where the caller knows them: what load says is not believed then. `folder` is
    where the work folder is made; a `stage` can be shared between checks.
    """
    if limit < 1:
        raise ConfigError(f"limit must be at least 1: one image has to be tried (got {limit})")
    stage = stage or given_stage()
    if stage is None:
        try:
            with Stage(folder) as own:
                return check_crashes(prepare, save, load, limit=limit, save_s=save_s, load_s=load_s, stage=own,
                                     right=right)
        except KeyboardInterrupt:
            raise Stopped("the crash check was stopped. Run the cell again when you are ready.") from None
    begin = time.monotonic()
    stage.set_functions(prepare, save)
    recording = stage.record(save_s)
    stage.set_functions(load)  # who loads is not told what was saved, nor who saves what will be asked
    images = Images(recording)
    images.check_complete(recording)
    judge = _Judge(stage, images, load_s, right)
    return _judge_all(recording, images, judge, limit, begin)


class _Judge:
    """Loads images, each folder once, and knows the old and the new state."""

    def __init__(self, stage: Stage, images: Images, load_s: float, right: tuple[str, str] | None = None) -> None:
        self._stage, self._images, self._load_s = stage, images, load_s
        self._answers: dict[str, dict[str, Any]] = {}
        self.hangs, self._slowest = 0, 0.0
        self.old = self.answer(images.image(0, Choice()))
        self.new = self.answer(images.image(len(images.operations), Choice()))
        if "raised" in self.old:
            raise JobError(f"load failed on what prepare left: {self.old['raised']}",
                           hint="prepare has to leave a state that load can read; no crash was tried yet")
        if right is not None and self.old.get("digest") != right[0]:
            raise JobError("load gives another state than the one that was saved", seen=str(self.old.get("text", "")),
                           hint="first mend saving and loading; no crash was tried yet")
        if right is not None and self.new.get("digest") != right[1]:
            self.new = {"raised": self.new.get("raised", "another state than the one that was saved")}

    def answer(self, image: Image) -> dict[str, Any]:
        """What load gave for an image."""
        if image.key not in self._answers:
            self._images.build(image, self._stage.folder)
            self._stage.hand_over(self._stage.folder)
            begin = time.monotonic()
            self._answers[image.key] = self._stage.load(self._limit())
            took = time.monotonic() - begin
            if took >= self._limit():
                self.hangs += 1
            else:
                self._slowest = max(self._slowest, took)
        return self._answers[image.key]

    def fails(self, image: Image) -> bool:
        """Whether load gave anything but the old or the new state; after save returned, anything but the new one."""
        found = self.answer(image).get("digest")
        return found is None or found not in ({self.new.get("digest")} if image.must_be_new
                                              else {self.old["digest"], self.new.get("digest")})

    def words(self, image: Image) -> str:
        """What load gave, for a student."""
        answer = self.answer(image)
        if "raised" in answer:
            return str(answer["raised"])
        known = {self.new.get("digest"): "the new state", self.old["digest"]: "the old state, though save had returned"}
        return known.get(answer["digest"], f"neither the old nor the new state: {answer['text']}")

    def _limit(self) -> float:
        """Patience shrinks after a first hang: a hundred images that hang should not take a quarter of an hour."""
        return self._load_s if not self.hangs else min(self._load_s, max(1.0, 20 * self._slowest))


def _judge_all(recording: Recording, images: Images, judge: _Judge, limit: int, begin: float) -> CrashResult:
    if judge.new.get("digest") in (None, judge.old["digest"]):
        return _nothing_new(recording, images, judge, begin)
    possible = images.all()
    tried, failed = 0, list[Image]()
    selected = select(possible, recording, images.affordable(limit))
    for image in selected:
        if judge.hangs >= MAX_HANGS:
            break
        if time.monotonic() - begin > CHECK_S:
            raise WaitTimeout(f"load was tried after {tried} of {len(selected)} crashes, which took {CHECK_S:g} s",
                              hint="load has to be quick: what does it wait for?")
        tried += 1
        if judge.fails(image):
            failed.append(image)
    first = _describe(images, judge, failed[0]) if failed else None
    return CrashResult(images=tried, survived=tried - len(failed), possible=len(possible), first_failure=first,
                       operations=recording.operations, seconds=time.monotonic() - begin, sampled=images.sampled,
                       failed_after_return=sum(image.must_be_new for image in failed))


def _describe(images: Images, judge: _Judge, image: Image) -> Failure:
    simple, explanation = explain(images, image, judge.fails)
    died = str(images.operations[simple.boundary - 1]) if simple.boundary else "nothing, before save had begun"
    return Failure(died=died, boundary=simple.boundary, lost=what_was_lost(images, simple),
                   files=tuple(images.files(simple)), found=judge.words(simple), explanation=explanation)


def _nothing_new(recording: Recording, images: Images, judge: _Judge, begin: float) -> CrashResult:
    """A save after which load gives no new state fails before any crash."""
    last = images.image(len(recording.operations), Choice())
    found = str(judge.new.get("raised", "the old state"))
    failure = Failure(died="nothing: save returned and its process ended", boundary=last.boundary, lost=(),
                      files=tuple(images.files(last)), found=found,
                      explanation=Explanation("no-new-state", MISTAKES["no-new-state"]))
    return CrashResult(images=1, survived=0, possible=1, first_failure=failure, operations=recording.operations,
                       seconds=time.monotonic() - begin)
