"""Wrong solutions of lab 03."""

from __future__ import annotations

from tests.labs.wrong import Wrong

_REFUSE = '''
def refuse(snapshot, budgets):
    {fatal}
    {budget}
    {lost}
    return None
'''
_FATAL = '''for failure in snapshot.failures:
        if failure.fatal:
            return Abort(error="TrainingFailed", cause=failure.cause, reason=failure.detail)'''
_BUDGET = '''for failure in snapshot.failures:
        if budgets.get(failure.cause, 0) < 1:
            return Abort(error="RecoveryExhausted", cause=failure.cause, reason="used up")'''
_LOST = '''if snapshot.step > 0 and snapshot.holders == 0 and snapshot.saved is None:
        return Abort(error="StateLost", cause=snapshot.failures[0].cause, reason="lost")'''


def _refuse(fatal: str = _FATAL, budget: str = _BUDGET, lost: str = _LOST) -> dict[str, str]:
    return {"task1-stub": _REFUSE.format(fatal=fatal, budget=budget, lost=lost)}


_WORLD = '''
def mend_world(snapshot):
    named = {{failure.node for failure in snapshot.failures if failure.cause == "node"}}
    dead = [node for node in snapshot.members if node in named]
    restart = {restart}
    if not dead:
        return {alone}
    if {replaceable}:
        spares = list(snapshot.spares)
        return Replace(seats={{node: spares.{pop} if spares else None for node in dead}}, restart=restart)
    left = len(snapshot.members) - len(dead)
    if {enough}:
        return Shrink(lost=tuple(dead), restart=restart)
    return Abort(error="RecoveryExhausted", cause="node", reason="too few")
'''
_FAILED = '''tuple((failure.node, failure.local_rank) for failure in snapshot.failures
                    if failure.local_rank is not None and failure.node not in dead)'''


def _world(**change: str) -> dict[str, str]:
    good = {"restart": _FAILED, "alone": "Restart(restart=restart) if restart else Continue()",
            "replaceable": "len(snapshot.spares) >= len(dead) or snapshot.can_start", "pop": "pop(0)",
            "enough": "left >= snapshot.minimum"}
    return {"task2-stub": _WORLD.format(**{**good, **change})}


_STEP = '''
def mend_step(snapshot):
    if any(failure.cause == "oom" for failure in snapshot.failures):
        return Split() if snapshot.can_split else Abort(error="OutOfMemory", cause="oom", reason="one sample")
    {first}
    saved, loaded = snapshot.saved is not None, snapshot.since_load
    {blame}
    if snapshot.skipped < 3:
        return Skip()
    return Rollback(steps=10, skip=True) if saved else LowerRate()
'''


def _step(first: str = "if snapshot.tries == 0: return Retry()",
          blame: str = "if saved and loaded is not None and loaded <= 3: return Rollback(condemn=True)",
          ) -> dict[str, str]:
    return {"task3-stub": _STEP.format(first=first, blame=blame)}


_LOOP = '''
def my_train_with_auto_recovery(train_epoch, model, optimizer, loader, epochs, manager, monitor, max_failures=3):
    found = manager.load_checkpoint(model, optimizer)
    {begin}
    done, failures = {resume}, 0
    while done < epochs:
        problem = None
        try:
            metrics = train_epoch(model, loader, optimizer)
            {look}
        except {catch} as error:
            problem = error
        if {agree}:
            failures += 1
            {give_up}
            {back}
            continue
        done += 1
        {save}
    return failures
'''


def _loop(**change: str) -> dict[str, str]:
    good = {
        "begin": "if found is None: manager.save_checkpoint(model, optimizer, 0, {})",
        "resume": "found.epoch if found else 0",
        "look": "if monitor.detect_nan_inf(metrics['loss']): raise RuntimeError('the loss is bad')",
        "catch": "Exception", "agree": "somebody_failed(problem is not None)",
        "give_up": "if failures > max_failures: raise problem or RuntimeError('another rank failed')",
        "back": "done = manager.load_checkpoint(model, optimizer).epoch",
        "save": "manager.save_checkpoint(model, optimizer, done, metrics)"}
    return {"task5-stub": _LOOP.format(**{**good, **change})}


WRONG: dict[str, Wrong] = {
    "forgets budgets": Wrong(
        cells=_refuse(budget="pass"), points={"task1-check": 1.0, "task1-hidden": 0.5}),
    "retries what is fatal": Wrong(
        cells=_refuse(fatal="pass"), points={"task1-check": 1.5, "task1-hidden": 0.75}),
    "gives up when any budget is empty": Wrong(
        cells=_refuse(budget='if min(budgets.values()) < 1:\n        return Abort(error="RecoveryExhausted", '
                             'cause=snapshot.failures[0].cause, reason="used up")'),
        points={"task1-check": 1.5, "task1-hidden": 0.75}),
    "loses the state without a word": Wrong(
        cells=_refuse(lost="pass"), points={"task1-check": 1.5, "task1-hidden": 0.75}),
    "restarts healthy workers": Wrong(
        cells=_world(restart="tuple((node, 0) for node in snapshot.members if node not in dead)",
                     alone="Restart(restart=restart)"),
        points={"task2-check": 0.0, "task2-hidden": 0.0, "task4-check": 0.0}),
    "restarts the workers of dead nodes": Wrong(
        cells=_world(restart="tuple((failure.node, failure.local_rank) for failure in snapshot.failures "
                             "if failure.local_rank is not None)"),
        points={"task2-check": 2.4, "task2-hidden": 0.8}),
    "shrinks though there is a spare": Wrong(
        cells=_world(replaceable="False"),
        points={"task2-check": 0.6, "task2-hidden": 0.2, "task4-check": 0.0}),
    "shrinks below the minimum": Wrong(
        cells=_world(enough="left >= 1"), points={"task2-check": 2.4, "task2-hidden": 0.8}),
    "takes the coldest spare first": Wrong(
        cells=_world(pop="pop()"), points={"task2-check": 2.4, "task2-hidden": 0.8}),
    "skips at once": Wrong(
        cells=_step(first="pass"), points={"task3-check": 1.8, "task3-hidden": 0.6, "task4-check": 1.0}),
    "retries for ever": Wrong(
        cells=_step(first="return Retry()"), points={"task3-check": 0.6, "task3-hidden": 0.2}),
    "trusts a bad checkpoint": Wrong(
        cells=_step(blame="pass"), points={"task3-check": 2.4, "task3-hidden": 0.8}),
    "blames a checkpoint that never was": Wrong(
        cells=_step(blame="if saved and (loaded or 0) <= 3: return Rollback(condemn=True)"),
        points={"task3-check": 1.2, "task3-hidden": 0.4}),
    "swallows the error": Wrong(
        cells=_loop(give_up="if failures > max_failures: return failures"),
        points={"task5-check": 2.5, "task5-hidden": 1.5}),
    "tries for ever": Wrong(
        cells=_loop(give_up="pass"), points={"task5-check": 2.5, "task5-hidden": 1.5}),
    "goes on without going back": Wrong(
        cells=_loop(back="pass"), points={"task5-check": 1.0, "task5-hidden": 0.0}),
    "goes back to the wrong epoch": Wrong(
        cells=_loop(back="manager.load_checkpoint(model, optimizer); done = 0"),
        points={"task5-check": 1.5, "task5-hidden": 0.0}),
    "does not restore the optimizer": Wrong(
        cells=_loop(back="done = manager.load_checkpoint(model, None).epoch"),
        points={"task5-check": 1.0, "task5-hidden": 0.0}),
    "nothing to go back to at first": Wrong(
        cells=_loop(begin="pass"), points={"task5-check": 2.5}),
    "begins anew when called again": Wrong(
        cells=_loop(begin="manager.save_checkpoint(model, optimizer, 0, {})", resume="0"),
        points={"task5-check": 2.5}),
    "does not look at the loss": Wrong(
        cells=_loop(look="pass"), points={"task5-check": 2.5, "task5-hidden": 0.0}),
    "saves before it looks": Wrong(
        cells=_loop(look="manager.save_checkpoint(model, optimizer, done + 1, metrics)\n            "
                         "if monitor.detect_nan_inf(metrics['loss']): raise RuntimeError('the loss is bad')",
                    save="pass"),
        points={"task5-check": 2.5, "task5-hidden": 0.0}),
    "catches Ctrl-C": Wrong(
        cells=_loop(catch="BaseException"), points={"task5-hidden": 1.5}),
    "each rank for itself": Wrong(
        cells=_loop(agree="problem is not None"), points={"task5-hidden": 1.5}),
    "one failure too few": Wrong(
        cells=_loop(give_up="if failures >= max_failures: raise problem"), points={"task5-hidden": 0.5}),
}
