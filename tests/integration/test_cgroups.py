"""Cages for real: the kernel kills for memory and throttles the CPU; nothing is left behind. v2 on a made-up tree."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from ftlab.cluster.cgroups import LABEL, Cage, CpuCage, MemoryCage, available, sweep
from ftlab.cluster.lookout import Lookout
from ftlab.errors import ConfigError, FaultUnavailable
from ftlab.health.kernel import find_cgroup
from ftlab.health.memory import OomCount, explain_end, find_limits, tightest
from tests.conftest import require
from tests.limits import SOON_S

MB = 1 << 20


@pytest.fixture
def cages() -> Iterator[None]:
    """Cages work here, and the test leaves none behind."""
    for kind in (MemoryCage, CpuCage):
        require("cgroups", not available(kind), available(kind))
    yield
    assert left_behind() == []


def left_behind() -> list[Path]:
    groups = [group for controller in ("memory", "cpu") if (group := find_cgroup(controller))]
    return [each for group in groups for level in group.levels() for each in level.glob(f"{LABEL}*-{os.getpid()}-*")]


@contextmanager
def child(work: Callable[[], object]) -> Iterator[tuple[int, Callable[[], None]]]:
    """A fork that does some work when told to: its pid, and a function that tells it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(int(SOON_S) * 2)
            os.read(reader, 1)
            work()
        finally:
            os._exit(0)
    os.close(reader)
    try:
        yield pid, lambda: os.write(writer, b"x") and None
    finally:
        os.close(writer)
        with suppress(ChildProcessError):  # its end was taken already
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def end_of(pid: int) -> int:
    """The wait status of a child that is about to end."""
    deadline = time.monotonic() + SOON_S
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        assert time.monotonic() < deadline, "it did not end"
        time.sleep(0.01)


def take(size: int) -> Callable[[], object]:
    return lambda: len(bytearray(b"x") * size)


def test_the_kernel_kills_whoever_takes_too_much_and_says_so(cages):
    with MemoryCage() as cage, child(take(256 * MB)) as (pid, go):
        assert cage.hold([pid]) == 1 and cage.pids() == [pid]
        cage.limit(64 * MB)
        count = OomCount.of(pid)
        before = count.read()
        limits = find_limits(pid)
        assert tightest(limits).where == f"cgroup {cage.group.path}" and tightest(limits).limit_bytes == 64 * MB
        go()
        status = end_of(pid)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert cage.kills() == 1
        assert explain_end(status, before, count.read()).for_memory is True


def test_a_kill_by_somebody_else_is_not_counted(cages):
    with MemoryCage() as cage, child(take(1)) as (pid, _):
        cage.hold([pid])
        count = OomCount.of(pid)
        before = count.read()
        os.kill(pid, signal.SIGKILL)
        assert explain_end(end_of(pid), before, count.read()).for_memory is False and cage.kills() == 0


def test_a_lookout_that_looks_while_a_worker_dies_still_knows_why_it_died(cages):
    """An agent is moved into a cage; two of its workers are killed there for memory, then one by somebody."""
    reader, writer = os.pipe()
    lookout = Lookout()

    def worker() -> None:
        Path("/proc/self/oom_score_adj").write_text("1000")  # it, not its agent
        take(256 * MB)()
        time.sleep(SOON_S)

    def agent() -> None:
        for work, ending in ((worker, None), (worker, None), (lambda: time.sleep(SOON_S), signal.SIGKILL)):
            with child(work) as (pid, go):
                go()
                if ending:
                    os.kill(pid, ending)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                list(lookout.look(lookout._next, {}))  # before its end is taken
                os.write(writer, f"{lookout.explain(end_of(pid)).for_memory}\n".encode())
        os.close(writer)

    with MemoryCage() as cage, child(agent) as (pid, go):
        os.close(writer)
        cage.hold([pid])
        cage.limit(64 * MB)
        go()
        with os.fdopen(reader) as told:
            assert told.read().split() == ["True", "True", "False"] and cage.kills() == 2
        end_of(pid)


def test_whoever_stays_within_the_limit_lives_and_a_lifted_limit_is_none(cages):
    with MemoryCage() as cage, child(take(32 * MB)) as (small, go_small), child(take(128 * MB)) as (large, go_large):
        cage.hold([small, large])
        cage.limit(64 * MB)
        go_small()
        assert end_of(small) == 0 and cage.kills() == 0
        cage.limit(None)
        go_large()
        assert end_of(large) == 0 and cage.kills() == 0


def test_what_a_process_held_before_it_was_caged_does_not_count(cages):
    """The child holds 128 MB when it is moved; its charge stays where it was."""
    ready, done = os.pipe()

    def work() -> None:
        held = bytearray(b"x") * (128 * MB)
        os.write(done, b"x")
        time.sleep(SOON_S)
        del held

    with MemoryCage() as cage, child(work) as (pid, go):
        go()
        os.read(ready, 1)
        cage.limit(64 * MB)
        cage.hold([pid])
        assert psutil.Process(pid).memory_info().rss > 128 * MB and cage.kills() == 0
    os.close(ready)
    os.close(done)


def test_a_limit_below_the_use_is_refused_with_the_reason(cages):
    ready, done = os.pipe()

    def work() -> None:
        held = bytearray(b"x") * (64 * MB)
        os.write(done, b"x")
        time.sleep(SOON_S)
        del held

    with MemoryCage() as cage, child(work) as (pid, go):
        if cage.group.version == 2:
            pytest.skip("v2 kills instead")
        cage.hold([pid])
        go()
        os.read(ready, 1)
        with pytest.raises(FaultUnavailable, match="already use more"):
            cage.limit(8 * MB)
    os.close(ready)
    os.close(done)


@pytest.mark.parametrize("kind", [MemoryCage, CpuCage])
def test_removing_a_cage_sets_free_what_is_in_it_and_may_be_done_twice(cages, kind):
    with child(take(1)) as (pid, _):
        cage = kind("drill")
        assert cage.group.path.name.startswith("ftlab-drill-")
        cage.hold([pid])
        assert find_cgroup(kind.controller, pid) == cage.group
        cage.remove()
        cage.remove()
        assert find_cgroup(kind.controller, pid) == find_cgroup(kind.controller), "back in our own"
        assert os.waitpid(pid, os.WNOHANG) == (0, 0) and cage.pids() == []


def test_a_process_that_is_gone_cannot_be_held(cages):
    with child(take(1)) as (pid, go):
        go()
        end_of(pid)
    with MemoryCage() as cage:
        assert cage.hold([pid]) == 0


def spin() -> None:
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        pass


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def test_a_cpu_cage_makes_a_busy_process_stand_still(cages):
    with CpuCage() as cage, child(spin) as (pid, go):
        cage.limit(0.1)
        cage.hold([pid])
        go()
        begin = time.monotonic()
        deadline = begin + SOON_S
        while cage.throttled()[1] < 0.5 and time.monotonic() < deadline:
            time.sleep(0.05)
        periods, seconds = cage.throttled()
        assert periods > 3 and seconds >= 0.5
        assert cpu_seconds(pid) < 0.3 * (time.monotonic() - begin), "a tenth of a core, generously"


def test_a_lifted_cpu_limit_no_longer_throttles(cages):
    with CpuCage() as cage, child(spin) as (pid, go):
        cage.limit(0.05)
        cage.limit(None)
        cage.hold([pid])
        go()
        used, deadline = cpu_seconds(pid), time.monotonic() + SOON_S
        while cpu_seconds(pid) < used + 0.3 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert cage.throttled() == (0, 0.0)


@pytest.mark.parametrize("share", [0.0, -1.0, 0.0001])
def test_a_share_that_the_kernel_cannot_give_is_refused(cages, share):
    with CpuCage() as cage, pytest.raises(ConfigError, match=r"at least 0\.001"):
        cage.limit(share)


def test_the_smallest_share_and_more_than_one_core_are_accepted(cages):
    with CpuCage() as cage:
        for share in (0.001, 0.5, 1.0, 2.0, 0.001):
            cage.limit(share)


def test_a_memory_limit_of_nothing_is_refused(cages):
    with MemoryCage() as cage, pytest.raises(ConfigError, match="positive"):
        cage.limit(0)


def made_up_v2(tmp_path: Path, handed_on: str = "cpu memory") -> dict[str, Path]:
    """A v2 tree as systemd makes it for a user: app.slice hands the controllers on, the scope holds this process."""
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    scope = root / "app.slice" / "notebook.scope"
    scope.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/app.slice/notebook.scope\n")
    (root / "cgroup.controllers").write_text("cpu memory\n")
    (root / "app.slice" / "cgroup.subtree_control").write_text(f"{handed_on}\n")
    (root / "app.slice" / "cgroup.procs").write_text("")
    (scope / "cgroup.subtree_control").write_text("\n")
    return {"proc": proc, "cgroup_root": root}


def settings(cage: Cage) -> dict[str, str]:
    return {file.name: file.read_text() for file in cage.group.path.iterdir()}


def test_v2_cages_lie_beside_the_process_and_write_v2s_files(tmp_path):
    where = made_up_v2(tmp_path)
    memory = MemoryCage("drill", **where)
    assert memory.group.path.parent == where["cgroup_root"] / "app.slice"
    assert memory.home.path.name == "notebook.scope"
    (memory.group.path / "memory.swap.max").write_text("max")
    memory.limit(64 * MB)
    memory.hold([77])
    assert settings(memory) == {"memory.max": str(64 * MB), "memory.swap.max": "0", "cgroup.procs": "77"}
    memory.limit(None)
    assert settings(memory)["memory.max"] == settings(memory)["memory.swap.max"] == "max"
    (memory.group.path / "memory.events").write_text("oom 2\noom_kill 1\n")
    assert memory.kills() == 1


def test_v2_cpu_cages_write_v2s_files(tmp_path):
    cpu = CpuCage(**made_up_v2(tmp_path))
    cpu.limit(0.25)
    assert settings(cpu) == {"cpu.max": "5000 20000"}
    cpu.limit(0.01)
    assert settings(cpu) == {"cpu.max": "1000 100000"}
    cpu.limit(None)
    assert settings(cpu) == {"cpu.max": "max 20000"}
    (cpu.group.path / "cpu.stat").write_text("usage_usec 5\nnr_periods 9\nnr_throttled 4\nthrottled_usec 250000\n")
    assert cpu.throttled() == (4, 0.25)


def test_a_v2_tree_that_hands_nothing_on_is_explained(tmp_path):
    assert "hands the memory controller on" in available(**made_up_v2(tmp_path, handed_on="cpu"))


def test_a_machine_without_cgroups_is_explained(tmp_path):
    assert "no cgroups with a cpu controller" in available(CpuCage, proc=tmp_path, cgroup_root=tmp_path)
    with pytest.raises(FaultUnavailable, match="no cgroups with a memory controller"):
        MemoryCage(proc=tmp_path, cgroup_root=tmp_path)


def test_a_user_without_the_right_to_make_cgroups_is_told_so():
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory(prefix="ftlab-test-") as folder:  # not tmp_path, which root keeps to itself
        os.chmod(folder, 0o755)
        where = made_up_v2(Path(folder))
        (where["cgroup_root"] / "app.slice").chmod(0o555)
        pid = os.fork()
        if pid == 0:
            try:
                if os.geteuid() == 0:
                    os.setgid(65534)
                    os.setuid(65534)
                os.write(writer, available(**where).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader, encoding="utf-8") as pipe:
            assert "no permission to make a cgroup" in pipe.read()
        os.waitpid(pid, 0)


def test_cages_of_makers_that_are_gone_are_swept_and_others_stay(cages):
    maker = os.fork()
    if maker == 0:
        MemoryCage("orphan")
        os._exit(0)
    os.waitpid(maker, 0)
    with MemoryCage("kept") as kept:
        assert [name for name in sweep() if f"-{maker}-" in name] != []
        assert kept.group.path.is_dir() and sweep() == []
