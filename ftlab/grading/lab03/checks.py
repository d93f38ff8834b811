"""The checks of lab 03. Policies are compared with the reference on situations, loops by the bits they end in.

The scene of task 4 runs a whole cluster below the child in which the student's policy was loaded: what it tells, the
event log, could be forged by code that takes over that child. Tasks 1 to 3 ask the same policy about situations whose
answers only the judge knows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ftlab.errors import FtlabError
from ftlab.events import Event
from ftlab.grading.exam import Exam
from ftlab.grading.lab03 import loops, scenes, situations
from ftlab.grading.lab03.situations import Situation
from ftlab.grading.stage import Play, current_stage

_CLUSTER_S = 900.0  # for the whole scene: 8 s here, a minute and more in a sandbox on a machine that is very busy
_JOB_S = 250.0
_MODULES = ("torch._dynamo",)  # torch.optim imports it, which takes seconds
LOOP_S = 180.0


def task1(refuse: Any, *, points: float = 2.0, seed: int = 1, only: str = "") -> float:
    """When to give up."""
    return _ask(new_exam("lab03_task1", points, refuse, only), scenes.ask_with_budgets, situations.refusals(seed))


def task2(mend_world: Any, *, points: float = 3.0, seed: int = 1, only: str = "") -> float:
    """Nodes and workers."""
    asked = [*situations.worlds(seed), *situations.of_worlds()]
    return _ask(new_exam("lab03_task2", points, mend_world, only), scenes.ask, asked)


def task3(mend_step: Any, *, points: float = 3.0, seed: int = 1, only: str = "") -> float:
    """One step."""
    asked = [*situations.steps(seed), *situations.of_steps()]
    return _ask(new_exam("lab03_task3", points, mend_step, only), scenes.ask, asked)


def task4(my_decide: Any, *, points: float = 2.0, steps: int = 70, kill_at: int = 15, nan_at: int = 45,
          only: str = "") -> float:
    """The policy in a real controller and real workers, judged by the event log."""
    exam = new_exam("lab03_task4", points, my_decide, only)
    seen = exam.see("the job runs to its end", scenes.run_cluster, seconds=_CLUSTER_S, gives=dict, steps=steps,
                    kill_at=kill_at, nan_at=nan_at, seconds_s=_JOB_S) if not exam.absent and _answers(exam) else None
    if seen is None:
        return exam.close()
    events = _events(seen.value.get("events"))
    _judge_log(exam, events, str(seen.value.get("error") or "it did not end"), twin_of(steps))
    return exam.close(steps=max((event.step or 0 for event in events), default=0),
                      restarts=_count(events, "worker.restarted"))


def task5(recover: Any, *, points: float = 3.0, nan_in: int = 2, raise_in: int = 3, dies_in: int = 4,
          only: str = "") -> float:
    """The loop, in one process."""
    exam = new_exam("lab03_task5", points, recover, only)
    right = undisturbed()
    drive(exam, "without trouble it trains and saves every epoch", right, {}, calls=loops.EPOCHS,
           look="one save_checkpoint per epoch, with the number of epochs that are done")
    drive(exam, "the loss of an epoch is NaN: back to the last good checkpoint", right, {str(nan_in): "nan"},
           look="check the loss before you save; load_checkpoint(model, optimizer) and go on at the epoch it names")
    survives = drive(exam, "an exception comes in mid-epoch: half an epoch is undone", right, {str(raise_in): "raise"},
           look="the weights and the optimizer's moments are half way: both come from the checkpoint")
    drive(exam, "the very first epoch fails", right, {"0": "raise"},
           look="before the first epoch there must be something to go back to: save at the start, as epoch 0")
    drive(exam, "a bug that comes back goes up to the caller, and not after hours", right,
           {"always from": "1"}, raises="ZeroDivisionError", after=survives or bool(exam.only),
           look="more than max_failures failures: raise what was raised; a silent return hides it, a retry is endless")
    _resume(exam, right, dies_in)
    return exam.close()


def new_exam(task: str, points: float, part: Any, only: str) -> Exam:
    """An exam of one part."""
    return Exam(task, points, part, only=only, needs=_MODULES)


# ---- policies ----------------------------------------------------------------------------------------------


def _ask(exam: Exam, scene: Callable[..., Any], asked: Sequence[Situation]) -> float:
    pairs: dict[str, list[Situation]] = {}
    for each in asked:
        pairs.setdefault(each.pair or each.name, []).append(each)
    wanted = [pair for pair in pairs.values() if exam.wants(_title(pair))]
    questions = [each for pair in wanted for each in pair]
    random.shuffle(questions)  # an answer is not known by its place
    seen = exam.see("the function is asked", scene, gives=list,
                    asked=[each.to_dict() for each in questions]) if wanted else None
    if seen:
        said = dict(zip([each.name for each in questions], [*seen.value, *([{}] * len(questions))], strict=False))
        for pair in wanted:
            _judge_pair(exam, pair, said)
    return exam.close()


def _judge_pair(exam: Exam, pair: list[Situation], said: dict[str, Any]) -> None:
    """A pair counts if all of it is right; else the first that is wrong is told."""
    wrong = next((each for each in pair if said[each.name] != each.answer), None)
    if wrong is None:
        exam.expect(_title(pair), True)
        return
    got, raised = said[wrong.name], isinstance(said[wrong.name], dict) and "raised" in said[wrong.name]
    look = wrong.look or f"the snapshot was {wrong.snapshot}"[:400]
    exam.expect(_title(pair), False, expected=f"{_words(wrong.answer)} where {wrong.name}", got=_words(got),
                look="your function raised: read the error above" if raised else look)


def _title(pair: list[Situation]) -> str:
    return "; ".join(each.name for each in pair)


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


@cache
def twin_of(steps: int) -> str:
    """The end state of the undisturbed job, from a child without any of the student's code; the same each time."""
    seen = current_stage().run(Play.of(scenes.run_twin, steps=steps, seconds_s=_JOB_S), _CLUSTER_S)
    if not seen.ok:
        raise FtlabError(f"the undisturbed job did not end: {seen.trouble(_CLUSTER_S)}", hint="run the check again")
    return str(seen.value)


def _judge_log(exam: Exam, events: list[Event], error: str, twin: str) -> None:
    actions = [event.data.get("action") for event in events if event.kind == "action.decided"]
    spoiled = [event.data.get("action") for event in events if event.kind == "step.spoiled"]
    end = next((event for event in reversed(events) if event.kind == "job.finished"), None)
    finished = end is not None and end.data.get("status") == "finished"
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
                finished and end is not None and end.data.get("digest") == twin,
                expected="identical", got="another end state" if finished else error,
                look="was a batch skipped that only needed another try?")


def _count(events: Sequence[Event], kind: str) -> int:
    return sum(event.kind == kind for event in events)


# ---- loops -------------------------------------------------------------------------------------------------


def undisturbed() -> str:
    """The digest of a training that never failed, from a child without any of the student's code."""
    return str(current_stage().run(Play.of(loops.undisturbed), LOOP_S).value)


def new_folder() -> str:
    """For checkpoints of one run."""
    return str(current_stage().new_folder("lab03"))


def drive(exam: Exam, name: str, right: str, trouble: dict[str, str], *, look: str, calls: int | None = None,
          raises: str = "", after: bool = True) -> bool:
    """One run of the loop: it must end in the right bits and say how many failures there were, or raise what it should.
    That something goes up counts only `after` a failure was survived: a loop that recovers from nothing raises too."""
    seen = exam.see(name, loops.drive, seconds=LOOP_S, gives=dict, look=look, folder=new_folder(),
                    trouble=trouble) if exam.wants(name) else None
    if seen is None:
        return False
    got, raised = seen.value, str(seen.value.get("raised", ""))
    if raises:
        return exam.expect(name, after and raised.startswith(raises), look=look if after else "first survive a failure",
                           expected=f"{raises} goes up to the caller, from a loop that survives other failures",
                           got=fate(got, right))
    well = not raised and got.get("digest") == right and _all_well(got) and calls in (None, got.get("calls"))
    counted = _counted(got, len(trouble))
    return exam.expect(name, well and counted, got=fate(got, right), look=look if counted or not well else
                       "return how many failures there were", expected="the bits of a training that never failed, "
                       f"from good checkpoints only, and {len(trouble)} returned")


def _counted(got: dict[str, Any], failures: int) -> bool:
    """Whether the loop said how many failures there were."""
    return got.get("returned") == failures and type(got.get("returned")) is int


def _resume(exam: Exam, right: str, dies_in: int) -> None:
    name = "the process is killed; called again in a new one, it resumes"
    look = "begin with load_checkpoint: None means from scratch, else go on behind the epochs that are done"
    seen = exam.see(name, loops.drive_twice, seconds=LOOP_S, gives=dict, look=look, folder=new_folder(),
                    dies_in=dies_in) if exam.wants(name) else None
    if seen:
        got = seen.value
        left = loops.EPOCHS - dies_in
        well = got.get("digest") == right and not got.get("raised") and got.get("calls") == left and _counted(got, 0)
        exam.expect(name, well, look=look, expected=f"the {left} epochs that are left are trained, to the same bits",
                    got=fate(got, right))


def _all_well(got: dict[str, Any]) -> bool:
    """Whether every checkpoint was one to come back to, and the last one holds the end."""
    saved = _saved(got)
    return bool(saved) and all(each.get("well") is True for each in saved) and saved[-1].get("epoch") == loops.EPOCHS


def _saved(got: dict[str, Any]) -> list[dict[str, Any]]:
    saved = got.get("saved")
    return [each for each in saved if isinstance(each, dict)] if isinstance(saved, list) else []


def fate(got: dict[str, Any], right: str) -> str:
    """How a run ended, in words."""
    raised = got.get("raised") or f"it returned {got.get('returned')!r}"
    state = "the right bits" if got.get("digest") == right else "other bits"
    saved = [(each.get("epoch"), "" if each.get("well") else "with NaN in it") for each in _saved(got)]
    told = ", ".join(f"{epoch}{' ' + how if how else ''}" for epoch, how in saved)
    return f"{raised}; {state}; train_epoch was called {got.get('calls')} times; saved epochs: {told or 'none'}"
