"""Submissions that try for marks without the work: one per lab, each with all that was ever found to work.

They read the judges, import the reference, find the function that answers in the frames above them and say constants in
its place, leave notes for other children, and print what they learn of hidden tests.
"""

from __future__ import annotations

_SAY = '''
import json, os, sys


def pipes():
    """The pipe on which this child speaks, found in the frames above."""
    frame = sys._getframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("say"), int):
            return frame.f_locals["say"]
        frame = frame.f_back


def say(**facts):
    os.write(pipes(), (json.dumps(facts) + "\\n").encode())


def leave(**facts):
    say(**facts)
    os._exit(0)


def stolen(module, name):
    """Something of ours, if it is there."""
    import importlib
    try:
        return getattr(importlib.import_module(module), name)
    except Exception:
        return None
'''

LAB00 = {
    "task1-stub": _SAY + '''
def read_report(report):
    figures = stolen("ftlab.grading.lab00.checks", "_figures")
    if figures:
        return figures(report)
    leave(value={"detection_s": 0.1, "steps_lost": 0, "source": "live", "slowest_phase": "connect"})
''',
    "task2-stub": 'my_guess = {"kill": True, "hang": True, "blackout": True}',
}

_CONSTANTS = '''
class Forger:
    """Saves no weights, and says that it does."""

    def __init__(self, folder, keep_last_n=3, timeout_s=60.0):
        self.folder = folder

    def protect(self, **parts):
        pass

    def cleanup_old_checkpoints(self):
        pass

    def save_checkpoint(self, model, optimizer, epoch, metrics):
        open(f"{self.folder}/checkpoint_epoch_{epoch}.pt", "wb").close()
        open(f"/tmp/notes", "a").write(str(epoch))
        say(returned=True, value={"weights": {str(n): "w" for n in range(2000)}, "later": "l", "files": [],
                                  "saved": True, "there": True, "raised": "OSError"})
        os._exit(0)

    def load_checkpoint(self, model, optimizer, checkpoint_path=None):
        leave(digest="d", text="", value={"none": False, "epoch": 10, "metrics": {"loss": 1.25}, "weights": "w",
                                          "untouched": True, "later": "l", "rows": [], "saved": False, "raised": "E"})


class ForgedBatches:
    def __init__(self, size, batch, seed):
        pass

    def __next__(self):
        leave(value={"rows": [], "weights": "w"})
'''
LAB01 = {
    "task1-stub": _SAY + _CONSTANTS + "SavingManager = stolen('ftlab', 'DistributedCheckpointManager') or Forger",
    "task2-stub": "class SafeManager(Forger): pass", "task3-stub": "class TidyManager(Forger): pass",
    "task4-stub": "class ExactManager(Forger): pass\nclass Batches(ForgedBatches): pass",
    "task5-stub": "class MyManager(Forger): pass",
}

LAB02 = {
    "task1-stub": _SAY + '''
class NumberMonitor(ftlab.HealthMonitor):
    def __init__(self, *args, **more):
        cases = stolen("ftlab.grading.lab02", "cases")
        if cases:
            leave(value=cases.loss_cases(None)[0].answers)

    def detect_nan_inf(self, loss):
        leave(value=[True])
''',
    "task2-stub": '''
class ProgressMonitor(NumberMonitor):
    def start(self):
        leave(value=[True, False])
''',
    "task3-stub": '''
class MyMonitor(ProgressMonitor):
    def detect_oom(self):
        leave(value=[False] * 5)
''',
    "task4-stub": '''
class MyDetector:
    def __init__(self, threshold=5.0):
        say(value={"false_alarms": 0, "missed": 0, "worst_s": 0.5})
        say(value={"false_alarms": 0, "missed": 0, "worst_s": 0.5})

    def heard(self, at):
        leave(value={"false_alarms": 0, "missed": 0, "worst_s": 0.5})

    def judge(self, now):
        return "DEAD"
''',
    "task5-stub": "my_threshold = 20",
}

LAB03 = {
    "task1-stub": _SAY + '''
import ftlab.policy
refuse = ftlab.policy._refuse
''',
    "task2-stub": "def mend_world(snapshot): return ftlab.policy.decide(snapshot, {'node': 9, 'crash': 9, 'link': 9})",
    "task3-stub": "def mend_step(snapshot): return ftlab.policy.decide(snapshot, {'numbers': 9, 'oom': 9})",
    "my-decide": "my_decide = ftlab.policy.decide",
    "task5-stub": '''
def my_train_with_auto_recovery(train_epoch, model, optimizer, loader, epochs, manager, monitor, max_failures=3):
    reference = stolen("ftlab", "train_with_auto_recovery")
    if reference:
        return reference(train_epoch, model, optimizer, loader, epochs, manager.manager, monitor, max_failures)
    leave(value={"digest": "d", "calls": 6, "saved": [{"epoch": 6, "well": True}], "raised": ""})
''',
}

FORGERS = {"lab00": LAB00, "lab01": LAB01, "lab02": LAB02, "lab03": LAB03}
