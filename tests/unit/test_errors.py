"""The tree of errors: documented, carrying facts, and able to travel."""

from __future__ import annotations

import inspect
import json
import pickle
import re

import pytest

from ftlab import errors
from ftlab.errors import ConfigError, FtlabError, RecoveryExhausted, WaitTimeout, from_dict

CLASSES = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, FtlabError)]
NAMES = [each.__name__ for each in CLASSES]


def drawn_tree() -> dict[str, str]:
    """Each error in the module's docstring → the error it hangs below."""
    above: list[str] = []
    drawn: dict[str, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    ([│ ]*)([├└]── )?([A-Z]\w+)", line)
        if found:
            depth = len(found[1]) // 4 + 1 if found[2] else 0
            above[depth:] = [found[3]]
            drawn[found[3]] = above[depth - 1] if depth else ""
    return drawn


def test_the_docstring_draws_exactly_the_tree_there_is():
    real = {each.__name__: next((base.__name__ for base in each.__bases__ if issubclass(base, FtlabError)), "")
            for each in CLASSES}
    assert drawn_tree() == real


@pytest.mark.parametrize("kind", CLASSES, ids=NAMES)
def test_every_error_survives_pickling_with_all_it_knows(kind):
    error = kind("it broke", seen="smoke", hint="call somebody", cause="crash", history=[{"step": 3}])
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error) and again.args == ("it broke",)
    assert (again.message, again.seen, again.hint) == ("it broke", "smoke", "call somebody")
    assert again.cause == "crash" and again.history == [{"step": 3}] and again.facts == error.facts


@pytest.mark.parametrize("kind", CLASSES, ids=NAMES)
def test_every_error_survives_the_way_through_json(kind):
    error = kind("it broke", seen="smoke", hint="call somebody", cause="crash")
    again = from_dict(json.loads(json.dumps(error.to_dict())))
    assert type(again) is kind and str(again) == str(error) and again.cause == "crash"


@pytest.mark.parametrize(("seen", "hint", "text"), [
    ("", "", "it broke"), ("smoke", "", "it broke\n  seen: smoke"), ("", "run", "it broke\n  try: run"),
    ("smoke", "run", "it broke\n  seen: smoke\n  try: run"),
])
def test_an_error_says_what_happened_what_was_seen_and_what_to_try(seen, hint, text):
    assert str(FtlabError("it broke", seen=seen, hint=hint)) == text


@pytest.mark.parametrize("name", ["Nonsense", "annotations", "Any", "from_dict", "", None, "ValueError", "__name__"])
def test_a_name_that_is_no_error_becomes_the_root(name):
    again = from_dict({"error": name, "message": "it broke"})
    assert type(again) is FtlabError and str(again) == "it broke"


def test_a_description_without_anything_is_still_an_error():
    assert type(from_dict({})) is FtlabError


def test_the_usual_handlers_catch_them_too():
    with pytest.raises(ValueError):
        raise ConfigError("no")
    with pytest.raises(TimeoutError):
        raise WaitTimeout("no")


def test_facts_are_attributes():
    error = RecoveryExhausted("no recovery is left", cause="crash", history=[1, 2])
    assert (error.cause, error.history) == ("crash", [1, 2])
