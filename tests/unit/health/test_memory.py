"""Limits read from made-up trees, warnings before the kill, kills told apart, and the real texts of allocators."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy
import psutil
import pytest
import torch

from ftlab.errors import HealthError
from ftlab.health.kernel import find_cgroup
from ftlab.health.memory import (
    Limit,
    MemoryWatch,
    OomCount,
    Toll,
    explain_end,
    find_limits,
    is_out_of_memory,
    judge,
    tightest,
    trend,
)

MB = 1 << 20
NONE_V1 = "9223372036854771712"
V1 = "4:memory:{}\n3:cpu,cpuacct:/cpus\n1:name=systemd:/\n0::/\n"
V2 = "0::{}\n"


def write(top: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> SimpleNamespace:
    """An empty /proc and /sys/fs/cgroup, `limits(pid)` of them without the real machine, and `write`."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    root.mkdir()

    def limits(pid: int | None = None) -> list[Limit]:
        return [each for each in find_limits(pid, proc, root) if each.kind != "machine"]

    return SimpleNamespace(proc=proc, root=root, limits=limits, proc_files=lambda **files: write(proc, files),
                           tell=lambda text, who="self": write(proc, {f"{who}/cgroup": text.strip()}),
                           files=lambda files: write(root, files))


def v2_level(folder: str, limit: object, used: int, cache: int = 0) -> dict[str, object]:
    return {f"{folder}memory.max": limit, f"{folder}memory.current": used,
            f"{folder}memory.stat": f"anon {used}\ninactive_file {cache}\nactive_file 7"}


def v1_level(folder: str, limit: object, used: int, cache: int = 0) -> dict[str, object]:
    return {f"memory/{folder}memory.limit_in_bytes": limit, f"memory/{folder}memory.usage_in_bytes": used,
            f"memory/{folder}memory.stat": f"inactive_file 1\ntotal_inactive_file {cache}"}


def found(limits: list[Limit]) -> list[tuple[int, int]]:
    return [(each.limit_bytes // MB, each.used_bytes // MB) for each in limits]


def test_v2_limits_hold_on_every_level_up_to_the_root(machine):
    machine.tell(V2.format("/user.slice/job.scope"))
    machine.files({"cgroup.controllers": "cpu memory pids", **v2_level("user.slice/job.scope/", 900 * MB, 300 * MB),
                   **v2_level("user.slice/", 1000 * MB, 990 * MB, cache=90 * MB)})
    assert found(machine.limits()) == [(900, 300), (1000, 900)]
    assert tightest(machine.limits()).where == f"cgroup {machine.root / 'user.slice'}", "the neighbours filled it"


def test_v2_says_max_for_no_limit(machine):
    machine.tell(V2.format("/a"))
    machine.files({"cgroup.controllers": "memory", **v2_level("a/", "max", 300 * MB)})
    assert machine.limits() == []


def test_a_container_sees_its_own_cgroup_as_the_root(machine):
    machine.tell(V2.format("/"))
    machine.files({"cgroup.controllers": "memory", **v2_level("", 512 * MB, 100 * MB, cache=40 * MB)})
    assert found(machine.limits()) == [(512, 60)], "without the page cache"


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_that_is_told_its_path_on_the_host_still_finds_its_limit(machine, version):
    machine.tell((V1 if version == 1 else V2).format("/docker/0123abcd"))
    level = v1_level if version == 1 else v2_level
    machine.files({"cgroup.controllers": "memory", **level("", 512 * MB, 100 * MB)})
    assert found(machine.limits()) == [(512, 100)]
    group = find_cgroup("memory", None, machine.proc, machine.root)
    assert group is not None and group.path == group.top, "and not a folder that is not there"


def test_v1_limits_hold_on_every_level_and_a_huge_number_is_none(machine):
    machine.tell(V1.format("/jobs/one"))
    machine.files({**v1_level("", NONE_V1, 5000 * MB), **v1_level("jobs/", 800 * MB, 600 * MB, cache=100 * MB),
                   **v1_level("jobs/one/", NONE_V1, 50 * MB)})
    assert found(machine.limits()) == [(800, 500)]


def test_where_v1_and_v2_stand_side_by_side_the_one_with_the_controller_counts(machine):
    machine.tell(V1.format("/one"))
    machine.files({**v1_level("one/", 700 * MB, 7 * MB), "unified/cgroup.controllers": "",
                   "unified/memory.max": 5 * MB, "unified/memory.current": 5 * MB})
    assert found(machine.limits()) == [(700, 7)]
    machine.tell("1:name=systemd:/\n0::/one")
    assert machine.limits() == [], "v2 has no memory controller here"
    machine.files({"unified/cgroup.controllers": "memory", **v2_level("unified/one/", 600 * MB, 6 * MB)})
    assert found(machine.limits()) == [(600, 6), (5, 5)]


def test_controllers_that_are_mounted_together_are_found(machine):
    machine.tell(V1.format("/"))
    machine.files({"cpu,cpuacct/cpus/cpu.stat": ""})
    group = find_cgroup("cpu", None, machine.proc, machine.root)
    assert group is not None and group.path == machine.root / "cpu,cpuacct" / "cpus" and group.version == 1


@pytest.mark.parametrize("missing", ["memory.current", "memory.max"])
def test_a_level_with_a_missing_file_is_passed_over(machine, missing):
    machine.tell(V2.format("/a"))
    machine.files({"cgroup.controllers": "memory", **v2_level("a/", 512 * MB, 1), **v2_level("", 900 * MB, MB)})
    (machine.root / "a" / missing).unlink()
    assert found(machine.limits()) == [(900, 1)]


def test_without_statistics_all_of_the_use_counts(machine):
    machine.tell(V2.format("/a"))
    machine.files({"cgroup.controllers": "memory", **v2_level("a/", 512 * MB, 100 * MB, cache=50 * MB)})
    (machine.root / "a" / "memory.stat").unlink()
    assert found(machine.limits()) == [(512, 100)]


@pytest.mark.parametrize("text", ["", "0::/../other"])
def test_a_cgroup_that_cannot_be_seen_gives_no_limit(machine, text):
    machine.tell(text)
    machine.files({"cgroup.controllers": "memory", **v2_level("", 512 * MB, 1)})
    assert machine.limits() == []


def test_limits_of_another_process_come_from_its_own_files(machine):
    machine.tell(V2.format("/"), who="self")
    write(machine.proc / "77", {
        "cgroup": "0::/b", "status": f"Name:\tx\nVmSize:\t  {700 * 1024} kB\nVmData:\t  {60 * 1024} kB",
        "limits": "Limit                     Soft Limit           Hard Limit           Units     \n"
                  f"Max data size             {100 * MB}            unlimited            bytes     \n"
                  f"Max address space         {900 * MB}            unlimited            bytes     "})
    machine.files({"cgroup.controllers": "memory", **v2_level("b/", 512 * MB, 8 * MB)})
    assert {each.kind: found([each])[0] for each in machine.limits(77)} == {
        "cgroup": (512, 8), "address space": (900, 700), "data": (100, 60)}
    assert "process 77" in tightest(machine.limits(77)).where, "40 MB of data are left, 200 MB of address space"


def test_the_machine_is_always_among_the_limits():
    (machine,) = [each for each in find_limits() if each.kind == "machine"]
    assert machine.limit_bytes == psutil.virtual_memory().total and 0 < machine.used_bytes < machine.limit_bytes


def test_a_gpu_counts_only_when_it_is_in_use_already(monkeypatch):
    def asked() -> tuple[int, int]:
        return 300 * MB, 1000 * MB

    cuda = SimpleNamespace(is_initialized=lambda: False, mem_get_info=asked, memory_reserved=lambda: 500 * MB,
                           memory_allocated=lambda: 450 * MB, current_device=lambda: 0)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert [each for each in find_limits() if each.kind == "cuda"] == []
    cuda.is_initialized = lambda: True
    assert found([each for each in find_limits() if each.kind == "cuda"]) == [(1000, 650)], "torch's cache is free"
    assert [each for each in find_limits(os.getppid()) if each.kind == "cuda"] == [], "that is another process"


def test_no_limits_have_no_tightest():
    with pytest.raises(HealthError, match="no memory limit"):
        tightest([])


def limit(used: float, where: str = "cgroup /a", size: int = 1000) -> Limit:
    return Limit(kind="cgroup", limit_bytes=size * MB, used_bytes=int(used * MB), where=where)


def told(uses: list[float], every_s: float = 0.5, **options) -> list[tuple[int, str]]:
    """(index of the look, text) of the warnings while a limit of 1000 MB is used like this."""
    reader = iter(uses)
    watch = MemoryWatch(read=lambda: [limit(next(reader))], **options)
    looks = [(number, watch.look(100.0 + number * every_s)) for number in range(len(uses))]
    return [(number, warning.text) for number, warning in looks if warning]


def test_a_nearly_full_limit_is_told_at_the_first_look():
    assert told([930.0]) == [(0, "memory: cgroup /a is 93% full (930 MB of 1000 MB)")]


def test_steady_growth_is_told_before_the_limit_is_hit():
    warnings = told([400.0 + 10 * number for number in range(60)])  # 20 MB/s
    assert warnings == [(40, "memory: cgroup /a is 80% full (800 MB of 1000 MB) and grows by 20 MB/s: "
                             "full in about 10.0 s")]


def test_fast_growth_is_not_told_below_half():
    assert told([40.0 * number for number in range(13)]) == [], "80 MB/s from nothing is a program that starts"
    assert [number for number, _ in told([40.0 * number for number in range(20)])] == [13]


def test_growth_with_an_odd_sample_is_still_seen():
    uses = [500.0 + 10 * number for number in range(40)]
    uses[20] = 100.0
    assert [number for number, _ in told(uses)] == [30]


@pytest.mark.parametrize("seed", range(20))
def test_memory_that_every_step_takes_and_gives_back_is_no_growth(seed):
    chance = random.Random(seed)
    assert told([550.0 + 300 * chance.random() for _ in range(300)], every_s=0.1) == []


@pytest.mark.parametrize("before", range(0, 30, 3))
def test_a_single_jump_is_no_growth(before):
    assert told([520.0] * before + [860.0] * 60) == []


def test_too_few_samples_are_no_trend():
    assert trend([(float(second), second * MB) for second in range(5)]) == 0.0
    assert trend([(float(second), second * MB) for second in range(6)]) == pytest.approx(MB)


def test_a_clock_that_stands_still_is_no_trend():
    assert trend([(1.0, number) for number in range(10)]) == 0.0


def test_an_episode_is_told_once_and_ends_only_when_the_use_has_fallen_well_below():
    uses = [910.0, 950.0, 890.0, 910.0, 860.0, 920.0, 700.0, 920.0]
    assert [number for number, _ in told(uses)] == [0, 7]


def test_the_most_urgent_limit_is_told_first_and_the_other_at_the_next_look():
    watch = MemoryWatch(read=lambda: [limit(9100, "machine", 10_000), limit(950, "cgroup")])
    texts = [warning.limit.where if (warning := watch.look(float(now))) else None for now in range(3)]
    assert texts == ["cgroup", "machine", None]


def test_a_limit_that_is_overrun_is_hit_now():
    warning = judge(limit(1100), rate=5.0 * MB, warn=0.9, horizon_s=10.0)
    assert warning is not None and warning.hit_in_s == 0.0


def test_a_watch_reads_the_real_limits_by_itself():
    watch = MemoryWatch(warn=0.999)
    assert watch.look(1.0) is None and watch._seen, "something was sampled"


@pytest.mark.parametrize("warn", [0.0, 0.5, 1.0, 90.0])
def test_a_warning_level_that_cannot_work_is_refused(warn):
    with pytest.raises(HealthError, match="between"):
        MemoryWatch(warn)


def test_kills_are_counted_by_the_cgroup_of_the_process_and_can_be_read_after_its_end(machine):
    machine.tell(V2.format("/a"), who="77")
    machine.files({"cgroup.controllers": "memory", "a/memory.events": "low 0\noom 5\noom_kill 3\noom_group_kill 0"})
    count = OomCount.of(77, machine.proc, machine.root)
    (machine.proc / "77" / "cgroup").unlink()
    assert count.read() == 3
    machine.files({"a/memory.events": "oom_kill 4"})
    assert count.read() == 4


def test_v1_counts_kills_in_its_own_file(machine):
    machine.tell(V1.format("/a"))
    machine.files({"memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2"})
    assert OomCount.of(None, machine.proc, machine.root).read() == 2


@pytest.mark.parametrize("files", [{}, {"cgroup.controllers": "memory"}], ids=["no cgroups", "no counter"])
def test_kills_that_nobody_counts_are_not_known(machine, files):
    machine.tell(V2.format("/"))
    machine.files(files)
    assert OomCount.of(None, machine.proc, machine.root).read() is None


KILLED, EXIT_137, SEGFAULT, EXIT_1 = int(signal.SIGKILL), 137 << 8, int(signal.SIGSEGV), 1 << 8


@pytest.mark.parametrize(("status", "before", "after", "for_memory", "text"), [
    (KILLED, 2, 3, True, "killed by the kernel for memory"),
    (EXIT_137, 0, 1, True, "killed by the kernel for memory"),
    (KILLED, 2, 2, False, "killed by somebody"),
    (EXIT_137, 2, 2, False, "killed by somebody"),
    (KILLED, None, 2, None, "cannot be known here"),
    (KILLED, 2, None, None, "cannot be known here"),
    (SEGFAULT, 2, 3, False, "killed by signal 11"),
    (EXIT_1, 2, 3, False, "exited with code 1"),
    (0, None, None, False, "exited with code 0"),
])
def test_the_kernels_kills_are_told_apart_from_others(status, before, after, for_memory, text):
    end = explain_end(status, before, after)
    assert end.for_memory is for_memory and text in end.text


LOOK, DIES = "look", "dies"


@pytest.mark.parametrize(("moments", "found"), [
    ([(1, DIES)], [True]),
    ([(1, LOOK), (1, DIES)], [True]),  # counted when it was chosen, dead only after the look
    ([(1, LOOK), (1, LOOK), (1, DIES)], [False]),  # somebody else's: ours would have been found by now
    ([(0, LOOK), (0, DIES)], [False]),
    ([(2, DIES), (2, DIES)], [True, True]),  # two at once
    ([(2, LOOK), (2, DIES), (2, DIES), (2, DIES)], [True, True, False]),
    ([(1, DIES), (1, LOOK), (1, DIES)], [True, False]),
    ([(1, LOOK), (1, DIES), (1, LOOK), (2, DIES)], [True, True]),
], ids=str)
def test_a_kill_is_claimed_once_and_in_time(moments, found):
    toll = Toll(settled=0, seen=0)
    ends = []
    for kills, moment in moments:
        if moment == LOOK:
            toll.look(kills)
        else:
            ends.append(explain_end(KILLED, toll.settled, kills).for_memory)
            if ends[-1]:
                toll.claim()
    assert ends == found


def raised(action: Callable[[], object]) -> BaseException:
    try:
        action()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def in_a_small_address_space(action: Callable[[], object], extra: int = 300 * MB) -> dict:
    """What `action` raises in a fork of this process that may take `extra` more bytes."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(30)
            torch.set_num_threads(1)  # the threads of the parent are not there any more
            size = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (size + extra, size + extra))
            error = raised(action)
            said = {"kind": type(error).__name__, "text": str(error), "out_of_memory": is_out_of_memory(error),
                    "limits": [each.kind for each in find_limits()]}
            os.write(writer, json.dumps(said).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert text, f"the child said nothing (status {status})"
    return json.loads(text)


def python_bytes() -> object:
    return bytearray(1 << 30)


def numpy_array() -> object:
    return numpy.ones(1 << 27)


def torch_tensor() -> object:
    return torch.empty(1 << 28)


def torch_vector() -> object:
    """Inside, topk keeps a std::vector that is four times as large as its input."""
    return torch.zeros(30_000_000).topk(5)


def torch_backward() -> object:
    """The forward pass reads one number many times; the gradient needs a place for each time."""
    weight = torch.ones(1, requires_grad=True)
    return torch.dot(weight.expand(1 << 28), torch.ones(1).expand(1 << 28)).backward()


def mapped_memory() -> object:
    import mmap
    return mmap.mmap(-1, 1 << 30)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce RLIMIT_AS")
@pytest.mark.parametrize(("action", "kind", "text"), [
    (python_bytes, "MemoryError", ""),
    (numpy_array, "MemoryError", "Unable to allocate"),
    (torch_tensor, "RuntimeError", "DefaultCPUAllocator: can't allocate memory"),
    (torch_vector, "RuntimeError", "std::bad_alloc"),
    (torch_backward, "RuntimeError", "DefaultCPUAllocator: can't allocate memory"),
    (mapped_memory, "OSError", "Cannot allocate memory"),
])
def test_what_allocators_really_say_is_recognised(action, kind, text):
    said = in_a_small_address_space(action)
    assert (said["kind"], said["out_of_memory"]) == (kind, True), said
    assert text in said["text"]
    assert "address space" in said["limits"], "and the limit that was hit is known"


def test_a_wrapper_around_a_failed_allocation_is_recognised():
    def wrapped() -> None:
        try:
            raise MemoryError
        except MemoryError as error:
            raise ValueError("layer 3 failed") from error

    def while_handling() -> None:
        try:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory: you tried")
        except RuntimeError:
            raise KeyError("x")  # noqa: B904

    def on_purpose() -> None:
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("the table is too large") from None

    assert is_out_of_memory(raised(wrapped)) and is_out_of_memory(raised(while_handling))
    assert not is_out_of_memory(raised(on_purpose)), "somebody took care to hide it"


def test_errors_in_a_circle_come_to_an_end():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_a_gpu_that_is_full_is_recognised():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))


@pytest.mark.parametrize("error", [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("std::bad_alloc"), KeyboardInterrupt(),
    RuntimeError("the memory bank is empty"), OSError(errno.ENOSPC, "No space left on device")], ids=itertools.count())
def test_other_errors_are_no_lack_of_memory(error):
    assert not is_out_of_memory(error)
