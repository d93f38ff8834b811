"""The lab's monitor: limits that follow the step time, findings, and a watchdog that says where a loop hangs."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ftlab.config import HealthConfig
from ftlab.errors import ConfigError, HealthError
from ftlab.health import monitor as module
from ftlab.health.memory import Limit
from ftlab.health.monitor import Finding, HealthMonitor
from tests.limits import SOON_S


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def train(monitor: HealthMonitor, clock: Clock, steps: int, step_s: float) -> None:
    for _ in range(steps):
        clock.now += step_s
        monitor.step_done()


# ---- progress ------------------------------------------------------------------------------------------------------


def test_progress_cannot_be_judged_before_anything_began():
    with pytest.raises(HealthError, match="no step was begun") as refusal:
        HealthMonitor().check_progress()
    assert "monitor.start()" in refusal.value.hint and "monitor.step_done()" in refusal.value.hint


def test_until_the_step_time_is_known_the_given_timeout_holds(clock):
    monitor = HealthMonitor(300, clock=clock)
    monitor.start()
    clock.now += 300.0
    assert monitor.check_progress()
    clock.now += 0.1
    assert not monitor.check_progress()


@pytest.mark.parametrize(("step_s", "limit"), [(0.01, 1.0), (0.5, 4.0), (60.0, 480.0), (600.0, 4800.0)])
def test_then_the_limit_follows_the_step_time_whatever_the_timeout(clock, step_s, limit):
    monitor = HealthMonitor(300, clock=clock)
    monitor.start()
    train(monitor, clock, 10, step_s)
    assert monitor.limit() == pytest.approx(limit)
    clock.now += 0.99 * limit
    assert monitor.check_progress()
    clock.now += 0.02 * limit
    assert not monitor.check_progress()


def test_who_asks_for_less_than_the_floor_gets_it(clock):
    monitor = HealthMonitor(0.2, clock=clock)
    train(monitor, clock, 10, 0.001)
    assert monitor.limit() == 0.2


def test_a_loop_that_only_tells_its_steps_is_watched_too(clock):
    monitor = HealthMonitor(clock=clock)
    train(monitor, clock, 10, 0.01)
    assert monitor.check_progress() and monitor.step == 10


def test_a_stall_is_told_once_and_the_next_one_again(clock):
    told: list[Finding] = []
    monitor = HealthMonitor(clock=clock, on_finding=told.append)
    train(monitor, clock, 10, 0.02)
    for _ in range(2):
        clock.now += 5.0
        assert [monitor.check_progress() for _ in range(3)] == [False] * 3
        monitor.step_done()
        assert monitor.check_progress()
    assert [(each.cause, each.step) for each in told] == [("stall", 10), ("stall", 11)]
    assert told[0].reason == "no step was committed for 5.0 s; 1 s are allowed, a step usually takes 0.02 s"
    assert told[0].at == pytest.approx(100.2 + 5.0) and told[0].data["limit_s"] == 1.0


def test_time_in_a_pause_is_neither_a_stall_nor_a_step_time(clock):
    monitor = HealthMonitor(clock=clock)
    train(monitor, clock, 10, 0.01)
    for _ in range(20):
        with monitor.paused():
            clock.now += 900.0
            assert monitor.check_progress()
        assert monitor.check_progress()
        train(monitor, clock, 1, 0.01)
    assert monitor.limit() == 1.0 and not monitor.findings
    clock.now += 2.0
    assert not monitor.check_progress(), "after the pause it counts again"


def test_starting_again_forgives_what_was_before(clock):
    monitor = HealthMonitor(10, clock=clock)
    monitor.start()
    clock.now += 11.0
    assert not monitor.check_progress()
    monitor.start()
    assert monitor.check_progress()


@pytest.mark.parametrize("timeout", [0, -1, math.nan])
def test_a_timeout_that_cannot_work_is_refused(timeout):
    with pytest.raises(ConfigError, match="timeout_seconds must be positive"):
        HealthMonitor(timeout)


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "bad"), [(0.5, False), (torch.tensor(0.5), False), (math.nan, True),
                                           (torch.tensor(math.inf), True), (-math.inf, True)])
def test_nan_and_inf_are_detected_in_a_loss(loss, bad):
    monitor = HealthMonitor()
    assert monitor.detect_nan_inf(loss) is bad
    assert [each.cause for each in monitor.findings] == ["numbers"] * bad


@pytest.mark.parametrize("loss", [torch.rand(3), torch.tensor(3), 3, True, "nan", None])
def test_what_is_no_loss_is_refused_rather_than_called_well(loss):
    with pytest.raises(HealthError, match="a loss is one floating-point number"):
        HealthMonitor().detect_nan_inf(loss)


def test_a_step_is_judged_by_its_loss_and_its_gradients(clock):
    monitor = HealthMonitor(clock=clock)
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan])
    assert monitor.check_step() is None
    assert monitor.check_step(0.5) is None
    assert monitor.check_step(gradients=[good, None]) is None
    assert monitor.check_step(torch.tensor(math.nan)).reason == "the loss is NaN"
    found = monitor.check_step(0.5, [good, bad])
    assert (found.cause, found.reason, found.at, found.step) == ("numbers", "the gradient norm is NaN", 100.0, 0)
    assert list(monitor.findings)[-1] is found and found.data["loss"] == 0.5
    with pytest.raises(HealthError, match=r"shape \[4\]"):
        monitor.check_step(torch.rand(4))


def test_a_spike_is_found_and_does_not_become_usual_even_if_the_loop_goes_on(clock):
    monitor = HealthMonitor(clock=clock, config=HealthConfig(loss_spike=6.0))
    for _ in range(10):
        assert monitor.check_step(1.0) is None
        monitor.step_done()
    assert "deviations above its usual 1" in monitor.check_step(50.0).reason
    monitor.step_done()
    assert monitor.numbers.state_dict()["loss"] == [1.0] * 10


def test_numbers_of_a_step_that_was_not_committed_are_not_usual(clock):
    monitor = HealthMonitor(clock=clock, config=HealthConfig(loss_spike=6.0))
    monitor.check_step(1.0)
    monitor.check_step(2.0)
    monitor.step_done()
    monitor.step_done()
    assert monitor.numbers.state_dict()["loss"] == [2.0]
    monitor.check_step(3.0)
    assert monitor.check_step(math.nan)
    monitor.step_done()
    assert monitor.numbers.state_dict()["loss"] == [2.0]


def test_a_bad_step_is_left_out_of_a_real_training():
    torch.manual_seed(0)
    model, monitor = nn.Linear(2, 1), HealthMonitor()
    for step in range(10):
        scale = math.nan if step == 4 else 1.0
        loss = (model(torch.ones(4, 2)) * scale).square().mean()
        loss.backward()
        if not monitor.check_step(loss, [p.grad for p in model.parameters()]):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            monitor.step_done()
        model.zero_grad()
    assert monitor.step == 9 and [each.step for each in monitor.findings] == [4]
    assert all(torch.isfinite(p).all() for p in model.parameters())


# ---- memory --------------------------------------------------------------------------------------------------------


def limit(share: float) -> Limit:
    return Limit(kind="cgroup", limit_bytes=1000 << 20, used_bytes=int(share * (1000 << 20)), where="cgroup /here")


def test_memory_is_nearly_full_as_long_as_it_is_and_that_is_told_once(monkeypatch, clock):
    monitor = HealthMonitor(clock=clock)
    seen = []
    for share in (0.5, 0.95, 0.95, 0.5, 0.95):
        monkeypatch.setattr(module, "find_limits", lambda share=share: [limit(share)])
        clock.now += 60.0
        seen.append(monitor.detect_oom())
    assert seen == [False, True, True, False, True]
    assert [each.cause for each in monitor.findings] == ["memory"] * 2
    assert "cgroup /here is 95% full" in monitor.findings[0].reason
    assert monitor.findings[0].data["limit_bytes"] == 1000 << 20


@pytest.mark.parametrize("error", [OSError("no /proc"), RuntimeError("no driver"), ValueError("odd file")])
def test_where_limits_cannot_be_read_memory_is_not_called_full(monkeypatch, error):
    def cannot() -> list[Limit]:
        raise error

    monkeypatch.setattr(module, "find_limits", cannot)
    assert HealthMonitor().detect_oom() is False


def test_the_limits_of_this_machine_can_be_read():
    monitor = HealthMonitor()
    monitor.detect_oom()
    assert any(each.kind == "machine" for each in monitor._limits)


# ---- findings ------------------------------------------------------------------------------------------------------


def test_a_callback_that_fails_is_logged_and_does_not_break_training(caplog):
    def fails(finding: Finding) -> None:
        raise KeyError("mine")

    monitor = HealthMonitor(on_finding=fails)
    with caplog.at_level(logging.ERROR, logger="ftlab.health.monitor"):
        assert monitor.detect_nan_inf(math.nan)
    assert "on_finding failed for: the loss is NaN" in caplog.text and "KeyError: 'mine'" in caplog.text
    assert len(monitor.findings) == 1


def test_findings_are_bounded():
    monitor = HealthMonitor()
    for _ in range(1000):
        monitor.detect_nan_inf(math.nan)
    assert len(monitor.findings) == 100


def test_findings_without_a_handler_are_silent(capfd):
    HealthMonitor().detect_nan_inf(math.nan)
    assert capfd.readouterr() == ("", ""), "a line on stderr costs a student the marks of a cell"


# ---- the watchdog: a real thread and a loop that really hangs ------------------------------------------------------


class Loader:
    """Gives a batch at a time, and blocks where it is told to until it is let go."""

    def __init__(self, blocks_at: int) -> None:
        self.blocks_at, self.go_on = blocks_at, threading.Event()

    def __iter__(self) -> Iterator[int]:
        for batch in range(self.blocks_at + 5):
            if batch == self.blocks_at:
                assert self.go_on.wait(SOON_S), "nobody let the loader go on"
            yield batch


def hang(monitor: HealthMonitor, told: queue.Queue, blocks_at: int = 5) -> list[Finding]:
    """Train with a loader that hangs until the watchdog has told; all that it told."""
    loader, found = Loader(blocks_at), []

    def wait_for_finding() -> None:
        found.append(told.get(timeout=SOON_S))
        loader.go_on.set()

    helper = threading.Thread(target=wait_for_finding)
    helper.start()
    with monitor.watching():
        for _ in loader:
            monitor.step_done()
    helper.join()
    return found + [told.get() for _ in range(told.qsize())]


def test_the_watchdog_tells_once_where_the_loop_hangs():
    told: queue.Queue = queue.Queue()
    (found,) = hang(HealthMonitor(0.2, on_finding=told.put), told)
    assert found.cause == "stall" and found.step == 5
    assert found.reason.startswith("MainThread is in `assert self.go_on.wait(SOON_S)")
    assert "test_monitor.py:" in found.reason and "no step was committed for 0." in found.reason
    assert "in hang" in found.data["stacks"], "the whole stack is there too"


def test_the_thread_that_trains_is_named_even_if_it_is_not_the_main_thread():
    told: queue.Queue = queue.Queue()
    found: list[Finding] = []
    monitor = HealthMonitor(0.2, on_finding=told.put)
    trainer = threading.Thread(target=lambda: found.extend(hang(monitor, told)), name="trainer")
    trainer.start()
    trainer.join()
    assert found[0].reason.startswith("trainer is in `assert self.go_on.wait(SOON_S)")


def test_the_watchdog_ends_with_its_block_and_leaves_no_thread():
    before = set(threading.enumerate())
    monitor = HealthMonitor()
    begin = time.monotonic()
    with pytest.raises(ValueError), monitor.watching():
        assert {each.name for each in set(threading.enumerate()) - before} == {"ftlab-watchdog"}
        raise ValueError("of the loop")
    assert set(threading.enumerate()) <= before
    assert time.monotonic() - begin < 5.0, "it does not wait for its next look"
    assert monitor.check_progress(), "and the clock was started"


class Looks:
    """Counts the looks of a watchdog, so that a test can wait for them."""

    def __init__(self, monitor: HealthMonitor) -> None:
        self._count = threading.Semaphore(0)
        inner = monitor._look_at_progress

        def look(now: float, with_stacks: bool) -> bool:
            try:
                return inner(now, with_stacks)
            finally:
                self._count.release()

        monitor._look_at_progress = look

    def wait(self, looks: int) -> None:
        for _ in range(looks):
            assert self._count.acquire(timeout=SOON_S), "the watchdog does not look"


def test_a_loop_that_gets_on_or_pauses_is_not_accused_and_one_that_does_not_is(clock):
    monitor = HealthMonitor(0.2, clock=clock)
    looks = Looks(monitor)

    def let_time_pass(work=lambda: None, ticks: int = 25) -> None:
        for _ in range(ticks):  # more than twice the limit, in the watchdog's own rhythm
            clock.now += 0.02
            work()
            looks.wait(1)

    with monitor.watching():
        let_time_pass(monitor.step_done)
        with monitor.paused():
            let_time_pass()
        monitor.step_done()
        assert not monitor.findings
        begin = clock.now
        while not monitor.findings:
            assert clock.now - begin < 10.0, "nobody tells of the stall"
            let_time_pass(ticks=1)
    assert monitor.findings[0].cause == "stall"


def test_time_in_which_the_whole_process_stood_still_is_no_stall(clock):
    monitor = HealthMonitor(0.5, clock=clock)
    looks = Looks(monitor)
    with monitor.watching():
        looks.wait(2)
        clock.now += 900.0  # the watchdog did not look either
        looks.wait(3)
        assert not monitor.findings


def test_a_watchdog_that_cannot_look_once_looks_again(caplog):
    told: queue.Queue = queue.Queue()
    monitor = HealthMonitor(0.2, on_finding=told.put)
    inner, failures = monitor._look_at_progress, [OSError("too many open files")]

    def look(now: float, with_stacks: bool) -> bool:
        if failures:
            raise failures.pop()
        return inner(now, with_stacks)

    monitor._look_at_progress = look
    assert len(hang(monitor, told)) == 1
    assert "the watchdog could not look" in caplog.text
