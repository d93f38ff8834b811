"""What student's code finds in its sandbox: scenes and arguments, but neither the judges nor the reference."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cloudpickle
import pytest

from ftlab.cluster import jail
from ftlab.cluster.sandbox import Limits, choose
from ftlab.grading.stage import Play, Stage
from ftlab.grading.stage.package import REFERENCE, SCENES
from ftlab.grading.stage.play import ask
from tests.conftest import require
from tests.limits import SOON_S

LABS = ("lab00", "lab01", "lab02", "lab03")
GRADING = Path(__file__).parents[2] / "ftlab" / "grading"
USES = {  # one line that would do the work of a lab
    "lab00": "from ftlab.grading.lab00.checks import _figures",
    "lab01": "import ftlab; ftlab.DistributedCheckpointManager('/tmp/c')",
    "lab02": "import ftlab; ftlab.HealthMonitor().detect_nan_inf(1.0)",
    "lab03": "from ftlab.policy import decide; decide(None, {})",
}


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as what stands in a notebook


def look_around() -> list[str]:
    """Every file of ftlab, and every file that is named like a judge, wherever it is."""
    import os

    import ftlab
    root = os.path.dirname(ftlab.__file__)
    return sorted(os.path.relpath(os.path.join(folder, name), root)
                  for folder, _, names in os.walk(root) for name in names)


def attempt(source: str) -> str:
    """What comes of it."""
    try:
        exec(source, {})
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "it worked"


@pytest.fixture(scope="module", params=LABS)
def sandboxed(request):
    reason = jail.why_not()
    require("namespaces", not reason, reason)
    with Stage(preload=(), opener=choose("namespaces", Limits()).opener, labs=[request.param]) as stage:
        yield request.param, stage


def test_a_sandbox_holds_scenes_and_nothing_that_judges(sandboxed):
    lab, stage = sandboxed
    found = stage.run(Play.of(ask, look_around, args=[]), SOON_S).value
    graded = {Path(name) for name in found if name.startswith("grading/lab")}
    assert {str(name) for name in graded if name.suffix == ".py"} == {
        f"grading/{lab}/{name}.py" for name in SCENES if (GRADING / lab / f"{name}.py").exists()}
    assert all(name.name.split(".")[0] in SCENES for name in graded)
    words = ("checks", "cases", "situations", "recorded", "trial", "crashes.", "exam", "card", "course", "jsonl")
    assert [name for name in found if name.startswith("grading/") and any(each in name for each in words)] == []
    assert {name for name in found if name.startswith("grading/marking/") and name.endswith(".py")} == {
        "grading/marking/__init__.py", "grading/marking/play.py"}


def test_no_value_of_a_check_is_written_in_what_a_sandbox_holds(sandboxed):
    """The seeds of hidden tests stand in the authored notebooks only."""
    lab, _ = sandboxed
    [path] = (GRADING.parents[1] / "solutions" / lab).glob("*.ipynb")
    hidden = [line for cell in json.loads(path.read_text())["cells"] for line in cell["source"]
              if "check." in line and "seed=" in line]
    seeds = {word.split("=")[1].strip(",)\n") for line in hidden for word in line.split() if word.startswith("seed=")}
    kept = [file.read_text() for name in SCENES if (file := GRADING / lab / f"{name}.py").exists()]
    assert not [seed for seed in seeds if any(seed in text for text in kept)]


def test_the_reference_of_a_lab_cannot_be_used_while_it_is_graded(sandboxed):
    lab, stage = sandboxed
    found = stage.run(Play.of(ask, attempt, args=[USES[lab]]), SOON_S).value
    assert found.startswith(("ImportError", "ModuleNotFoundError")), found
    if lab in REFERENCE:
        assert f"is the reference of what {lab} asks for" in found


def test_questions_are_answered_one_by_one_and_an_end_is_told(sandboxed):
    _, stage = sandboxed
    with stage.answering(Play.of_any(counting), SOON_S) as asked:
        assert [asked(number).value for number in (1, 2, 3)] == [[1], [1, 2], [1, 2, 3]]
        assert asked("stop").ended and not asked(4).ok
    assert stage.run(Play.of(ask, attempt, args=["pass"]), SOON_S).value == "it worked"


def counting(*_):
    import os
    seen = []

    def answer(question):
        if question == "stop":
            os._exit(3)
        seen.append(question)
        return seen

    return answer
