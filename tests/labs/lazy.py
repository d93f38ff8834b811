"""Answers without work, for every task: constants, nothing at all, a bare super() call, a given cell pasted in."""
# ruff: noqa: E501  (cells of students, one a line)

from __future__ import annotations

_NOTHING = '''
class {name}{base}:
    def __init__(self, *args, **more): pass
    def __getattr__(self, name): return lambda *args, **more: {value}
'''


def _class(name: str, value: str = "None", base: str = "") -> str:
    return _NOTHING.format(name=name, base=base, value=value)


_FIXED_LIMIT = '''
class ProgressMonitor(NumberMonitor):
    def __init__(self, timeout_seconds=300.0, clock=time.monotonic):
        self.timeout_seconds, self.clock = timeout_seconds, clock
        self.since = clock()
    def start(self): self.since = self.clock()
    def step_done(self): self.since = self.clock()
    def limit(self): return self.timeout_seconds
    def check_progress(self): return self.clock() - self.since <= self.timeout_seconds
'''
_LOOP = "def my_train_with_auto_recovery(train_epoch, model, optimizer, loader, epochs, manager, monitor, max_failures=3):\n"

LAZY: dict[tuple[str, str], dict[str, dict[str, str]]] = {  # (lab, task) → what was done instead → the cells
    ("lab00", "task1"): {
        "nothing": {"task1-stub": "def read_report(report): pass"},
        "constants": {"task1-stub": "def read_report(report): return {'detection_s': 0.0658, 'steps_lost': 0, 'source': 'live', "
                                    "'slowest_phase': 'first_step'}"},
        "all facts": {"task1-stub": "def read_report(report): return {}"},
    },
    ("lab00", "task2"): {
        "nothing": {"task2-stub": "my_guess = {}"}, "all": {"task2-stub": "my_guess = dict(kill=True, hang=True, blackout=True)"},
        "none": {"task2-stub": "my_guess = dict(kill=False, hang=False, blackout=False)"},
    },
    ("lab01", "task1"): {
        "nothing": {"task1-stub": _class("SavingManager")},
        "constants": {"task1-stub": _class("SavingManager", "{'epoch': 10, 'metrics': {'loss': 1.25}}")},
    },
    ("lab01", "task2"): {
        "nothing": {"task2-stub": "class SafeManager(SavingManager):\n    def write(self, path, raw): pass"},
        "super": {"task2-stub": "class SafeManager(SavingManager): pass"},
        "pasted": {"task2-stub": "class SafeManager(SavingManager):\n    def write(self, path, raw): path.write_bytes(raw)"},
    },
    ("lab01", "task3"): {
        "super": {"task3-stub": "class TidyManager(SafeManager):\n    def cleanup_old_checkpoints(self): pass"},
        "nothing": {"task3-stub": "class TidyManager(SafeManager):\n    def save_checkpoint(self, *args): pass\n"
                                  "    def load_checkpoint(self, *args): pass\n    def cleanup_old_checkpoints(self): pass"},
        "raises": {"task3-stub": "class TidyManager(SafeManager):\n    def load_checkpoint(self, *args): raise ValueError\n"
                                 "    def cleanup_old_checkpoints(self): pass"},
    },
    ("lab01", "task4"): {
        "super": {"task4-stub": '''
class Batches:
    def __init__(self, size, batch, seed):
        self.size, self.batch, self.seed, self.epoch, self.position = size, batch, seed, 0, 0
    def __iter__(self): return self
    def __next__(self):
        if self.position >= self.size:
            self.epoch, self.position = self.epoch + 1, 0
        own = torch.Generator().manual_seed(self.seed * 1000 + self.epoch)
        order = torch.randperm(self.size, generator=own).tolist()
        ids = order[self.position:self.position + self.batch]
        self.position += len(ids)
        return ids
    def state_dict(self): return {}
    def load_state_dict(self, state): pass


class ExactManager(TidyManager):
    parts = {}
    def protect(self, **parts): self.parts = parts
    def state_of(self, *args): return super().state_of(*args)
    def put_back(self, *args): return super().put_back(*args)
'''},
        "nothing": {"task4-stub": _class("ExactManager") + _class("Batches")},
    },
    ("lab01", "task5"): {
        "super": {"task5-stub": "class MyManager(ExactManager): pass"},
        "nothing": {"task5-stub": "class MyManager(ExactManager):\n    def save_checkpoint(self, *args): pass"},
        "raises": {"task5-stub": "class MyManager(ExactManager):\n    def save_checkpoint(self, *args): raise RuntimeError"},
    },
    ("lab02", "task1"): {str(value): {"task1-stub": f"class NumberMonitor:\n    def detect_nan_inf(self, loss): return {value}"}
                         for value in (True, False, None)},
    ("lab02", "task2"): {
        "True": {"task2-stub": _FIXED_LIMIT.replace("return self.clock() - self.since <= self.timeout_seconds", "return True")},
        "False": {"task2-stub": _FIXED_LIMIT.replace("return self.clock() - self.since <= self.timeout_seconds", "return False")},
        "pasted": {"task2-stub": _FIXED_LIMIT},
    },
    ("lab02", "task3"): {str(value): {"task3-stub": "class MyMonitor(ProgressMonitor):\n"
                                      "    def __init__(self, timeout_seconds=300.0, clock=time.monotonic, memory=None):\n"
                                      "        super().__init__(timeout_seconds, clock)\n"
                                      f"    def detect_oom(self): return {value}"} for value in (True, False, None)},
    ("lab02", "task4"): {
        "pasted": {"task4-stub": '''
class MyDetector(FixedDetector):
    def __init__(self, threshold=5.0, patience_s=3.0):
        super().__init__()
'''},
        "ALIVE": {"task4-stub": "class MyDetector:\n    def __init__(self, threshold=5.0): pass\n    def heard(self, at): pass\n"
                                "    def judge(self, now): return Verdict.ALIVE"},
        "DEAD": {"task4-stub": "class MyDetector:\n    def __init__(self, threshold=5.0): pass\n    def heard(self, at): pass\n"
                               "    def judge(self, now): return Verdict.DEAD"},
    },
    ("lab02", "task5"): {str(value): {"task5-stub": f"my_threshold = {value}"} for value in (0, 5, 1000)},
    ("lab03", "task1"): {
        "None": {"task1-stub": "def refuse(snapshot, budgets): pass"},
        "Abort": {"task1-stub": "def refuse(snapshot, budgets): return Abort(error='RecoveryExhausted', cause='node', reason='')"},
        "pasted": {"task1-stub": "def refuse(snapshot, budgets): return give_up(snapshot, budgets)"},
    },
    ("lab03", "task2"): {
        "nothing": {"task2-stub": "def mend_world(snapshot): pass"},
        **{action: {"task2-stub": f"def mend_world(snapshot): return {action}"} for action in ("Continue()", "Wait(reason='')")},
    },
    ("lab03", "task3"): {
        "nothing": {"task3-stub": "def mend_step(snapshot): pass"},
        **{action: {"task3-stub": f"def mend_step(snapshot): return {action}"}
           for action in ("Skip()", "Retry()", "Rollback(condemn=True)", "Split()", "LowerRate()")},
    },
    ("lab03", "task5"): {
        "nothing": {"task5-stub": _LOOP + "    return 0"},
        "a plain loop": {"task5-stub": _LOOP + "    for epoch in range(epochs): train_epoch(model, loader, optimizer)\n    return 0"},
        "gives up": {"task5-stub": _LOOP + "    try:\n        train_epoch(model, loader, optimizer)\n    finally:\n        return 0"},
    },
}
