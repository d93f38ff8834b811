"""Errors of an engine in words, and only what carries our labels."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import pytest

from ftlab.cluster import engine
from ftlab.cluster.engine import CLUSTER, FOLDER, USER, Owned, explain, owned
from ftlab.errors import ClusterError


def wrapped(inner: Exception) -> Exception:
    """As docker hands it on: the real cause is among the arguments of what its own error was raised from."""
    outer = RuntimeError("Error while fetching server API version", ConnectionError("Connection aborted.", inner))
    return outer


@pytest.mark.parametrize(("cause", "message", "hint"), [
    (PermissionError(13, "Permission denied"), "refuses this user", "usermod -aG docker"),
    (FileNotFoundError(2, "No such file"), "no Docker engine runs", "service docker start"),
    (ConnectionRefusedError(111, "refused"), "no Docker engine runs", "service docker start"),
    (TimeoutError("slow"), "does not answer", "docker info"),
])
def test_every_reason_has_its_words_and_a_command(cause, message, hint):
    error = explain(wrapped(cause))
    assert isinstance(error, ClusterError) and message in error.message and hint in error.hint


def test_a_missing_package_is_named(monkeypatch):
    real = builtins.__import__

    def without_docker(name: str, *args: Any, **options: Any) -> Any:
        if name.split(".")[0] == "docker":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_docker)
    with pytest.raises(ClusterError, match="docker package") as caught:
        engine.connect()
    assert "ftlab[docker]" in caught.value.hint
    assert "docker package" in engine.available()


class Engine:
    """Holds containers, networks and volumes, and filters by labels as the real one does."""

    def __init__(self, *marks: dict[str, str]) -> None:
        self.marks = marks

    def _matching(self, filters: dict[str, list[str]]) -> list[dict[str, str]]:
        def fits(marks: dict[str, str], wanted: str) -> bool:
            key, _, value = wanted.partition("=")
            return key in marks and value in ("", marks[key])
        return [marks for marks in self.marks if all(fits(marks, each) for each in filters["label"])]

    def containers(self, all: bool, filters: dict[str, list[str]]) -> list[dict[str, Any]]:
        return [{"Names": [f"/{marks['name']}"], "Id": "1", "Labels": marks} for marks in self._matching(filters)]

    def networks(self, filters: dict[str, list[str]]) -> list[dict[str, Any]]:
        return [{"Name": marks["name"], "Labels": marks} for marks in self._matching(filters)]

    def volumes(self, filters: dict[str, list[str]]) -> dict[str, Any]:
        return {"Volumes": [{"Name": marks["name"], "Labels": marks} for marks in self._matching(filters)] or None}


def test_only_this_users_labels_are_looked_for():
    mine = {CLUSTER: "ft-1", FOLDER: "/f/ft-1", USER: str(os.getuid())}
    found = owned(Engine({**mine, "name": "a"}, {**mine, CLUSTER: "ft-2", "name": "b"},
                         {**mine, USER: "4711", "name": "c"}, {"name": "d"}))
    assert [(each.cluster, each.containers) for each in found] == [("ft-1", ["a"]), ("ft-2", ["b"])]
    assert found[0].folder == Path("/f/ft-1") and len(found[0]) == 3


def test_one_cluster_can_be_asked_for():
    mine = {CLUSTER: "ft-1", USER: str(os.getuid()), "name": "a"}
    assert [each.cluster for each in owned(Engine(mine, {**mine, CLUSTER: "ft-12"}), "ft-1")] == ["ft-1"]


def test_nobody_is_asked_where_there_is_no_socket(monkeypatch):
    monkeypatch.setattr(engine, "SOCKETS", ())
    monkeypatch.setattr(engine, "docker_host", lambda: "")
    monkeypatch.setattr(engine, "connect", lambda *args: pytest.fail("asked"))
    assert engine.look() == []


def test_things_done_together_hand_on_the_first_error():
    def fail() -> None:
        raise ValueError("one of them")

    assert engine.together([]) == []
    with pytest.raises(ValueError, match="one of them"):
        engine.together([fail, lambda: 1])


def test_an_owned_thing_counts_containers_networks_and_volumes():
    assert len(Owned("ft-1", Path("/f"), ["a", "b"], ["n"], ["v"])) == 4
