"""What `auto` means: containers where an engine answers and needs no image to be built, else processes."""

from __future__ import annotations

import pytest

from ftlab.cluster import abilities, engine, image, netrules
from ftlab.cluster.cluster import choose_backend
from ftlab.config import ClusterConfig


@pytest.mark.parametrize(("no_image", "no_engine", "chosen"), [
    ("", "", "docker"), ("needs Linux", "", "process"), ("", "no engine runs here", "process")])
def test_auto_takes_containers_only_if_they_work_at_once(monkeypatch, no_image, no_engine, chosen):
    monkeypatch.setattr(image, "possible", lambda: no_image)
    monkeypatch.setattr(engine, "available", lambda: no_engine)
    assert choose_backend("auto") == chosen
    assert (choose_backend("process"), choose_backend("docker")) == ("process", "docker")


def test_nodes_are_processes_unless_somebody_asks():
    assert ClusterConfig().backend == "process"


@pytest.mark.parametrize(("need", "backend", "words"), [
    ("disk", "process", "needs containers"), ("delay", "process", "needs containers"), ("disk", "docker", "disk_mb")])
def test_a_need_that_cannot_be_met_names_what_would_help(need, backend, words):
    assert words in abilities.missing([need], ClusterConfig(backend=backend))


def test_rules_spare_those_who_stay_together_and_go_one_way_if_asked():
    both = netrules.drop_rules(netrules.CUT, friends=["10.0.0.3"])
    assert both.count("-j DROP") == 2 and both.count("10.0.0.3 -j RETURN") == 2
    sends = netrules.drop_rules(netrules.CUT, "sends", ["10.0.0.3"])
    assert "INPUT" not in sends and "-d 10.0.0.3 -j RETURN" in sends and sends.index("RETURN") < sends.index("DROP")
    assert "--probability 0.300000" in netrules.drop_rules(netrules.LOSS, loss=0.3)
    assert "INPUT" not in netrules.lift_rules(netrules.CUT, "sends")
