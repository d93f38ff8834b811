"""Right answers that differ from the reference: all get full marks. Labs 00, 02 and 03, whose tasks are quick to ask."""

from __future__ import annotations

_NUMBERS = "class NumberMonitor:\n    def detect_nan_inf(self, loss):\n        "
_PROGRESS = '''
class ProgressMonitor(NumberMonitor):
    def __init__(self, timeout_seconds=300.0, clock=time.monotonic):
        self.timeout_seconds, self.clock, self.since, self.times = timeout_seconds, clock, clock(), []
    def start(self): self.since = self.clock()
    def step_done(self):
        now = self.clock()
        {note}
        self.since = now
    def limit(self):
        {limit}
    def check_progress(self):
        {look}
'''


def _progress(note: str = "self.times = [*self.times[-49:], now - self.since]",
              limit: str = "return max(1.0, 8 * statistics.median(self.times)) if len(self.times) > 2 else self.timeout_seconds",
              look: str = "return not self.clock() - self.since > self.limit()") -> dict[str, str]:
    return {"task2-stub": _PROGRESS.format(note=note, limit=limit, look=look)}


_MEMORY = '''
class MyMonitor(ProgressMonitor):
    def __init__(self, timeout_seconds=300.0, clock=time.monotonic, memory=read_memory):
        super().__init__(timeout_seconds, clock)
        self.memory, self.before = memory, None
    def detect_oom(self):
        now, (used, limit), before = self.clock(), self.memory(), self.before
        self.before = (now, used)
        {}
'''
_DETECTOR = '''
class MyDetector:
    def __init__(self, threshold={threshold}, patience_s=3.0):
        self.threshold, self.patience_s, self.beats = threshold, patience_s, []
    def heard(self, at):
        if not self.beats or at > self.beats[-1]:
            self.beats = [*self.beats[-{keep}:], at]
    def judge(self, now):
        if not self.beats:
            return {alive}
        gaps = [b - a for a, b in zip(self.beats, self.beats[1:])]
        limit = self.threshold * {typical} if len(gaps) > 4 else self.patience_s
        share = (now - self.beats[-1]) / limit
        return {dead} if share > 1 else {suspect} if share > 0.5 else {alive}
'''


def _detector(threshold: float = 5.0, keep: int = 50, typical: str = "statistics.median(gaps)", names: bool = False) -> dict[str, str]:
    words = {"alive": "'ALIVE'", "dead": "'DEAD'", "suspect": "'SUSPECT'"} if names else {
        "alive": "Verdict.ALIVE", "dead": "Verdict.DEAD", "suspect": "Verdict.SUSPECT"}
    return {"task4-stub": _DETECTOR.format(threshold=threshold, keep=keep, typical=typical, **words)}


_WORLD = '''
def mend_world(snapshot):
    gone = {{f.node for f in snapshot.failures if f.cause == "node"}}
    dead = [n for n in snapshot.members if n in gone]
    again = {restart}
    if dead:
        have = list(snapshot.spares)
        if len(have) < len(dead) and not snapshot.can_start:
            if len(snapshot.members) - len(dead) < snapshot.minimum:
                return Abort(error="RecoveryExhausted", cause="node", reason={reason})
            return Shrink(lost={lost}, restart=again)
        return Replace(seats=dict(zip(dead, [*have, *[None] * len(dead)])), restart=again)
    return Restart(restart=again) if again else Continue({why})
'''


def _world(restart: str = "[(f.node, f.local_rank) for f in snapshot.failures if f.local_rank is not None and f.node not in gone]",
           reason: str = "'too few'", lost: str = "tuple(dead)", why: str = "") -> dict[str, str]:
    return {"task2-stub": _WORLD.format(restart=restart, reason=reason, lost=lost, why=why)}


_STEP = '''
def mend_step(snapshot):
    oom = {oom}
    if oom:
        return Split() if snapshot.can_split else Abort(error="OutOfMemory", cause="oom", reason={reason})
    if not snapshot.tries:
        return Retry()
    if snapshot.saved is not None and snapshot.since_load is not None and snapshot.since_load <= 3:
        return Rollback(condemn=True)
    {rest}
'''


def _step(oom: str = "[f for f in snapshot.failures if f.cause == 'oom']", reason: str = "'no'",
          rest: str = "return Skip() if snapshot.skipped < 3 else LowerRate() if snapshot.saved is None else Rollback(steps=10, skip=True)"
          ) -> dict[str, str]:
    return {"task3-stub": _STEP.format(oom=oom, reason=reason, rest=rest)}


# ruff: noqa: E501  (cells of students, one a line)
RIGHT: dict[tuple[str, str], list[dict[str, str]]] = {
    ("lab00", "task1"): [{"task1-stub": f"def read_report(report):\n    {body}"} for body in (
        "return dict(detection_s=report.facts['detection_s'], steps_lost=report.facts['steps_lost'], source=report.source, slowest_phase=max(report.phases, key=lambda k: report.phases[k]))",
        "p = sorted(report.phases.items(), key=lambda kv: kv[1])\n    return {'slowest_phase': p[-1][0], 'source': report.source, 'steps_lost': report.steps_lost, 'detection_s': report.detection_s}",
        "return {**{k: report.facts[k] for k in ('detection_s', 'steps_lost', 'source')}, 'slowest_phase': max(report.phases.items(), key=lambda kv: kv[1])[0]}",
        "d = {}\n    for k in ('detection_s', 'steps_lost', 'source'): d[k] = getattr(report, k)\n    d['slowest_phase'] = max(report.phases, key=report.phases.__getitem__)\n    return d",
        "best = None\n    for name, s in report.phases.items():\n        if best is None or s > report.phases[best]: best = name\n    return {'detection_s': report.detection_s, 'steps_lost': report.steps_lost, 'source': report.source, 'slowest_phase': best, 'more': 1}")],
    ("lab02", "task1"): [{"task1-stub": _NUMBERS + body} for body in (
        "return not math.isfinite(float(loss))",
        "value = loss.item() if hasattr(loss, 'item') else loss\n        return math.isnan(value) or math.isinf(value)",
        "return not bool(torch.isfinite(torch.as_tensor(loss)).all())",
        "value = float(loss)\n        return value != value or abs(value) == float('inf')",
        "return bool((~torch.isfinite(torch.as_tensor(loss, dtype=torch.float64))).any())")],
    ("lab02", "task2"): [
        _progress(), _progress(limit="known = sorted(self.times)\n        return self.timeout_seconds if len(known) < 3 else max(1.0, 8 * statistics.median(known))"),
        _progress(note="self.times.append(now - self.since); self.times = self.times[-50:]"),
        _progress(look="elapsed = self.clock() - self.since\n        return bool(elapsed <= self.limit())"),
        _progress(limit="return self.timeout_seconds if len(self.times) < 3 else 8 * max(0.125, float(torch.tensor(self.times, dtype=torch.float64).quantile(0.5)))")],
    ("lab02", "task3"): [{"task3-stub": _MEMORY.format(body)} for body in (
        "return used > 0.9 * limit or bool(before and now > before[0] and used > before[1] and (limit - used) * (now - before[0]) < 5 * (used - before[1]))",
        "if used / limit > 0.9: return True\n        if before is None or now == before[0]: return False\n        return used + 5 * (used - before[1]) / (now - before[0]) > limit",
        "full = used > 0.9 * limit\n        if full or before is None: return full\n        pace = (used - before[1]) / max(now - before[0], 1e-9)\n        return pace > 0 and (limit - used) / pace < 5",
        "if used > limit * 9 / 10: return True\n        try: return 0 < (limit - used) / ((used - before[1]) / (now - before[0])) <= 5\n        except (TypeError, ZeroDivisionError): return False",
        "soon = used\n        if before is not None and now > before[0]: soon = used + max(0.0, (used - before[1]) / (now - before[0])) * 5.0\n        return used > 0.9 * limit or soon > limit")],
    ("lab02", "task4"): [_detector(), _detector(10.0), _detector(2.5, names=True), _detector(8.5, keep=20),
                         _detector(4.0, typical="sorted(gaps)[len(gaps) // 2]"), _detector(6.0, typical="(sum(gaps) / len(gaps))")],
    ("lab03", "task1"): [{"task1-stub": f"def refuse(snapshot, budgets):\n    {body}"} for body in (
        "first = next((f for f in snapshot.failures if f.fatal), None)\n    if first: return Abort(error='TrainingFailed', cause=first.cause, reason=first.detail)\n    spent = [f for f in snapshot.failures if not budgets.get(f.cause)]\n    if spent: return Abort(error='RecoveryExhausted', cause=spent[0].cause, reason='x')\n    if snapshot.step and not snapshot.holders and snapshot.saved is None: return Abort(error='StateLost', cause=snapshot.failures[0].cause, reason='')",
        "for f in snapshot.failures:\n        if f.fatal: return Abort(error='TrainingFailed', cause=f.cause, reason='')\n    for f in snapshot.failures:\n        if f.cause not in budgets or budgets[f.cause] <= 0: return Abort(error='RecoveryExhausted', cause=f.cause, reason='')\n    lost = snapshot.step > 0 and snapshot.holders < 1 and snapshot.saved is None\n    return Abort(error='StateLost', cause=snapshot.failures[0].cause, reason='') if lost else None")],
    ("lab03", "task2"): [_world(), _world(restart="tuple((f.node, f.local_rank) for f in snapshot.failures if f.local_rank is not None and f.node not in gone)"),
                         _world(reason="f'{len(dead)} are dead'"), _world(lost="dead"), _world(reason="'x'", lost="[*dead]")],
    ("lab03", "task3"): [_step(), _step(oom="any(f.cause == 'oom' for f in snapshot.failures)"), _step(oom="'oom' in {f.cause for f in snapshot.failures}", reason="'one sample'"),
                         _step(rest="if snapshot.skipped >= 3:\n        return Rollback(steps=10, skip=True) if snapshot.saved is not None else LowerRate()\n    return Skip()"),
                         _step(oom="snapshot.failures[0].cause == 'oom'")],
}
