"""`ftlab grade --similar`: copies are found in spite of new names and comments, answers of one's own are not."""

from __future__ import annotations

import json

from ftlab.cli.main import main
from ftlab.grading.marking.similarity import similar
from tests.labs import quick
from tests.labs.students import submission

GIVEN = quick.untouched("lab03")
OWN = '''
def refuse(snapshot, budgets):
    """Mine."""
    fatal = [each for each in snapshot.failures if each.fatal]
    if fatal:
        return Abort(error="TrainingFailed", cause=fatal[0].cause, reason=fatal[0].detail)
    empty = [each.cause for each in snapshot.failures if budgets.get(each.cause, 0) <= 0]
    if empty:
        return Abort(error="RecoveryExhausted", cause=empty[0], reason="no budget")
    nobody = not snapshot.holders and snapshot.saved is None
    lost = Abort(error="StateLost", cause=snapshot.failures[0].cause, reason="gone")
    return lost if snapshot.step and nobody else None
'''


def reference() -> dict[str, str]:
    return {cell.id: cell.source.replace("### BEGIN SOLUTION", "").replace("### END SOLUTION", "")
            for cell in quick.cells_of("lab03") if cell.id in GIVEN}


def test_a_copy_with_other_names_is_found_and_answers_of_ones_own_are_not():
    first = reference()
    copy = {name: source.replace("failure", "trouble").replace("dead", "gone").replace("left", "others")
            + "\n# all mine\n" for name, source in first.items()}
    pairs = similar({"anna": first, "ben": copy, "carl": {**GIVEN, "task1-stub": OWN}}, GIVEN)
    assert [(pair.one, pair.two) for pair in pairs] == [("anna", "ben")]
    assert pairs[0].share > 0.8 and "task2-stub" in pairs[0].cells


def test_untouched_notebooks_are_not_alike_beyond_what_was_given():
    assert similar({"anna": GIVEN, "ben": dict(GIVEN), "carl": {}}, GIVEN) == []


def test_the_command_reads_what_was_handed_in_and_says_pairs(course, capsys):
    long = "\n".join(f"def helper_{n}(values):\n    return [each * {n} + len(values) for each in values if each > {n}]"
                     for n in range(6))
    for student in ("anna", "ben"):
        folder = course.root / "submitted" / student / "lab90"
        folder.mkdir(parents=True)
        parcel = submission(course, "lab90", student, {"task1-stub": long})
        for name, raw in parcel.files.items():
            (folder / name).write_bytes(raw)
    assert main(["grade", "lab90", "--similar"]) == 0
    assert capsys.readouterr().out.startswith("anna and ben: 100%")
    assert main(["grade", "lab90", "--similar", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["similar"][0]["share"] == 1.0
