"""Cgroups that systemd delegates: when a scope is asked for, and how a launcher makes room in one (on a made-up v2)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftlab.cluster import cgroups, delegation
from ftlab.cluster.delegation import settle


@pytest.fixture
def scope(tmp_path) -> dict[str, Path]:
    """A v2 hierarchy in which this process alone is in a scope."""
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    home = root / "user.slice" / "run-1.scope"
    home.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/user.slice/run-1.scope\n")
    for level in (root, home.parent, home):
        (level / "cgroup.controllers").write_text("cpu io memory pids\n")
        (level / "cgroup.subtree_control").write_text("")
    (home / "cgroup.procs").write_text(f"{os.getpid()}\n")
    return {"proc": proc, "cgroup_root": root}


def test_a_launcher_goes_into_a_leaf_so_that_its_scope_can_hand_memory_on(scope):
    home = scope["cgroup_root"] / "user.slice" / "run-1.scope"
    assert settle(**scope)
    [leaf] = home.glob("ftlab-launcher-*")
    assert (leaf / "cgroup.procs").read_text() == str(os.getpid())
    assert (home / "cgroup.subtree_control").read_text() == "+memory"  # a real one keeps what was written before


def test_a_cgroup_with_others_in_it_is_left_alone(scope):
    home = scope["cgroup_root"] / "user.slice" / "run-1.scope"
    (home / "cgroup.procs").write_text(f"{os.getpid()}\n1\n")
    assert not settle(**scope) and not list(home.glob("ftlab-*"))


def test_where_memory_is_handed_on_above_nothing_is_moved(scope):
    home = scope["cgroup_root"] / "user.slice" / "run-1.scope"
    (home.parent / "cgroup.subtree_control").write_text("memory pids\n")
    assert not settle(**scope) and not list(home.glob("ftlab-*"))


@pytest.mark.parametrize(("cages", "no_scope", "wanted"), [
    ("", "", False), ("no permission", "no systemd", False), ("no permission", "", True)])
def test_a_scope_is_asked_for_only_where_it_helps(monkeypatch, cages, no_scope, wanted):
    monkeypatch.setattr(cgroups, "available", lambda: cages)
    monkeypatch.setattr(delegation, "no_scope", lambda: no_scope)
    assert bool(delegation.scope()) is wanted


@pytest.mark.parametrize(("cages", "in_scope", "said"), [
    ("", "no systemd", ""), ("no permission", "", ""),
    ("no permission", "no systemd", "no permission; systemd gives none: no systemd")])
def test_why_the_kernel_cannot_kill_for_memory(monkeypatch, cages, in_scope, said):
    monkeypatch.setattr(cgroups, "available", lambda: cages)
    monkeypatch.setattr(delegation, "_no_cages_in_scope", lambda: in_scope)
    assert delegation.why_no_cages() == said


def test_a_machine_without_a_user_manager_gives_no_scope(monkeypatch):
    delegation.no_scope.cache_clear()
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    try:
        assert "systemd" in delegation.no_scope()
    finally:
        delegation.no_scope.cache_clear()
