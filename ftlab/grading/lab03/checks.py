"""The checks of lab 03. Policies are compared with the reference on situations, loops by the bits they end in.

The scene of task 4 runs a whole cluster below the child in which the student's policy was loaded: what it tells, the
event log, could be forged by code that takes over that child. Tasks 1 to 3 ask the same policy about situations whose
answers only the judge knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ftlab.events import Event
from ftlab.grading.exam import Exam
from ftlab.grading.lab03 import loops, scenes, situations
from ftlab.grading.lab03.situations import Situation
from ftlab.grading.stage import Play, current_stage

_CLUSTER_S = 900.0  # for the whole scene: 8 s here, a minute and more in a sandbox on a machine that is very busy
_JOB_S = 250.0
_MODULES = ("torch._dynamo",)  # torch.optim imports it, which takes seconds
_LOOP_S = 180.0


def task1(refuse: Any, *, points: float = 2.0, seed: int = 1, only: str = "") -> float:
    """When to give up."""
    return _ask(_exam("lab03_task1", points, refuse, only), scenes.ask_with_budgets, situations.refusals(seed))


def task2(mend_world: Any, *, points: float = 3.0, seed: int = 1, only: str = "") -> float:
    """Nodes and workers."""
    asked = [*situations.worlds(seed), *situations.of_worlds()]
    return _ask(_exam("lab03_task2", points, mend_world, only), scenes.ask, asked)


def task3(mend_step: Any, *, points: float = 3.0, seed: int = 1, only: str = "") -> float:
    """One step."""
    asked = [*situations.steps(seed), *situations.of_steps()]
    return _ask(_exam("lab03_task3", points, mend_step, only), scenes.ask, asked)


def task4(my_decide: Any, *, points: float = 2.0, steps: int = 70, kill_at: int = 15, nan_at: int = 45,
          only: str = "") -> float:
    """The policy in a real controller and real workers, judged by the event log."""
    exam = _exam("lab03_task4", points, my_decide, only)
    seen = exam.see("the job runs to its end", scenes.run_cluster, seconds=_CLUSTER_S, gives=dict, steps=steps,
                    kill_at=kill_at, nan_at=nan_at, seconds_s=_JOB_S) if not exam.absent and _answers(exam) else None
    if seen is None:
        return exam.close()
    events = _events(seen.value.get("events"))
    _judge_log(exam, events, seen.value)
    return exam.close(steps=max((event.step or 0 for event in events), default=0),
                      restarts=_count(events, "worker.restarted"))


def task5(recover: Any, *, points: float = 3.0, nan_in: int = 2, raise_in: int = 3, dies_in: int = 4,
          only: str = "") -> float:
    """The loop, in one process."""
    exam = _exam("lab03_task5", points, recover, only)
    right = _undisturbed()
    _drive(exam, "without trouble it trains and saves every epoch", right, {}, calls=loops.EPOCHS,
           look="one save_checkpoint per epoch, with the number of epochs that are done")
    _drive(exam, "the loss of an epoch is NaN: back to the last good checkpoint", right, {str(nan_in): "nan"},
           look="check the loss before you save; load_checkpoint(model, optimizer) and go on at the epoch it names")
    _drive(exam, "an exception comes in mid-epoch: half an epoch is undone", right, {str(raise_in): "raise"},
           look="the weights and the optimizer's moments are half way: both come from the checkpoint")
    _drive(exam, "the very first epoch fails", right, {"0": "raise"},
           look="before the first epoch there must be something to go back to: save at the start, as epoch 0")
    _drive(exam, "a bug that comes back goes up to the caller, and not after hours", right,
           {"always from": "1"}, raises="ZeroDivisionError",
           look="more than max_failures failures: raise what was raised; a silent return hides it, a retry is endless")
    _resume(exam, right, dies_in)
    return exam.close()


def task5b(recover: Any, *, points: float = 2.0, only: str = "") -> float:
    """The loop under rarer troubles, and in a group of two ranks."""
    exam, right = _exam("lab03_task5b", points, recover, only), _undisturbed()
    _drive(exam, "three failures are survived, if three are allowed", right, {"1": "raise", "3": "nan", "5": "raise"},
           look="a failure is counted when it happens; the fourth goes up")
    _drive(exam, "the fourth failure goes up", right, {"1": "raise", "3": "raise", "5": "raise", "7": "bug"},
           raises="ZeroDivisionError", look="max_failures=3")
    _drive(exam, "Ctrl-C is no failure to recover from", right, {"2": "interrupt"}, raises="KeyboardInterrupt",
           look="except Exception, not except BaseException and not a bare except")
    _group(exam, right)
    return exam.close()


def _exam(task: str, points: float, part: Any, only: str) -> Exam:
    return Exam(task, points, part, only=only, needs=_MODULES)


# ---- policies ----------------------------------------------------------------------------------------------


def _ask(exam: Exam, scene: Callable[..., Any], asked: Sequence[Situation]) -> float:
    wanted = [each for each in asked if exam.wants(each.name)]
    seen = exam.see("the function is asked", scene, gives=list,
                    asked=[each.to_dict() for each in wanted]) if wanted else None
    answers = seen.value if seen and len(seen.value) == len(wanted) else [{}] * len(wanted)
    for situation, got in zip(wanted, answers if seen else [], strict=False):
        right = situation.answer
        exam.expect(situation.name, got == right, expected=_words(right), got=_words(got),
                    look=situation.look or f"the snapshot was {situation.snapshot}"[:400])
    return exam.close()


def _words(answer: Any) -> str:
    if not isinstance(answer, dict) or "action" not in answer:
        return str(answer.get("raised", answer) if isinstance(answer, dict) else answer)
    fields = ", ".join(f"{name}={value!r}" for name, value in answer.items() if name != "action")
    return f"{answer['action']}({fields})" if fields or answer["action"] != "None" else "None"


def _answers(exam: Exam) -> bool:
    """Whether the policy answers at all, about things that it will be asked: no cluster is started for one that does
    not."""
    name, asked = "the policy answers", [each.to_dict() for each in situations.recorded()]
    seen = exam.see(name, scenes.ask_with_budgets, gives=list, asked=asked)
    raised = [str(each["raised"]) for each in seen.value if isinstance(each, dict) and "raised" in each] if seen else []
    if raised:
        exam.expect(name, False, expected="an action", got=raised[0], look="tasks 1 to 3 come first")
    return seen is not None and not raised


# ---- the cluster -------------------------------------------------------------------------------------------


def _events(told: Any) -> list[Event]:
    """The event log; what is no event is left out."""
    rows = [each for each in told if isinstance(each, dict)] if isinstance(told, list) else []
    return [Event(kind=str(row["kind"]), source=str(row.get("source")), data=row["data"],
                  step=row["step"] if isinstance(row.get("step"), int) else None)
            for row in rows if isinstance(row.get("data"), dict) and "kind" in row]


def _judge_log(exam: Exam, events: list[Event], told: dict[str, Any]) -> None:
    actions = [event.data.get("action") for event in events if event.kind == "action.decided"]
    spoiled = [event.data.get("action") for event in events if event.kind == "step.spoiled"]
    end = next((event for event in reversed(events) if event.kind == "job.finished"), None)
    finished = end is not None and end.data.get("status") == "finished"
    error = str(told.get("error") or "it did not end")
    struck = {event.data.get("fault") for event in events if event.kind == "fault.injected"}
    exam.expect("rank 1's node is killed: the spare takes its seat",
                "kill" in struck and "Replace" in actions and _count(events, "recovery.finished") > 0,
                expected="action.decided Replace, then recovery.finished", got=f"{actions or 'no action'}; {error}",
                look="mend_world: a dead node and a spare")
    exam.expect("a gradient turns into NaN: the step is run again", "nan" in struck and spoiled[:1] == ["Retry"],
                expected="step.spoiled, and Retry", got=f"{spoiled or 'no spoiled step'}; {error}",
                look="mend_step: bad numbers for the first time")
    failed = {event.source for event in events if event.kind == "worker.failed"}
    well = sorted({event.source for event in events if event.kind == "worker.restarted"} - failed)
    exam.expect("nobody who was well is started again", finished and not well,
                expected="worker.restarted for nobody but workers that failed",
                got=f"{', '.join(well)} was well, and was started again" if finished else error,
                look="restart names workers that failed; those of a dead node go with it")
    exam.expect("the job ends in the bits of its undisturbed twin",
                finished and end is not None and end.data.get("digest") == told.get("twin") is not None,
                expected="identical", got="another end state" if finished else error,
                look="was a batch skipped that only needed another try?")


def _count(events: Sequence[Event], kind: str) -> int:
    return sum(event.kind == kind for event in events)


# ---- loops -------------------------------------------------------------------------------------------------


def _undisturbed() -> str:
    """The digest of a training that never failed, from a child without any of the student's code."""
    return str(current_stage().run(Play.of(loops.undisturbed), _LOOP_S).value)


def _folder() -> str:
    return str(current_stage().new_folder("lab03"))


def _drive(exam: Exam, name: str, right: str, trouble: dict[str, str], *, look: str, calls: int | None = None,
           raises: str = "") -> None:
    """One run of the loop: it must end in the right bits, or raise what it should."""
    seen = exam.see(name, loops.drive, seconds=_LOOP_S, gives=dict, look=look, folder=_folder(),
                    trouble=trouble) if exam.wants(name) else None
    if seen is None:
        return
    got, raised = seen.value, str(seen.value.get("raised", ""))
    if raises:
        exam.expect(name, raised.startswith(raises), expected=f"{raises} goes up to the caller", look=look,
                    got=_fate(got, right))
        return
    well = not raised and got.get("digest") == right and _all_well(got) and calls in (None, got.get("calls"))
    exam.expect(name, well, expected="the bits of a training that never failed, from good checkpoints only",
                got=_fate(got, right), look=look)


def _resume(exam: Exam, right: str, dies_in: int) -> None:
    name = "the process is killed; called again in a new one, it resumes"
    look = "begin with load_checkpoint: None means from scratch, else go on behind the epochs that are done"
    seen = exam.see(name, loops.drive_twice, seconds=_LOOP_S, gives=dict, look=look, folder=_folder(),
                    dies_in=dies_in) if exam.wants(name) else None
    if seen:
        got = seen.value
        left = loops.EPOCHS - dies_in
        well = got.get("digest") == right and not got.get("raised") and got.get("calls") == left
        exam.expect(name, well, look=look, expected=f"the {left} epochs that are left are trained, to the same bits",
                    got=_fate(got, right))


def _group(exam: Exam, right: str) -> None:
    name = "the loss is NaN on rank 1 only: both ranks go back"
    look = "all ranks must agree on whether somebody failed: somebody_failed(...) after every epoch, on every rank"
    seen = exam.see(name, loops.drive_group, seconds=_LOOP_S, gives=list, look=look, folder=_folder(),
                    trouble={"2": "nan loss"}) if exam.wants(name) else None
    if seen:
        ranks = [each if isinstance(each, dict) else {} for each in seen.value]
        well = len(ranks) == 2 and all(each.get("digest") == right and not each.get("raised") and
                                       each.get("calls") == loops.EPOCHS + 1 for each in ranks)
        exam.expect(name, well, expected="the same bits on both, after one epoch more", look=look,
                    got="; ".join(f"rank {rank}: {_fate(each, right)}" for rank, each in enumerate(ranks)))


def _all_well(got: dict[str, Any]) -> bool:
    """Whether every checkpoint was one to come back to, and the last one holds the end."""
    saved = _saved(got)
    return bool(saved) and all(each.get("well") is True for each in saved) and saved[-1].get("epoch") == loops.EPOCHS


def _saved(got: dict[str, Any]) -> list[dict[str, Any]]:
    saved = got.get("saved")
    return [each for each in saved if isinstance(each, dict)] if isinstance(saved, list) else []


def _fate(got: dict[str, Any], right: str) -> str:
    raised = got.get("raised") or "it returned"
    state = "the right bits" if got.get("digest") == right else "other bits"
    saved = [(each.get("epoch"), "" if each.get("well") else "with NaN in it") for each in _saved(got)]
    told = ", ".join(f"{epoch}{' ' + how if how else ''}" for epoch, how in saved)
    return f"{raised}; {state}; train_epoch was called {got.get('calls')} times; saved epochs: {told or 'none'}"
