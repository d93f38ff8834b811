"""Wrong solutions of lab 02."""

from __future__ import annotations

from tests.labs.wrong import Wrong

_NUMBERS = '''
class NumberMonitor:
    def detect_nan_inf(self, loss):
        {}
'''

_PROGRESS = '''
class ProgressMonitor(NumberMonitor):
    def __init__(self, timeout_seconds=300.0, clock=time.monotonic):
        self.timeout_seconds, self.clock = timeout_seconds, clock
        self.since, self.times = clock(), {keep}

    def start(self):
        self.since = self.clock()

    def step_done(self):
        now = self.clock()
        self.times.append(now - self.since)
        self.since = now

    def limit(self):
        if len(self.times) < {enough}:
            return self.timeout_seconds
        return max({floor}, 8 * {typical}(self.times))

    def check_progress(self):
        {look}
'''

_MEMORY = '''
class MyMonitor(ProgressMonitor):
    def __init__(self, timeout_seconds=300.0, clock=time.monotonic, memory=read_memory):
        super().__init__(timeout_seconds, clock)
        self.memory, self.last, self.found = memory, None, False

    def detect_oom(self):
        now, (used, limit) = self.clock(), self.memory()
        before, self.last = self.last, (now, used)
        {}
'''

_DETECTOR = '''
class MyDetector:
    def __init__(self, threshold=5.0, patience_s=3.0):
        self.threshold, self.patience_s = threshold, patience_s
        self.newest, self.intervals, self.dead = None, deque(maxlen=50), False

    def heard(self, at):
        {heard}
        if self.newest is not None:
            self.intervals.append(at - self.newest)
        self.newest = at

    def judge(self, now):
        if self.newest is None:
            return {never}
        silence = now - self.newest
        limit = {limit}
        {judge}
'''
_GOOD_LOOK = "return self.clock() - self.since <= self.limit()"
_GOOD_LIMIT = "self.threshold * statistics.median(self.intervals) if len(self.intervals) >= 5 else self.patience_s"
_GOOD_JUDGE = ("return Verdict.DEAD if silence > limit else Verdict.SUSPECT if silence > limit / 2 else Verdict.ALIVE")
_NEWER = "if self.newest is not None and at <= self.newest: return"


def _progress(**change: str) -> dict[str, str]:
    good = {"keep": "deque(maxlen=50)", "enough": "3", "floor": "1.0", "typical": "statistics.median",
            "look": _GOOD_LOOK}
    return {"task2-stub": _PROGRESS.format(**{**good, **change})}


def _detector(**change: str) -> dict[str, str]:
    good = {"heard": _NEWER, "never": "Verdict.ALIVE", "limit": _GOOD_LIMIT, "judge": _GOOD_JUDGE}
    return {"task4-stub": _DETECTOR.format(**{**good, **change})}


WRONG: dict[str, Wrong] = {
    "NaN compared with ==": Wrong(
        cells={"task1-stub": _NUMBERS.format("return float(loss) in (float('nan'), float('inf'), -float('inf'))")},
        points={"task1-check": 0.5, "task1-hidden": 0.5}),
    "ignores inf": Wrong(
        cells={"task1-stub": _NUMBERS.format("return math.isnan(float(loss))")},
        points={"task1-check": 1.0, "task1-hidden": 0.5}),
    "answers with a tensor": Wrong(
        cells={"task1-stub": _NUMBERS.format("return ~torch.isfinite(torch.as_tensor(loss))")},
        points={"task1-check": 0.0, "task1-hidden": 0.0}),
    "cannot take tensors": Wrong(
        cells={"task1-stub": _NUMBERS.format("return not math.isfinite(loss) if isinstance(loss, float) else False")},
        points={"task1-check": 1.5, "task1-hidden": 0.0}),
    "a fixed limit": Wrong(
        cells=_progress(look="return self.clock() - self.since <= self.timeout_seconds"),
        points={"task2-check": 0.5, "task2-hidden": 0.0}),
    "resets on every check": Wrong(
        cells=_progress(look="now = self.clock(); well = now - self.since <= self.limit(); self.since = now; "
                             "return well"),
        points={"task2-check": 0.0, "task2-hidden": 0.0}),
    "a mean for a median": Wrong(
        cells=_progress(typical="statistics.fmean"), points={"task2-check": 2.5}),
    "no floor of a second": Wrong(
        cells=_progress(floor="0.0"), points={"task2-check": 1.5}),
    "remembers all steps": Wrong(
        cells=_progress(keep="[]"), points={"task2-hidden": 1.0}),
    "trusts the first step": Wrong(
        cells=_progress(enough="1"), points={"task2-check": 2.5}),
    "looks at the level only": Wrong(
        cells={"task3-stub": _MEMORY.format("return used > 0.9 * limit")},
        points={"task3-check": 1.0, "task3-hidden": 0.5}),
    "never forgets": Wrong(
        cells={"task3-stub": _MEMORY.format(
            "pace = 0 if before is None else (used - before[1]) / (now - before[0])\n"
            "        self.found = self.found or used > 0.9 * limit or (pace > 0 and (limit - used) / pace < 5)\n"
            "        return self.found")},
        points={"task3-check": 1.5}),
    "a pace per look": Wrong(
        cells={"task3-stub": _MEMORY.format(
            "pace = 0 if before is None else used - before[1]\n"
            "        return used > 0.9 * limit or (pace > 0 and (limit - used) / pace < 5)")},
        points={"task3-hidden": 0.0}),
    "accuses slow nodes": Wrong(
        cells=_detector(limit="0.11 * self.threshold"),
        points={"task4-check": 0.0, "task4-hidden": 0.0}),
    "never accuses": Wrong(
        cells=_detector(judge="return Verdict.ALIVE"),
        points={"task4-check": 0.57, "task4-hidden": 0.0, "task5-check": 0.0}),
    "accuses late heartbeats": Wrong(
        cells=_detector(limit=_GOOD_LIMIT.replace("self.threshold", "0.3 * self.threshold")),
        points={"task4-check": 0.57, "task4-hidden": 0.0, "task5-check": 0.0}),
    "accuses who was never heard": Wrong(
        cells=_detector(never="Verdict.DEAD"), points={"task4-check": 3.43}),
    "believes heartbeats out of order": Wrong(
        cells=_detector(heard="pass"), points={"task4-check": 3.43}),
    "remembers a verdict": Wrong(
        cells=_detector(judge="self.dead = self.dead or silence > limit\n        "
                              "return Verdict.DEAD if self.dead else Verdict.SUSPECT if silence > limit / 2 else "
                              "Verdict.ALIVE"),
        points={"task4-check": 2.29, "task4-hidden": 0.0, "task5-check": 0.0}),
    "never suspects": Wrong(
        cells=_detector(judge="return Verdict.DEAD if silence > limit else Verdict.ALIVE"),
        points={"task4-check": 3.43}),
    "a threshold that is too small": Wrong(
        cells={"task5-stub": "my_threshold = 8"}, points={"task5-check": 0.0}),
    "a threshold that is too large": Wrong(
        cells={"task5-stub": "my_threshold = 100"}, points={"task5-check": 0.0}),
}
